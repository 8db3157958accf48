"""Tests of replayed remedies: on random programs, and on long traces with limits of the replay."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory.strategies import LAW
from memory.verdict import programs
from memory.verdict.programs import DEVICE, Gpu, Tensor

from cudakit.allocator.oom import OutOfMemory
from cudakit.api.memory import new_allocator
from cudakit.memory.analyze import analyze
from cudakit.memory.history import reconstruct
from cudakit.memory.load import load
from cudakit.memory.result import Oom, ReplayedRemedy
from cudakit.memory.selection import MemorySpec
from cudakit.memory.snapshot import Action, Snapshot, StackTable
from cudakit.memory.steps import step_history
from cudakit.memory.verdict import ReplayLimits, replay_changes
from cudakit.memory.verdict.failure import failure_at
from cudakit.torch_rules.settings import Settings, parse_config

ROOT = Path(__file__).parents[3]
MIB = 1 << 20
# A size in MiB allocates; a negative number frees the live tensor with this index.
Calls: TypeAlias = list[int]

CALLS = st.lists(st.integers(300, 1500) | st.integers(-20, -1), min_size=20, max_size=60)


@dataclass
class Outcome:
    """The result of a program whose last call is a large request."""

    gpu: Gpu
    reached_last: bool  # whether all earlier requests succeeded
    served_last: bool  # whether the last request succeeded


def run(calls: Calls, share: float, settings: Settings) -> Outcome:
    """Make the calls, using at most 70% of the device, then request a share of the unused memory."""
    gpu = Gpu(settings=settings)
    live: list[Tensor] = []
    try:
        for call in calls:
            used = sum(tensor.size for tensor in live)
            if call > 0 and used + call * MIB <= 0.7 * DEVICE:
                live.append(Tensor(gpu, call * MIB))
            elif call < 0 and live:
                live.pop(call % len(live))
    except OutOfMemory:
        return Outcome(gpu, reached_last=False, served_last=False)
    unused = DEVICE - sum(tensor.size for tensor in live)
    try:
        Tensor(gpu, int(share * unused))
    except OutOfMemory:
        return Outcome(gpu, reached_last=True, served_last=False)
    return Outcome(gpu, reached_last=True, served_last=True)


def explain_last_failure(snapshot: Snapshot) -> Oom:
    return analyze([snapshot], MemorySpec(), new_allocator).devices[0].ooms[-1]


@LAW
@given(CALLS, st.floats(0.8, 1.0))
def test_request_succeeds_with_exactly_the_settings_whose_replay_helps(
    calls: Calls, share: float
) -> None:
    outcome = run(calls, share, Settings())
    if not outcome.reached_last or outcome.served_last:
        return
    oom = explain_last_failure(outcome.gpu.snapshot())

    assert oom.replays
    for replayed in oom.replays:
        assert replayed.settings is not None
        repeated = run(calls, share, parse_config(replayed.settings))
        assert replayed.helps == repeated.served_last, replayed.change
        assert replayed.helps or not replayed.recommended


def fragmented_after_many_events(gpu: Gpu) -> None:
    """Fragment half of the device, allocate and free for a long time, then request too much."""
    results = programs.results_between_activations(gpu, 0.8)
    for _ in range(12_000):
        Tensor(gpu, 4 * MIB)
    gpu.empty(0.5)
    del results


def replayed_remedies(snapshot: Snapshot, limits: ReplayLimits) -> tuple[ReplayedRemedy, ...]:
    trace = snapshot.devices[0]
    history = reconstruct(snapshot, trace)
    failure = failure_at(
        int(np.flatnonzero(trace.events.action == Action.OOM)[-1]),
        trace=trace,
        history=history,
        steps=step_history(snapshot, trace, history),
        stacks=StackTable(snapshot),
    )
    return replay_changes(failure, new_allocator, limits)


@pytest.fixture(scope="module")
def long_trace() -> Snapshot:
    gpu = Gpu()
    assert not programs.run(fragmented_after_many_events, gpu)
    return gpu.snapshot()


def test_failure_that_recurs_only_with_more_events_is_replayed_from_further_back(
    long_trace: Snapshot,
) -> None:
    assert replayed_remedies(long_trace, ReplayLimits(event_counts=(1000,))) == ()
    remedies = replayed_remedies(long_trace, ReplayLimits(event_counts=(1000, 60_000)))
    assert {replayed.helps for replayed in remedies} == {False, True}
    assert remedies == replayed_remedies(long_trace, ReplayLimits())


def test_replay_with_too_many_blocks_before_it_is_not_begun(long_trace: Snapshot) -> None:
    assert (
        replayed_remedies(
            long_trace, ReplayLimits(event_counts=(5000, 60_000), max_blocks_before=10)
        )
        == ()
    )


def test_replay_that_searches_too_many_blocks_ends() -> None:
    gpu = Gpu()
    assert not programs.run(programs.replay_buffer_of_varying_sizes, gpu)
    snapshot = gpu.snapshot()

    assert replayed_remedies(snapshot, ReplayLimits())
    assert replayed_remedies(snapshot, ReplayLimits(max_searched_blocks=10)) == ()


def test_replays_of_settings_reserve_at_most_the_memory_of_the_device() -> None:
    gpu = Gpu(outside=DEVICE // 4)
    assert not programs.run(programs.replay_buffer_of_varying_sizes, gpu)
    settings = [r for r in explain_last_failure(gpu.snapshot()).replays if r.settings is not None]

    assert settings
    assert max(replayed.peak_reserved_bytes for replayed in settings) <= 3 * DEVICE // 4


@pytest.mark.parametrize(
    ("name", "expected"),
    [("examples/memory/varying_lengths", False), ("tests/data/fuzz/snapshot-protocol-4", True)],
)
def test_default_pool_is_tried_only_if_pytorch_used_a_private_pool(
    name: str, expected: bool
) -> None:
    """The memory of the driver in the first file belongs to no pool of PyTorch."""
    (path,) = ROOT.glob(f"{name}.pkl*")
    changes = [remedy.change for remedy in explain_last_failure(load(str(path))).replays]
    assert ("no private pools, default pool only" in changes) is expected
