"""Names of streams, ranges and call sites."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from cudakit.sanitize.races import CollectiveOperation, NamedRange
from cudakit.stacks import Frame, call_site_index
from cudakit.trace.kernel_names import cut
from cudakit.trace.kinds import LIBRARY_DOMAINS, CollectiveFunction, StreamFlag

# A function that returns the demangled form of a mangled name, and other names unchanged.
Demangle: TypeAlias = Callable[[str], str]

HOST = 0  # the stream number of the host


def stream_name(stream_number: int, flag: StreamFlag | None) -> str:
    """Return the name of a stream in CUDA's terms, without numbers that differ between runs."""
    match flag:
        case _ if stream_number == HOST:
            return "the host"
        case StreamFlag.LEGACY:
            return "the legacy default stream"
        case StreamFlag.PER_THREAD:
            return f"per-thread default stream {stream_number}"
        case StreamFlag.NON_BLOCKING:
            return f"stream {stream_number} (non-blocking)"
        case _:
            return f"stream {stream_number}"


_COLLECTIVE_NAMES = {
    CollectiveFunction.UNKNOWN: "unknown collective",
    CollectiveFunction.ALL_REDUCE: "all-reduce",
    CollectiveFunction.ALL_GATHER: "all-gather",
    CollectiveFunction.REDUCE_SCATTER: "reduce-scatter",
    CollectiveFunction.BROADCAST: "broadcast",
    CollectiveFunction.REDUCE: "reduce",
}


def collective_name(operation: CollectiveOperation) -> str:
    """Return the name of a collective with its ranks: ``all-reduce (rank 0 of 2)``."""
    name = function_name(operation.function, operation.root)
    if operation.rank < 0:
        return name
    rank_count_text = f" of {operation.rank_count}" if operation.rank_count else ""
    return f"{name} (rank {operation.rank}{rank_count_text})"


def function_name(function: CollectiveFunction, other_rank: int) -> str:
    """Return the name of a function of NCCL; a send or receive names the other rank: ``send to rank 1``."""
    match function:
        case CollectiveFunction.SEND:
            return f"send to rank {other_rank}"
        case CollectiveFunction.RECEIVE:
            return f"receive from rank {other_rank}"
    return _COLLECTIVE_NAMES[function]


MAX_RANGE_NAME_LENGTH = 60
MAX_SHOWN_RANGES = (
    3  # maximum number of NVTX ranges that are shown, from the innermost one outwards
)


def in_range(ranges: Sequence[NamedRange]) -> str:
    """Return the program's innermost NVTX ranges: ``, in range 'step 7 / backward'``, or an empty text."""
    ranges = [named_range for named_range in ranges if named_range.domain not in LIBRARY_DOMAINS]
    if not ranges:
        return ""
    range_names = [
        cut(named_range.name, MAX_RANGE_NAME_LENGTH) or "unnamed"
        for named_range in ranges[-MAX_SHOWN_RANGES:]
    ]
    outer_names = ["…"] if len(ranges) > MAX_SHOWN_RANGES else []
    return f", in range '{' / '.join(outer_names + range_names)}'"


def call_site(frames: Sequence[Frame]) -> str:
    """Return the call site as ``train.py:15``, or an empty text without frames."""
    if not frames:
        return ""
    frame = frames[call_site_index(frames)]
    return f"{frame.filename.rpartition('/')[2]}:{frame.line}"
