"""Steps at addresses, split into lifetimes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from memory.strategies import LAW

from cudakit.memory.history.lifetimes import (
    BEGIN,
    COMPLETE,
    REQUEST,
    Lifetimes,
    LifetimeSteps,
    sorted_by_address,
    split_into_lifetimes,
)

Step = tuple[int, int]  # address and step


def ordered(steps: list[Step]) -> LifetimeSteps:
    return sorted_by_address(
        np.arange(len(steps)),
        np.array([address for address, _ in steps], np.uint64),
        np.array([step for _, step in steps], np.uint8),
        np.zeros(len(steps), np.int64),
    )


def lifetimes(steps: list[Step]) -> list[tuple[int, int, int]]:
    found = split_into_lifetimes(ordered(steps))
    columns = (found.begin, found.request, found.complete)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def one_by_one(steps: list[Step]) -> list[tuple[int, int, int]]:
    """Group steps with a simple loop: a step belongs to the open lifetime of its address if it can follow."""
    lifetimes: dict[int, list[dict[int, int]]] = {}
    for event, (address, step) in enumerate(steps):
        own = lifetimes.setdefault(address, [])
        if not own or max(own[-1]) >= step:
            own.append({})
        own[-1][step] = event
    return [
        (lifetime.get(BEGIN, -1), lifetime.get(REQUEST, -1), lifetime.get(COMPLETE, -1))
        for address in sorted(lifetimes)
        for lifetime in lifetimes[address]
    ]


ADDRESSES = st.sampled_from((0, 512, 1024, 1 << 47, (1 << 47) + 513, (1 << 64) - 1))


@LAW
@given(st.lists(st.tuples(ADDRESSES, st.sampled_from((BEGIN, REQUEST, COMPLETE))), max_size=40))
def test_lifetimes_equal_a_naive_implementation(steps: list[Step]) -> None:
    assert lifetimes(steps) == one_by_one(steps)


@LAW
@given(st.lists(ADDRESSES, max_size=40))
def test_steps_are_sorted_by_address_then_time(addresses: list[int]) -> None:
    rows = ordered([(address, BEGIN) for address in addresses])
    assert rows.event.tolist() == sorted(range(len(addresses)), key=lambda i: (addresses[i], i))


def test_complete_lifetime_has_three_events() -> None:
    assert lifetimes([(512, BEGIN), (512, REQUEST), (512, COMPLETE)]) == [(0, 1, 2)]


def test_step_out_of_order_starts_a_new_lifetime() -> None:
    assert lifetimes([(512, BEGIN), (512, COMPLETE), (512, REQUEST), (512, BEGIN)]) == [
        (0, -1, 1),
        (-1, 2, -1),
        (3, -1, -1),
    ]


def test_oldest_and_newest_lifetime_of_each_address_are_marked() -> None:
    found: Lifetimes = split_into_lifetimes(
        ordered([(512, BEGIN), (0, BEGIN), (512, BEGIN), (512, BEGIN)])
    )
    assert found.is_oldest.tolist() == [True, True, False, False]
    assert found.is_newest.tolist() == [True, False, False, True]


def test_no_steps_give_no_lifetimes() -> None:
    assert lifetimes([]) == []
