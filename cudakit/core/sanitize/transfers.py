"""What a copy or a fill means for the host: does it wait, and does it touch memory itself?

CUDA Runtime API and CUDA Driver API, "API synchronization behavior".
"""

from __future__ import annotations

from typing import Final, NamedTuple

from cudakit.trace.kinds import Direction, HostMemory, How


class HostSide(NamedTuple):
    """What the host does in a copy."""

    waits_before: bool = False  # for all that is in the stream
    reads_source: bool = False  # before the call returns, instead of the stream
    writes_destination: bool = False
    waits_after: bool = False


_NOTHING: Final = HostSide()
_ALL: Final = HostSide(True, True, True, False)
_WAITS: Final = HostSide(waits_after=True)


def host_side(direction: int, memory: int, *, asynchronous: bool, strict: bool) -> HostSide:
    """Say what the host does in a copy.

    An asynchronous copy to pageable memory "might be synchronous", and in fact is staged by the host: only
    when ``strict`` nothing is made of that.
    """
    if direction == Direction.DEVICE_TO_DEVICE:
        return _NOTHING
    if direction == Direction.HOST_TO_HOST:
        return _ALL
    pageable = memory == HostMemory.PAGEABLE
    if direction == Direction.HOST_TO_DEVICE and pageable:
        # What reaches the device is on its way when the call returns: it was read, and staged.
        return HostSide(waits_before=not asynchronous, reads_source=True)
    if not asynchronous or (pageable and not strict):
        return _WAITS
    return _NOTHING


def fill_is_waited_for(how: How | None, *, asynchronous: bool) -> bool:
    """Say whether the host waits for a fill: for one of the host's or of managed memory."""
    return not asynchronous and how in (How.PINNED, How.MANAGED)
