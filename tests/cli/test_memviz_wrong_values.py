"""Well-formed files with impossible content: any value in any place, and contradicting numbers."""

from __future__ import annotations

import itertools
import json
import pickle
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from invocation import Cli
from memory.load import files
from memory.load.files import GIB, LARGE, MIB, block, changed, event, frame, pickled, segment

from cudakit.errors import InputError, UsageError
from cudakit.memory.analyze import analyze
from cudakit.memory.load import load
from cudakit.memory.report import report
from cudakit.memory.selection import MemorySpec
from cudakit.memory.snapshot import Snapshot
from cudakit.report import console, html
from cudakit.report import json as json_renderer

WRONG = [None, -1, 2**70, "x", [], {}, 1.5]


def sample() -> dict[str, Any]:
    """Return a small snapshot with every kind of value once."""
    pieces = [
        block(LARGE, MIB, MIB, "active_allocated", frames=[frame("main")]),
        {"size": MIB, "state": "inactive", "history": [{"real_size": 7, "frames": []}]},
    ]
    trace = [
        event("segment_map", LARGE, 2 * MIB, frames=[]),
        event("alloc", LARGE, MIB, frames=[frame("main")], pool_id=(0, 1)),
        files.failed(GIB, device_free=MIB),
    ]
    host = {"address": LARGE, "size": MIB, "allocated": 1, "active": 1}
    return files.snapshot(
        segments=[segment(LARGE, 2 * MIB, pieces, is_expandable=True)],
        device_traces=[trace],
        external_annotations=[{"name": "a", "stage": "START", "device": 0, "time_us": 5}],
        allocator_settings={"max_split_size": -1, "roundup_power2_divisions": {"1": 4}},
        host_segments=[host],
        host_traces=[[event("alloc", LARGE, MIB, frames=[])]],
        trace_alloc_overflowed=[False],
    )


def load_or_refuse(path: Path) -> Snapshot | InputError:
    """Load a file, or return its error, which must have a hint."""
    try:
        return load(str(path))
    except InputError as refused:
        error = refused
    assert error.message.startswith(str(path))
    assert error.hint
    return error


def columns(snapshot: Snapshot) -> int:
    """Return a number per distinct snapshot content."""
    return zlib.crc32(pickle.dumps(replace(snapshot, size_bytes=0)))


def whole_report(snapshot: Snapshot, spec: MemorySpec, *, pictures: bool = True) -> None:
    """Run the analysis and all outputs but pictures, which take most of the time."""
    result = analyze([snapshot], spec)
    json.loads(json_renderer.render(result))
    document = report(result)
    if pictures:
        assert " nan" not in console.render(document, width=80, color=False).lower()
        assert "".join(html.render(document)).endswith("</html>\n")


def spoiled() -> Iterator[tuple[Any, tuple[Any, ...], Any]]:
    """Yield the sample with one wrong value, for every place and value."""
    root = sample()
    for place, wrong in itertools.product(files.places(root), WRONG):
        yield changed(root, place, wrong), place, wrong


def test_wrong_value_anywhere_gives_a_report_or_an_error(tmp_path: Path) -> None:
    path, reported = tmp_path / "snapshot.pkl", set()
    for root, place, wrong in spoiled():
        path.write_bytes(pickled(root))
        loaded = load_or_refuse(path)
        # Most values are ignored and give the same snapshot.
        if isinstance(loaded, InputError) or (same := columns(loaded)) in reported:
            continue
        reported.add(same)
        try:
            whole_report(loaded, MemorySpec(), pictures=len(reported) % 5 == 0)
        except Exception as error:
            error.add_note(f"with {wrong!r} at {place}")
            raise
    assert len(reported) > 50


def test_json_and_pickle_agree_on_a_wrong_value(tmp_path: Path) -> None:
    for root, place, wrong in itertools.islice(spoiled(), len(WRONG), None, 8):
        outcomes = []
        for form in ("protocol-4.pkl", "plain.json"):
            path = tmp_path / form
            path.write_bytes(files.FORMS[form](root))
            loaded = load_or_refuse(path)
            outcomes.append(
                loaded.message.removeprefix(str(path))
                if isinstance(loaded, InputError)
                else [(d.device, d.events.action.tolist(), d.warnings) for d in loaded.devices]
            )
        assert outcomes[0] == outcomes[1], (place, wrong)


