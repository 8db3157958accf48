"""Find the allocation at which a program exceeded a limit of reserved device memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cudakit.memory.record.pools import POOL_NAMES
from cudakit.stacks import Frame, Stack

# The sign of the change of reserved memory by the action of an event.
_SIGN_BY_ACTION = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


@dataclass(frozen=True, slots=True)
class LimitPassed:
    """The first moment at which a process has reserved more memory of a device than the limit."""

    device: int
    reserved_bytes: int  # reserved memory at the first moment above the limit
    peak_bytes: int  # maximum of the reserved memory until the end
    # Size of the allocation that exceeded the limit; 0 if the limit was exceeded before the trace began.
    size_bytes: int
    pool: str  # name of the pool of this allocation; "" if it was before the trace
    stack: Stack  # call stack of this allocation; () if it was before the trace


def find_limit_passed(snapshot: dict[str, Any], limit_bytes: int) -> list[LimitPassed]:
    """Return the first moment above the limit for each device that exceeded the limit.

    Reserved memory is the sum of the segments of all allocators in the process, without the CUDA context.
    """
    passed_limits = (
        _first_above(device, trace, _reserved_at_end(snapshot, device), limit_bytes)
        for device, trace in enumerate(snapshot["device_traces"])
    )
    return [limit_passed for limit_passed in passed_limits if limit_passed]


def _reserved_at_end(snapshot: dict[str, Any], device: int) -> int:
    """Return the number of bytes of a device that are reserved at the end of the trace."""
    return sum(
        segment["total_size"] for segment in snapshot["segments"] if segment["device"] == device
    )


def _first_above(
    device: int, trace: Sequence[dict[str, Any]], reserved_at_end: int, limit_bytes: int
) -> LimitPassed | None:
    changes_bytes = [
        _SIGN_BY_ACTION.get(trace_entry["action"], 0) * trace_entry["size"] for trace_entry in trace
    ]
    reserved_bytes = reserved_at_end - sum(changes_bytes)
    first_passed: LimitPassed | None = None
    peak_bytes = reserved_bytes
    if reserved_bytes > limit_bytes:
        first_passed = LimitPassed(device, reserved_bytes, peak_bytes, 0, "", ())
    for trace_entry, change_bytes in zip(trace, changes_bytes, strict=True):
        reserved_bytes += change_bytes
        peak_bytes = max(peak_bytes, reserved_bytes)
        if reserved_bytes > limit_bytes and first_passed is None:
            pool = POOL_NAMES.get(trace_entry.get("pool_id", (0, 0)), "PyTorch")
            first_passed = LimitPassed(
                device, reserved_bytes, 0, change_bytes, pool, _stack_of_entry(trace_entry)
            )
    if first_passed is None:
        return None
    return LimitPassed(
        device,
        first_passed.reserved_bytes,
        peak_bytes,
        first_passed.size_bytes,
        first_passed.pool,
        first_passed.stack,
    )


def _stack_of_entry(entry: dict[str, Any]) -> Stack:
    return tuple(
        Frame(frame["name"], frame["filename"], frame["line"])
        for frame in entry.get("frames") or ()
    )
