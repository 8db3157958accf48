"""The comparison of two snapshots."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cudakit.errors import UsageError
from cudakit.memory.analyze import MemorySpec
from cudakit.memory.analyze.diff import diff
from cudakit.memory.load import load
from cudakit.memory.result import DiffResult, MomentDiff
from cudakit.memory.snapshot import Snapshot

DATA = Path(__file__).parents[2] / "data"


@pytest.fixture(scope="module")
def trained() -> Snapshot:
    return load(str(DATA / "train_python.pkl.gz"))


@pytest.fixture(scope="module")
def failed() -> Snapshot:
    return load(str(DATA / "oom.pkl.gz"))


@pytest.fixture(scope="module")
def changed(trained: Snapshot, failed: Snapshot) -> DiffResult:
    return diff(trained, failed, MemorySpec())


def is_empty(moment: MomentDiff) -> bool:
    return not any((moment.grown, moment.shrunk, moment.appeared, moment.vanished))


def rows(moment: MomentDiff) -> int:
    parts = (moment.grown, moment.shrunk, moment.appeared, moment.vanished)
    return sum(row.change_bytes for part in parts for row in part)


@pytest.mark.parametrize("name", ["peak", "end"])
def test_changes_of_all_stacks_sum_to_the_total_change(changed: DiffResult, name: str) -> None:
    moment = getattr(changed.devices[0], name)

    assert rows(moment) == moment.after.state.active_bytes - moment.before.state.active_bytes


def test_rows_are_listed_by_kind_of_change(changed: DiffResult) -> None:
    moment = changed.devices[0].end

    assert all(row.before_count and row.change_bytes > 0 for row in moment.grown)
    assert all(row.after_count and row.change_bytes < 0 for row in moment.shrunk)
    assert all(not row.before_count and row.after_bytes for row in moment.appeared)
    assert all(not row.after_count and row.before_bytes for row in moment.vanished)


def test_rows_are_sorted_by_size_of_change(changed: DiffResult) -> None:
    grown = [row.change_bytes for row in changed.devices[0].peak.grown]

    assert grown == sorted(grown, reverse=True)


def test_diff_of_a_snapshot_with_itself_is_empty(trained: Snapshot) -> None:
    same = diff(trained, trained, MemorySpec())
    moment = same.devices[0].peak

    assert moment.growth == 0
    assert is_empty(moment)
    assert not same.grew_beyond(0)


def test_swapped_snapshots_swap_appeared_and_vanished(
    trained: Snapshot, failed: Snapshot, changed: DiffResult
) -> None:
    back = diff(failed, trained, MemorySpec()).devices[0].end

    assert len(back.vanished) == len(changed.devices[0].end.appeared)
    assert len(back.shrunk) == len(changed.devices[0].end.grown)


def test_stacks_match_despite_another_checkout_and_edited_lines(trained: Snapshot) -> None:
    frames = tuple(
        replace(
            frame,
            filename=f"/home/a/{frame.filename}",
            line=frame.line + 3,
        )
        for frame in trained.frames
    )
    moment = diff(trained, replace(trained, frames=frames), MemorySpec()).devices[0].peak

    assert not set(frames) & set(trained.frames)
    assert is_empty(moment)


def test_single_devices_are_compared_despite_different_indices(trained: Snapshot) -> None:
    other = replace(trained, devices=(replace(trained.devices[0], device=5),))
    found = diff(trained, other, MemorySpec()).devices[0]

    assert (found.before_device, found.device) == (0, 5)


def test_grew_beyond_checks_the_peak_and_the_end(changed: DiffResult) -> None:
    peak, end = changed.devices[0].peak.growth, changed.devices[0].end.growth
    assert peak is not None
    assert end is not None

    assert changed.grew_beyond(max(peak, end) - 0.01)
    assert not changed.grew_beyond(max(peak, end) + 0.01)


def test_diff_of_snapshots_without_a_common_device_is_a_usage_error(trained: Snapshot) -> None:
    device = trained.devices[0]
    before = replace(trained, devices=(replace(device, device=0), replace(device, device=1)))
    after = replace(trained, devices=(replace(device, device=2), replace(device, device=3)))

    with pytest.raises(UsageError, match="no common device"):
        diff(before, after, MemorySpec())
