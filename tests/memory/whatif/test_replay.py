"""Property tests: a replay has the statistics of the original program."""

from __future__ import annotations

import random

import pytest
from allocator.device import MIB
from allocator.test_machine import STREAMS, some_size
from hypothesis import given, settings
from hypothesis import strategies as st
from memory.whatif.recordings import (
    GIB,
    OF_POOLS,
    OF_STREAMS,
    VERBS,
    Program,
    programs,
    run,
)

from cudakit.api.memory import new_allocator, replay_snapshots
from cudakit.memory.result import Outcome
from cudakit.memory.whatif import WhatIfSpec
from cudakit.memory.whatif.program import program_of, recording_of
from cudakit.memory.whatif.replay import replay
from cudakit.torch_rules.settings import Settings

LAW = settings(max_examples=50, deadline=None)

GROWING = st.booleans().map(lambda grows: Settings(expandable_segments=grows))
SPLITTING = st.sampled_from((20, 40)).map(lambda n: Settings(max_split_size_bytes=n * MIB))
COLLECTING = st.sampled_from((0.3, 0.8)).map(
    lambda share: Settings(garbage_collection_threshold=share, memory_fraction=0.75)
)


def again(program: Program) -> dict[str, int]:
    """Replay a program with its own settings, and return the statistics."""
    snapshot = program.snapshot()
    (trace,) = snapshot.devices
    garbage_collects = program.settings.garbage_collection_threshold > 0
    recording = recording_of(snapshot, trace)
    played, _ = replay(
        program_of(recording, garbage_collects=garbage_collects),
        program.settings,
        new_allocator,
        limit_bytes=program.capacity,
        addresses=recording.segment_addresses(),
    )
    assert played.shortage is None
    return figures(played)


def figures(played: Outcome) -> dict[str, int]:
    return {
        **{
            f"{part} {name}": getattr(held, f"{name}_bytes")
            for part, held in (("peak", played.peak), ("current", played.end))
            for name in ("reserved", "allocated", "requested", "active")
        },
        "device_alloc": played.device_allocations,
        "device_free": played.device_frees,
        "alloc_retries": played.retries,
        "ooms": played.ooms,
    }


@LAW
@given(programs(settings=GROWING))
def test_replay_has_the_statistics_of_the_program(program: Program) -> None:
    expected = program.statistics()
    assert again(program) == expected


@LAW
@given(programs(settings=st.one_of(SPLITTING, COLLECTING), streams=False))
def test_replay_releases_unsplittable_and_old_blocks(program: Program) -> None:
    expected = program.statistics()
    assert again(program) == expected


@LAW
@given(programs(settings=GROWING, capacity=64 * GIB, pools=True))
def test_replay_has_the_private_pools_of_the_program(program: Program) -> None:
    expected = program.statistics()
    assert again(program) == expected


@LAW
@given(programs(settings=GROWING))
def test_replay_within_the_recorded_limit_equals_the_recording(
    program: Program,
) -> None:
    program.alloc(1)  # at least one event
    result = replay_snapshots([program.snapshot()], WhatIfSpec(("",)))
    (device,) = result.devices
    assert device.differences == ()


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("pools", [False, True])
def test_replay_of_a_long_run_has_the_statistics_of_the_run(grows: bool, pools: bool) -> None:
    rng = random.Random(7)
    capacity = 64 * GIB if pools else 256 * MIB
    program = Program(Settings(expandable_segments=grows), capacity)
    verbs = (*VERBS, *OF_STREAMS, *(OF_POOLS if pools else ()))
    for verb in rng.choices(verbs, k=700):
        run(program, verb, some_size(rng), rng.choice(STREAMS), rng.randrange(100))
    expected = program.statistics()
    assert expected["device_free"] > 10
    assert (expected["ooms"] > 3) != pools
    assert again(program) == expected
