"""Events at addresses cut into lifetimes: what was begun, was asked to end, and ended, at one address."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_Ints = npt.NDArray[np.int64]

# The order in which the events of one lifetime come.
BEGIN, REQUEST, COMPLETE = 0, 1, 2
NO_STEP = 255

BEFORE = -1  # as an event index: before the first recorded event


@dataclass(frozen=True, slots=True)
class Rows:
    """Steps of lifetimes, ordered by address and within an address by time."""

    event: _Ints
    address: npt.NDArray[np.uint64]
    step: npt.NDArray[np.uint8]
    size: _Ints


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """Rows cut into lifetimes; a step that was not recorded is -1."""

    first: _Ints  # row
    last: _Ints  # row
    begin: _Ints  # event
    request: _Ints  # event
    complete: _Ints  # event
    newest: npt.NDArray[np.bool_]  # the last lifetime at its address
    oldest: npt.NDArray[np.bool_]  # the first lifetime at its address


def order(
    event: _Ints,
    address: npt.NDArray[np.uint64],
    step: npt.NDArray[np.uint8],
    size: _Ints,
) -> Rows:
    """Order steps, given in order of time, by address."""
    by_address = _stable_by_address(address)
    return Rows(event[by_address], address[by_address], step[by_address], size[by_address])


def cut(rows: Rows) -> Lifetimes:
    """Start a lifetime at each step that cannot follow the one before it at the same address."""
    n = len(rows.event)
    new_address = np.ones(n, np.bool_)
    new_address[1:] = rows.address[1:] != rows.address[:-1]
    starts = new_address.copy()
    starts[1:] |= rows.step[1:] <= rows.step[:-1]
    first = np.flatnonzero(starts)
    last = np.append(first[1:], n)[: len(first)] - 1
    lifetime = np.cumsum(starts) - 1
    oldest = new_address[first]
    return Lifetimes(
        first=first,
        last=last,
        begin=_events(rows, lifetime, BEGIN, len(first)),
        request=_events(rows, lifetime, REQUEST, len(first)),
        complete=_events(rows, lifetime, COMPLETE, len(first)),
        newest=np.append(oldest[1:], True)[: len(first)],
        oldest=oldest,
    )


def _events(rows: Rows, lifetime: _Ints, step: int, n: int) -> _Ints:
    """Find the event of one step in each lifetime; -1 where it was not recorded."""
    event = np.full(n, -1, np.int64)
    here = rows.step == step
    event[lifetime[here]] = rows.event[here]
    return event


def _stable_by_address(address: npt.NDArray[np.uint64]) -> npt.NDArray[np.intp]:
    if not len(address):
        return np.zeros(0, np.intp)
    # Device addresses share their upper bits: when what differs fits 32 bits (blocks are multiples of
    # 512 bytes), the sort works on half the width.
    low, high = address.min(), address.max()
    offset = address - low
    if int(high - low) < 1 << 41 and not (offset & np.uint64(511)).any():
        return np.argsort((offset >> np.uint64(9)).astype(np.uint32), kind="stable")
    return np.argsort(address, kind="stable")
