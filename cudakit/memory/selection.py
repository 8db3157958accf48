"""Check the moment, device, stream and pool that a caller of ``memviz`` selects.

The command line passes text, and Python also passes numbers; both accept the same values.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from operator import index

from cudakit.errors import UsageError
from cudakit.memory.record.pools import POOL_IDS, PoolId
from cudakit.memory.snapshot import HOST

_MOMENTS = ("peak", "end", "oom")
_MOMENT_HINT = "use peak, end, oom or the index of an event"
# The two numbers of a pool, alone or after the name of its kind in the report.
_POOL_PATTERN = re.compile(r"(?:(?:graph|MemPool) )?(\d+),(\d+)")


def parse_moment(moment: str | int) -> str | int:
    """Return "peak", "end", "oom" or the index of an event. Raises UsageError for another value."""
    if isinstance(moment, str) and not moment.isdecimal():
        if moment in _MOMENTS:
            return moment
        raise UsageError(f"{moment!r} is not a moment", hint=_MOMENT_HINT)
    return _whole_number(moment, "moment", _MOMENT_HINT)


def parse_device(device: str | int) -> int:
    """Return the index of a device, or HOST for "host". Raises UsageError for another value."""
    if device == "host":
        return HOST
    index = device.removeprefix("cuda:") if isinstance(device, str) else device
    if isinstance(index, str) and not index.isdecimal():
        index = device  # the error then names the value as it was written
    return _whole_number(index, "device", "use 0, cuda:0 or host")


def parse_stream(stream: str | int) -> int:
    """Return the number of a stream. Raises UsageError for another value."""
    return _whole_number(stream, "stream", "use the number of a stream in the report")


def parse_pool(pool: str | Sequence[int]) -> PoolId:
    """Return the two numbers of a pool.

    ``pool`` has the two numbers, or is a name in the report: ``default``, ``graph 1,0``, ``MemPool 0,1`` or
    that of a library. Raises UsageError for another value.
    """
    match pool:
        case "default":
            return 0, 0
        case str():
            if pool in POOL_IDS:
                return POOL_IDS[pool]
            if numbers := _POOL_PATTERN.fullmatch(pool):
                return int(numbers[1]), int(numbers[2])
        case [int(first_number), int(second_number)]:
            return first_number, second_number
    raise UsageError(
        f"{pool!r} is not a pool",
        hint="use a name in the report, such as default or cupy, or two numbers, such as 0,1",
    )


def _whole_number(value: str | int, noun: str, hint: str) -> int:
    """Return a whole number. Raises UsageError, which says that the value is not a ``noun``."""
    if isinstance(value, str):
        if value.isdecimal():
            return int(value)
    else:
        try:
            return index(value)
        except TypeError:
            pass
    raise UsageError(f"{value!r} is not a {noun}", hint=hint)
