"""What happened in a race, and the smallest fix, in words."""

from __future__ import annotations

from cudakit.core.sanitize.names import HOST
from cudakit.core.sanitize.races import RaceKind, SyncKind
from cudakit.core.sanitize.result import Side
from cudakit.core.sanitize.stacks import place
from cudakit.trace.kinds import Known
from cudakit.units import format_bytes


def sentence(kind: RaceKind, current: Side, previous: Side, size_bytes: int) -> str:
    """Say what happened."""
    later, earlier, size = _who(current), _who(previous), format_bytes(size_bytes)
    uses = "is given" if current.known >= Known.ASSUMED else "uses"
    match kind:
        case RaceKind.USE_BEFORE_ALLOCATION:
            return f"{later} {uses} {size} that {earlier} may not have made available yet"
        case RaceKind.USE_AFTER_FREE if current.operation == "free":
            return f"{later} gives {size} back that {earlier} may still be using"
        case RaceKind.USE_AFTER_FREE:
            return f"{later} {uses} {size} that {earlier} has given back"
        case RaceKind.REUSE:
            return (
                f"{later} {uses} {size} that were handed out again while {earlier}, "
                "which their last owner enqueued, may still be running"
            )
    does, doing = _does(kind, current, previous), _doing(kind, previous)
    return f"{later} {does} {size} that {earlier} may still be {doing}"


def fix(kind: RaceKind, current: Side, previous: Side) -> str:
    """Say the smallest fix, in CUDA's terms."""
    a, b = stream_words(previous), stream_words(current)
    earlier, later = operation_at(previous), operation_at(current)
    if current.graph and current.graph == previous.graph:
        return (
            f"while capturing, record an event after {earlier} and make the stream of {later} wait "
            f"for it: nothing in the graph orders node {current.node} after node {previous.node}"
        )
    if previous.stream_number == HOST:
        return f"order the host's threads: {earlier} has to be over before {later} is enqueued"
    if kind is RaceKind.HOST or current.stream_number == HOST:
        then = "frees" if current.operation == "free" else "uses"
        return (
            f"make the host wait for {a}, or for an event recorded there after {earlier}, before it "
            f"{then} the memory{_at(place(current.stack))}"
        )
    if kind is RaceKind.USE_AFTER_FREE and previous.operation == "free":
        return f"free the memory after its last use: move {earlier} behind {later}"
    order = f"record an event on {a} after {earlier} and make {b} wait for it before {later}"
    if kind is RaceKind.USE_AFTER_FREE:
        return f"{order}, or free on {a}"
    if kind is RaceKind.REUSE:
        return f"keep the memory until {a} is done with it, or {order}"
    return order


def why_not_covered(
    kind: SyncKind, current: Side, previous: Side, recorded: str, waited: str
) -> str:
    """Say why the last synchronisation was too early; ``recorded`` and ``waited`` are places."""
    a, b = stream_words(previous), stream_words(current)
    before = f"before {operation_at(previous)} was enqueued"
    match kind:
        case SyncKind.EVENT:
            return f"{b} last waited for {a}{_at(waited)}, for an event recorded{_at(recorded)}, {before}"
        case SyncKind.HOST:
            return f"the host last waited for {a}{_at(waited)}, {before}"
        case SyncKind.DEFAULT_STREAM:
            return f"the default stream's rules last ordered {b} after {a}{_at(waited)}, {before}"


def stream_words(side: Side) -> str:
    """Name the stream without its properties."""
    return side.stream.partition(" (")[0]


def operation_at(side: Side) -> str:
    """Tell the operation by the place that enqueued it, or else by its name."""
    where = place(side.stack)
    what = "kernel" if side.kernel is not None else side.operation
    return f"the {what} ({where})" if where else _operation(side)


def _who(side: Side) -> str:
    if side.stream_number == HOST:
        return f"the host, for {operation_at(side)},"
    node = f" (node {side.node} of graph {side.graph})" if side.graph else ""
    return f"{_operation(side)}{node} on {stream_words(side)}"


def _operation(side: Side) -> str:
    return side.operation if side.kernel is not None else f"the {side.operation}"


def _does(kind: RaceKind, current: Side, previous: Side) -> str:
    # What is only assumed is not asserted: a kernel may leave alone what it is given.
    if current.known >= Known.ASSUMED:
        return "is given"
    if kind is RaceKind.READ_AFTER_WRITE or not current.writes:
        return "reads"
    overwrites = kind is RaceKind.WRITE_AFTER_READ or not previous.writes
    return "overwrites" if overwrites else "writes"


def _doing(kind: RaceKind, previous: Side) -> str:
    if previous.known >= Known.ASSUMED:
        return "using"
    return "writing" if kind is not RaceKind.WRITE_AFTER_READ and previous.writes else "reading"


def _at(where: str) -> str:
    return f" at {where}" if where else ""
