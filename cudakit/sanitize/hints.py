"""Describe a race in sentences, and its fix in terms of CUDA and of the frameworks involved."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final, NamedTuple, TypeAlias

from cudakit.sanitize.races import (
    CALLING_RANK,
    CollectiveOperation,
    NamedRange,
    RaceKind,
    Side,
    SyncKind,
)
from cudakit.stacks import Frame, call_site_index, is_backward
from cudakit.trace.kinds import LIBRARY_DOMAINS, CollectiveFunction, Precision, StreamFlag
from cudakit.trace.names import cut
from cudakit.units import format_bytes


class Framework(NamedTuple):
    """The fixes in terms of one framework.

    In the code of a fix, ``a`` is the stream of the earlier operation, ``b`` the stream of the later one.
    """

    name: str
    modules: str  # pattern of the directories that its files are in
    kernels: str  # pattern of the demangled names of its kernels
    order_fix: str  # code that makes stream b wait for stream a
    lifetime_fix: str  # code that keeps the memory allocated while stream a uses it
    host_wait_fix: str  # code that makes the host wait for stream a
    device_wait_fix: str  # code that makes the host wait for the whole device


@cache
def frameworks() -> tuple[Framework, ...]:
    """Return the frameworks of ``frameworks.toml``."""
    table = files("cudakit.sanitize").joinpath("frameworks.toml").read_text("utf-8")
    return tuple(Framework(**framework) for framework in tomllib.loads(table)["framework"])


@dataclass(frozen=True, slots=True)
class RacingStreams:
    """The names of the streams of all occurrences of a race."""

    earlier_names: tuple[str, ...]  # streams of the earlier operations
    later_names: tuple[str, ...]  # streams of the later operations
    unreachable_name: str = ""  # a stream that the program has no access to; "" if there is none

    @classmethod
    def of_sides(cls, current_side: Side, previous_side: Side) -> RacingStreams:
        """Return the streams of one occurrence of a race."""
        return cls((short_stream_name(previous_side),), (short_stream_name(current_side),))


def remedies(
    kind: RaceKind,
    current_side: Side,
    previous_side: Side,
    allocation_frames: Iterable[Frame] = (),
    streams: RacingStreams | None = None,
) -> tuple[str, ...]:
    """Return the fix for each framework that the kernels, call stacks or allocation frames belong to."""
    streams = streams or RacingStreams.of_sides(current_side, previous_side)
    frames = [*allocation_frames, *current_side.stack, *previous_side.stack]
    kernels = [side.kernel for side in (current_side, previous_side) if side.kernel is not None]
    fixes: list[str] = []
    for framework in frameworks():
        is_own_file = re.compile(rf"(?:^|/)(?:{framework.modules})/").search
        is_own_kernel = re.compile(framework.kernels).match
        if not (
            any(is_own_file(frame.filename) for frame in frames) or any(map(is_own_kernel, kernels))
        ):
            continue
        if framework.name == "torch" and _has_work_handle(previous_side):
            code = "work.wait(), with the work that the call with async_op=True returned"
        elif streams.unreachable_name:
            code = framework.device_wait_fix
        elif kind is RaceKind.HOST or current_side.stream_number == HOST:
            code = framework.host_wait_fix
        elif kind in (RaceKind.REUSE, RaceKind.USE_AFTER_FREE):
            code = framework.lifetime_fix
        else:
            code = framework.order_fix
        meaning = _explain_streams(code, current_side, previous_side, streams)
        fixes.append(f"{framework.name}: {code}{meaning}")
    return tuple(fixes)


def _has_work_handle(side: Side) -> bool:
    """Return whether the side is a collective of torch.distributed, which returns a ``Work`` to wait for."""
    is_of_torch = any("/torch/distributed/" in frame.filename for frame in side.stack)
    return side.collective is not None and not side.graph and is_of_torch


def _explain_streams(
    code: str, current_side: Side, previous_side: Side, streams: RacingStreams
) -> str:
    """Return the meaning of the streams in the code of a fix: ``, where a is stream 7``."""
    if short_stream_name(previous_side) == short_stream_name(current_side):
        # Nodes of a graph run in the stream of its launch, but were captured in streams of their own.
        verb = "captured" if previous_side.graph and current_side.graph else "enqueued"
        meaning_by_letter = {
            "a": f"the stream on which the earlier operation was {verb}",
            "b": f"the stream on which the later operation was {verb}",
        }
    else:
        # The later operation may use freed memory; then the free must move behind the last use in its stream.
        is_freed = previous_side.operation == "free"
        users = streams.later_names if is_freed else streams.earlier_names
        meaning_by_letter = {"a": _each_of(users), "b": _each_of(streams.later_names)}
    stream_meanings = [
        f"{letter} is {name}"
        for letter, name in meaning_by_letter.items()
        if re.search(rf"\b{letter}[.,)]", code)
    ]
    return f", where {' and '.join(stream_meanings)}" if stream_meanings else ""


def _each_of(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"each of {_join_names(names)}"


MEANINGS: Final = {
    RaceKind.READ_AFTER_WRITE: "An operation reads memory that another one may still be writing.",
    RaceKind.WRITE_AFTER_READ: "An operation overwrites memory that another one may still be reading.",
    RaceKind.WRITE_AFTER_WRITE: "Two operations write the same memory in no defined order.",
    RaceKind.USE_BEFORE_ALLOCATION: "Memory is used before its stream-ordered allocation completes.",
    RaceKind.USE_AFTER_FREE: "Memory is freed while it may still be in use, or used after its free.",
    RaceKind.REUSE: "A caching allocator reuses a block that another stream may still be using.",
    RaceKind.HOST: "The host accesses memory while a copy from or to it may still be in flight.",
}

# Headings of the kinds of races whose names are too short to be clear.
HEADINGS: Final = {RaceKind.HOST: "host access", RaceKind.REUSE: "reuse of a block"}

# The verb of an assumed access. "reads" or "writes" could be wrong: the kernel may not use its pointer
# argument.
_RECEIVES_POINTER: Final = "receives a pointer to"


def race_sentence(kind: RaceKind, current_side: Side, previous_side: Side, size_bytes: int) -> str:
    """Return the race in one sentence: the operations, the kind of access and the size of the memory."""
    later, earlier = _subject_text(current_side), _subject_text(previous_side)
    size_text = format_bytes(size_bytes)
    is_assumed = current_side.known >= Precision.ASSUMED
    verb = _RECEIVES_POINTER if is_assumed else "uses"
    match kind:
        case RaceKind.USE_BEFORE_ALLOCATION:
            return f"{later} {verb} {size_text} while {earlier} may still be pending"
        case RaceKind.USE_AFTER_FREE if current_side.operation == "free":
            return f"{later} releases {size_text} that {earlier} may still be using"
        case RaceKind.USE_AFTER_FREE:
            return f"{later} {verb} {size_text} that {earlier} has freed"
        case RaceKind.REUSE:
            return (
                f"{later} {verb} {size_text} of a reused block, "
                f"while {earlier} may still be using the block's previous contents"
            )
    only_read = kind is RaceKind.WRITE_AFTER_READ or not previous_side.writes
    if not is_assumed:
        if kind is RaceKind.READ_AFTER_WRITE or not current_side.writes:
            verb = "reads"
        else:
            verb = "overwrites" if only_read else "writes"
    if previous_side.known >= Precision.ASSUMED:
        participle = "using"
    else:
        participle = "reading" if only_read else "writing"
    return f"{later} {verb} {size_text} that {earlier} may still be {participle}"


# Last words of a fix that changes the work of the program, because only the effect of a wait is certain.
_NOT_CHECKED_SUFFIX: Final = "; cudakit cannot check that this removes the race"


def smallest_fix(
    kind: RaceKind, current_side: Side, previous_side: Side, streams: RacingStreams | None = None
) -> str:
    """Return the smallest fix in terms of CUDA. ``streams`` are those of all occurrences of the race."""
    streams = streams or RacingStreams.of_sides(current_side, previous_side)
    earlier_work, later_work = operation_at(previous_side), operation_at(current_side)
    if current_side.graph and current_side.graph == previous_side.graph:
        # Both are nodes of one graph launch, because launches of one graph never overlap.
        return (
            f"make node {current_side.node}, {later_work}, depend on node {previous_side.node}, "
            f"{earlier_work}: add this dependency to the graph or, if the graph is captured, make the stream "
            f"of node {current_side.node} wait for an event recorded after node {previous_side.node}"
        )
    if previous_side.stream_number == HOST:
        return (
            f"synchronize the host threads: {earlier_work} must finish before {later_work} is enqueued"
            f"{_NOT_CHECKED_SUFFIX}"
        )
    if kind is RaceKind.USE_AFTER_FREE and previous_side.operation == "free":
        return (
            f"free the memory after its last use: move {earlier_work} after {later_work}"
            f"{_NOT_CHECKED_SUFFIX}"
        )
    earlier_work, later_work = _enqueued_work(previous_side), _enqueued_work(current_side)
    if _has_work_handle(previous_side):
        return f"wait for the work of {earlier_work} before {later_work}"
    if streams.unreachable_name:
        return (
            f"make the host wait for the whole device after {earlier_work} and before {later_work}: "
            f"the program has no access to {streams.unreachable_name}, which a library created"
        )
    if kind is RaceKind.HOST or current_side.stream_number == HOST:
        verb = "frees" if current_side.operation == "free" else "uses"
        event_noun = "an event" if len(streams.earlier_names) == 1 else "events"
        return (
            f"make the host wait for {_join_names(streams.earlier_names)}, or for {event_noun} "
            f"recorded there after {earlier_work}, before the host {verb} the memory"
            f"{_at_call_site(call_site(current_side.stack))}"
        )
    earlier_streams, later_streams = map(_join_names, (streams.earlier_names, streams.later_names))
    if len(streams.earlier_names) == 1:
        order_fix, events = f"record an event on {earlier_streams} after {earlier_work}", "it"
        verb = "has"
    else:
        order_fix = f"after {earlier_work}, record an event on each stream ({earlier_streams}),"
        verb, events = "have", "all these events"
    order_fix += f" and make {later_streams} wait for {events} before {later_work}"
    if kind is RaceKind.USE_AFTER_FREE:
        return f"{order_fix}, or free the memory on {earlier_streams}"
    if kind is RaceKind.REUSE:
        until = f"until {earlier_streams} {verb} finished with it"
        return f"keep a reference to the memory {until}, or {order_fix}"
    return order_fix


def is_wait(kind: RaceKind, previous_side: Side) -> bool:
    """Return whether ``smallest_fix`` adds a wait.

    With this wait, an analysis of the same work finds no such race, and the wait cannot deadlock, because it
    is for work that was enqueued before the wait. Returns False if the fix moves a free or orders threads of
    the host: such a fix changes the work.
    """
    moves_free = kind is RaceKind.USE_AFTER_FREE and previous_side.operation == "free"
    return previous_side.stream_number != HOST and not moves_free


def _enqueued_work(side: Side) -> str:
    """Return the name of the operation, or of the graph launch that contains the operation."""
    operation = operation_at(side)
    return f"{_graph_launch(side)}, which has {operation}," if side.graph else operation


def _graph_launch(side: Side) -> str:
    site = call_site(side.launch_stack)
    return f"the launch of graph {side.graph}{f' ({site})' if site else ''}"


_MAX_NAMED_STREAMS: Final = 6


def _join_names(names: Sequence[str]) -> str:
    shown_names = [*names[:_MAX_NAMED_STREAMS]]
    if omitted_count := len(names) - len(shown_names):
        shown_names.append(f"{omitted_count:,} other streams")
    *first_names, last_name = shown_names
    return f"{', '.join(first_names)} and {last_name}" if first_names else last_name


def advice_on_library(library: str) -> str:
    """Return the advice for a race inside a library, whose streams a program cannot order."""
    return (
        f"report the race to the developers of {library}: it is inside {library}, so the program cannot "
        "order the operations"
    )


def why_not_covered(
    kind: SyncKind, current_side: Side, previous_side: Side, recorded_at: str, waited_at: str
) -> str:
    """Return why the last synchronization was too early.

    ``recorded_at`` is the call site of the event record, ``waited_at`` the call site of the wait.
    """
    earlier_stream_name, later_stream_name = map(short_stream_name, (previous_side, current_side))
    earlier_operation = (
        _graph_launch(previous_side) if previous_side.graph else operation_at(previous_side)
    )
    time_clause = f"before {earlier_operation} was enqueued"
    earlier_work = f"{earlier_stream_name}{_at_call_site(waited_at)}"
    match kind:
        case SyncKind.EVENT:
            recorded_event = f"an event recorded{_at_call_site(recorded_at)}"
            wait_text = f"{later_stream_name} last waited for {earlier_work}"
            return f"too early: {wait_text}, for {recorded_event} {time_clause}"
        case SyncKind.HOST:
            return f"too early: the host last waited for {earlier_work}, {time_clause}"
        case SyncKind.DEFAULT_STREAM:
            wait_text = f"last made {later_stream_name} wait for {earlier_work}"
            return f"too early: the implicit synchronization of the default stream {wait_text}, {time_clause}"


def short_stream_name(side: Side) -> str:
    """Return the name of the stream without its properties."""
    return side.stream.partition(" (")[0]


def operation_at(side: Side) -> str:
    """Return the operation with its call site. Without a call site, return its name."""
    site_text = call_site(side.stack)
    operation = "kernel" if _is_kernel(side) else side.operation_name.partition(CALLING_RANK)[0]
    prefix = "backward pass started at " if is_backward(side.stack) else ""
    return f"the {operation} ({prefix}{site_text})" if site_text else _operation_name(side)


def _subject_text(side: Side) -> str:
    if side.stream_number == HOST:
        return f"{operation_at(side)} on the host"
    node_text = f" (node {side.node} of graph {side.graph})" if side.graph else ""
    return f"{_operation_name(side)}{node_text} on {short_stream_name(side)}"


def _operation_name(side: Side) -> str:
    return side.operation if _is_kernel(side) else f"the {side.operation_name}"


def _is_kernel(side: Side) -> bool:
    """Return whether the operation is a kernel, and not a collective that a kernel performs."""
    return side.kernel is not None and side.collective is None


def _at_call_site(call_site_text: str) -> str:
    return f" at {call_site_text}" if call_site_text else ""


# --- Names of streams, ranges and call sites -------------------------------------------------------

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