def test_command_exits_with_0_or_2_for_any_value(cli: Cli, tmp_path: Path) -> None:
    path, page = tmp_path / "snapshot.pkl", tmp_path / "page.html"
    for root, *spoiler in itertools.islice(spoiled(), 0, None, 17):
        path.write_bytes(pickled(root))
        run = cli("memviz", path, "--json", "-q", "-o", page, "--force")
        assert run.exit_code in (0, 2), spoiler
        assert ("error" in json.loads(run.stdout)) == (run.exit_code == 2), spoiler
        assert run.stderr == "", spoiler


# Contradicting numbers at the limits of valid values.

ADDRESSES = st.sampled_from(
    [0, 512, LARGE, LARGE + 512, LARGE + MIB, 2**49, 2**57, 2**63, 2**64 - 1]
)
SIZES = st.sampled_from([0, 1, 511, 512, MIB, 2 * MIB + 512, 20 * MIB, 2**40, 2**48, 2**49])
ACTIONS = st.sampled_from(
    [
        *("alloc", "free_requested", "free_completed", "free", "oom", "snapshot", "annotate"),
        *("segment_alloc", "segment_free", "segment_map", "segment_unmap"),
    ]
)
EVENTS = st.builds(
    event,
    ACTIONS,
    ADDRESSES,
    SIZES,
    stream=st.sampled_from([0, 5, -1]),
    time_us=st.sampled_from([0, -1, 5, 2**63 - 1, -(2**63)]),
    pool_id=st.sampled_from([None, (0, 0), (0, 1), (2**63, 1)]),
)
BLOCKS = st.builds(
    block,
    ADDRESSES,
    SIZES,
    SIZES,
    st.sampled_from(["active_allocated", "active_pending_free", "inactive"]),
)
SEGMENTS = st.builds(
    segment,
    ADDRESSES.filter(lambda address: address <= 2**57),
    SIZES,
    st.lists(BLOCKS, max_size=3),
    is_expandable=st.booleans(),
    stream=st.sampled_from([0, 5]),
)
SETTINGS = st.fixed_dictionaries(
    {
        "max_split_size": st.sampled_from([-1, 1, MIB, 2**63, 2**64 - 1]),
        "roundup_power2_divisions": st.sampled_from(
            [{}, {"1": 4, "01": 8}, {"1": 1 << 20, "x": 1}, {"1": -4}, {"1": None}]
        ),
    }
)
MOMENTS = st.sampled_from(["peak", "end", "oom", -1, 0, 2])


@given(
    trace=st.lists(EVENTS, max_size=10),
    segments=st.lists(SEGMENTS, max_size=3),
    recorded=SETTINGS,
    at=MOMENTS,
)
@settings(max_examples=70, deadline=None)
def test_contradicting_numbers_give_a_report_or_an_error(
    tmp_path_factory: pytest.TempPathFactory,
    trace: list[dict[str, Any]],
    segments: list[dict[str, Any]],
    recorded: dict[str, Any],
    at: str | int,
) -> None:
    path = tmp_path_factory.getbasetemp() / "contradiction.pkl"
    root = files.snapshot(device_traces=[trace], segments=segments, allocator_settings=recorded)
    path.write_bytes(pickled(root))
    loaded = load_or_refuse(path)
    if isinstance(loaded, Snapshot):
        with suppress(UsageError):  # the event does not exist
            whole_report(loaded, MemorySpec(at=at))


def test_randomly_changed_bytes_give_a_report_or_an_error(cli: Cli, tmp_path: Path) -> None:
    content = pickled(sample())
    path = tmp_path / "snapshot.pkl"
    for seed in range(100):
        damaged = bytearray(content)
        for i in range(1 + seed % 3):
            damaged[zlib.crc32(b"%d %d" % (seed, i)) % len(content)] = (
                zlib.crc32(b"%d" % seed) % 256
            )
        path.write_bytes(damaged)
        run = cli("memviz", path, "--json")
        assert run.exit_code in (0, 2), seed
        json.loads(run.stdout)
