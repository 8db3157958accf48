"""Replays of real recordings, and the result of what-if."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from allocator.device import MIB
from hypothesis import given
from hypothesis import strategies as st
from memory import builders
from memory.strategies import LAW, garbage, recordings
from memory.whatif.recordings import GIB, Program, read

from cudakit.api.memory import replay_snapshots
from cudakit.errors import InputError, SnapshotError, Unsupported, UsageError
from cudakit.memory.load import load
from cudakit.memory.result import DeviceWhatIf, Limit
from cudakit.memory.snapshot import HOST, DeviceTrace, Snapshot
from cudakit.memory.whatif import WhatIfSpec
from cudakit.torch_rules.settings import Settings

ROOT = Path(__file__).parents[3]
RECORDINGS = sorted((*ROOT.glob("tests/data/*.pkl.gz"), *ROOT.glob("examples/memory/*.pkl.gz")))
GROWS = "expandable_segments:True"


def ask(snapshot: Snapshot, *settings: str, limit: int | None = None) -> DeviceWhatIf:
    (device,) = replay_snapshots([snapshot], WhatIfSpec(settings, limit)).devices
    return device


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name)
def test_replay_of_a_pytorch_recording_equals_every_figure(path: Path) -> None:
    device = ask(load(str(path)), "")
    assert device.differences == ()
    assert device.reasons == ()
    assert device.replayed.peak == device.recorded.peak
    assert device.replayed.end == device.recorded.end
    assert device.replayed.ooms == device.recorded.ooms
    assert device.recorded.device_allocations > 0


def test_defaults_replay_equals_a_recording_with_defaults() -> None:
    device = ask(load(str(ROOT / "tests/data/oom.pkl.gz")), "")
    assert device.tried[0] == replace(device.replayed, name="defaults")
    assert device.recorded.retries == device.replayed.retries == 4


def test_expandable_recording_is_replayed_with_expandable_segments() -> None:
    """The flag was off again when the file was written."""
    device = ask(load(str(ROOT / "tests/data/expandable.pkl.gz")), "", GROWS)
    assert device.replayed.settings == GROWS
    assert device.tried[1] == replace(device.replayed, name=GROWS)
    assert device.tried[0].peak.reserved_bytes > device.replayed.peak.reserved_bytes


def fragmented() -> Program:
    """Leave free what no request of a larger size can have."""
    program = Program(capacity=GIB)
    for n in range(1, 10):
        program.alloc(n * 20 * MIB)
        program.free()
    return program


def test_headline_names_settings_that_reserve_less() -> None:
    device = ask(fragmented().snapshot(), "max_split_size_mb:40", GROWS)
    assert device.headline == f"{GROWS} would have reserved 720 MiB (80%) less at the peak"
    assert device.best == 1
    assert device.limit is None


def test_headline_also_names_the_other_settings_that_help() -> None:
    device = ask(
        load(str(ROOT / "examples/memory/kv_cache.pkl.gz")), GROWS, "max_split_size_mb:128"
    )
    assert [outcome.ooms for outcome in device.tried] == [0, 0]
    assert device.headline == (
        f"{GROWS} would have let the failed request succeed, with 139 GiB reserved at the peak;"
        " max_split_size_mb:128 would also have helped"
    )


def test_headline_reports_settings_without_effect() -> None:
    device = ask(fragmented().snapshot(), "")
    assert device.best is None
    assert device.headline == (
        "The defaults would not have reserved less at the peak than the recorded settings (900 MiB)"
    )


def test_headline_reports_settings_that_reserve_more() -> None:
    program = Program(Settings(expandable_segments=True), GIB)
    program.alloc(15 * MIB)
    device = ask(program.snapshot(), "large_segment_size_mb:32,expandable_segments:True")
    assert device.headline.endswith("would have reserved 12.0 MiB more at the peak")


def test_headline_names_settings_that_let_the_failed_request_succeed() -> None:
    program = Program(Settings(memory_fraction=0.5), GIB)
    for _ in range(30):
        program.alloc(15 * MIB)  # each in a segment of 16 MiB
    assert program.alloc(60 * MIB) == 0
    device = ask(program.snapshot(), "max_split_size_mb:20", GROWS)
    assert device.recorded.ooms == device.replayed.ooms == 1
    assert device.limit == Limit(480 * MIB, "reserved")
    assert device.differences == ()
    assert device.best is None

    roomy = ask(program.snapshot(), GROWS, limit=520 * MIB)
    assert roomy.baseline.ooms == 1
    assert (
        roomy.headline == f"{GROWS} would have let the failed request succeed, with 520 MiB"
        " reserved at the peak"
    )


def test_limit_of_a_full_device_is_reserved_plus_free_memory() -> None:
    program = Program(capacity=100 * MIB)
    program.alloc(60 * MIB)
    assert program.alloc(50 * MIB) == 0
    device = ask(program.snapshot(), "")
    assert device.limit == Limit(100 * MIB, "device full")
    assert device.differences == ()


def test_given_limit_also_replays_the_recorded_settings() -> None:
    program = fragmented()
    device = ask(program.snapshot(), GROWS, limit=300 * MIB)
    assert device.baseline.name == "recorded settings"
    assert device.baseline.retries > 0  # type: ignore[operator]
    assert device.baseline.shortage is None
    assert device.replayed.retries == 0
    assert device.tried[0].limit_bytes == 300 * MIB


def test_replay_ends_at_the_first_new_failure() -> None:
    program = fragmented()
    device = ask(program.snapshot(), "", limit=100 * MIB)
    (tried,) = device.tried
    assert tried.shortage is not None
    assert tried.shortage.size_bytes == 120 * MIB
    assert tried.peak.reserved_bytes == 100 * MIB
    assert (
        device.headline
        == "The defaults would not have let the program run to the end within the memory limit,"
        " and neither would the recorded settings"
    )


def test_memory_fraction_limits_a_replay() -> None:
    device = ask(fragmented().snapshot(), "per_process_memory_fraction:0.5", limit=GIB)
    assert device.tried[0].limit_bytes == GIB // 2
    assert device.tried[0].peak.reserved_bytes <= GIB // 2


def test_release_by_the_program_is_part_of_every_replay() -> None:
    program = Program(capacity=GIB)
    program.alloc(30 * MIB)
    program.free()
    program.allocator.empty_cache()
    program.alloc(1)
    device = ask(program.snapshot(), GROWS)
    assert device.tried[0].end.reserved_bytes == 2 * MIB
    assert device.limit is None


def test_late_trace_has_a_difference_with_its_reason() -> None:
    program = fragmented()
    program.alloc(30 * MIB)
    snapshot = program.allocator.snapshot()
    del snapshot["device_traces"][0][:-2]
    device = ask(read(snapshot), "")
    assert [(d.figure, d.recorded, d.replayed) for d in device.differences] == [
        ("peak reserved", 900 * MIB, 180 * MIB),
        ("end reserved", 900 * MIB, 180 * MIB),
    ]
    assert "the replay allocates again" in device.reasons[0]


def test_allocations_from_before_the_trace_are_replayed_and_freed() -> None:
    program = Program(capacity=GIB)
    program.alloc(30 * MIB)
    program.alloc(40 * MIB)
    program.use(0, 11)
    program.free(0)
    program.alloc(1)
    snapshot = program.allocator.snapshot()
    del snapshot["device_traces"][0][:4]
    device = ask(read(snapshot), "")
    assert device.differences == ()
    assert device.replayed.end.allocated_bytes == 40 * MIB + 512
    assert device.replayed.end.active_bytes == 70 * MIB + 512


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ("expandable_segments:Yes", InputError, "settings 'expandable_segments:Yes', character 21"),
        ("backend:cudaMallocAsync", Unsupported, "backend:cudaMallocAsync is not possible"),
        ("per_process_memory_fraction:0.5", UsageError, "does not record the size"),
    ],
)
def test_unsupported_settings_are_rejected(
    settings: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        ask(fragmented().snapshot(), settings)


def test_snapshot_without_a_trace_is_rejected_with_a_hint() -> None:
    snapshot = fragmented().allocator.snapshot()
    snapshot["device_traces"] = [[]]
    with pytest.raises(SnapshotError, match="has no trace to replay") as refused:
        ask(read(snapshot), "")
    assert "cudakit run --memory" in refused.value.hint


@pytest.mark.parametrize(("device", "words"), [(3, "no device 3"), (HOST, "pinned host memory")])
def test_unreplayable_device_is_a_usage_error(device: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        replay_snapshots([fragmented().snapshot()], WhatIfSpec(("",), device=device))


def test_progress_is_reported_for_every_replay() -> None:
    told: list[tuple[str, float]] = []

    def progress(stage: str, fraction: float) -> None:
        told.append((stage, fraction))

    replay_snapshots([fragmented().snapshot()], WhatIfSpec((GROWS,)), progress)
    assert told == [("replaying with recorded settings", 0.0), (f"replaying with {GROWS}", 0.5)]


def test_invalid_settings_text_is_replaced_by_the_recorded_values() -> None:
    snapshot: dict[str, Any] = fragmented().allocator.snapshot()
    settings = snapshot["allocator_settings"]
    settings["PYTORCH_CUDA_ALLOC_CONF"] = "no such thing"
    settings["max_split_size"] = 40 * MIB
    settings["roundup_power2_divisions"]["16"] = 4
    device = ask(read(snapshot), "")
    assert device.replayed.settings.startswith("max_non_split_rounding_mb:20,max_split_size_mb:40,")
    assert "16:4" in device.replayed.settings
    assert np.isfinite(device.replayed.fragmentation)


@LAW
@given(st.one_of(recordings(pools=4).map(lambda history: history.trace()), garbage()))
def test_arbitrary_traces_can_be_replayed(trace: DeviceTrace) -> None:
    device = replace(trace, device=0)
    if not len(device.events):
        return
    found = ask(builders.snapshot(device), "", GROWS, limit=GIB)
    assert found.headline
    assert len(found.tried) == 2
