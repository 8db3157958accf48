"""Sentences about a race, and its fix in terms of CUDA and of the frameworks that took part."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from cudakit.core.sanitize.names import HOST, place
from cudakit.core.sanitize.races import RaceKind, SyncKind
from cudakit.core.sanitize.result import Side
from cudakit.document import Frame
from cudakit.trace.kinds import Known
from cudakit.units import format_bytes


@dataclass(frozen=True, slots=True)
class Framework:
    """The fixes in terms of one framework; ``a`` is the stream of the earlier side, ``b`` the other's."""

    name: str
    files: re.Pattern[str]  # of its frames
    kernels: re.Pattern[str]  # that it launches, by readable name
    order: str  # orders b after a
    keep: str  # keeps memory while a uses it
    wait: str  # makes the host wait for a


def _framework(
    name: str, modules: str, kernels: str, *, order: str, keep: str, wait: str
) -> Framework:
    files = re.compile(rf"(?:^|/)(?:{modules})/")
    return Framework(name, files, re.compile(kernels), order, keep, wait)


FRAMEWORKS: Final = (
    _framework(
        "torch",
        "torch|triton",
        r"(?:void )?(?:at|c10)::|triton_",
        order="b.wait_stream(a)",
        keep="tensor.record_stream(a) before the tensor is dropped",
        wait="a.synchronize(), or event.synchronize(), or a copy with non_blocking=False",
    ),
    _framework(
        "CuPy",
        "cupy|cupyx",
        r"cupy_",
        order="b.wait_event(a.record())",
        keep="b.wait_event(a.record()) before the array is dropped",
        wait="a.synchronize(), or array.get(blocking=True)",
    ),
    _framework(
        "Numba",
        "numba|numba_cuda",
        r"cudapy::",
        order="event = cuda.event(); event.record(a); event.wait(b)",
        keep="hold the array until a.synchronize()",
        wait="a.synchronize()",
    ),
    _framework(
        "JAX",
        "jax|jaxlib",
        r"$.",
        order="jax.block_until_ready(array) before another library's stream takes it over",
        keep="hold the array until the other library's stream is done with it",
        wait="jax.block_until_ready(array)",
    ),
    _framework(
        "cuda.core",
        "cuda/core",
        r"$.",
        order="b.wait(a)",
        keep="buffer.close(a)",
        wait="a.sync()",
    ),
    _framework(
        "cudakit",
        "cudakit/gpu",
        r"$.",
        order="gpu.record(event, a); gpu.wait(b, event)",
        keep="gpu.free(address, a)",
        wait="gpu.sync_stream(a)",
    ),
)


def remedies(
    kind: RaceKind, current: Side, previous: Side, more: Iterable[Frame] = ()
) -> tuple[str, ...]:
    """Return the fix in terms of each framework found in the kernels, their stacks and ``more``."""
    frames = [*more, *current.stack, *previous.stack]
    kernels = [side.kernel for side in (current, previous) if side.kernel is not None]
    return tuple(
        f"{framework.name}: {words}{_where(words, current, previous)}"
        for framework in FRAMEWORKS
        if _is_involved(framework, frames, kernels)
        for words in (_in_terms_of(framework, kind, current),)
    )


def _in_terms_of(framework: Framework, kind: RaceKind, current: Side) -> str:
    if kind is RaceKind.HOST or current.stream_number == HOST:
        return framework.wait
    reused = kind in (RaceKind.REUSE, RaceKind.USE_AFTER_FREE)
    return framework.keep if reused else framework.order


def _is_involved(framework: Framework, frames: Iterable[Frame], kernels: Iterable[str]) -> bool:
    return any(framework.files.search(frame.filename) for frame in frames) or any(
        map(framework.kernels.match, kernels)
    )


def _where(words: str, current: Side, previous: Side) -> str:
    """Return which streams the letters of a fix stand for."""
    # Memory that was used after its free must be kept for the later side.
    earlier = current if previous.operation == "free" else previous
    streams = {"a": stream_words(earlier), "b": stream_words(current)}
    if stream_words(previous) == stream_words(current):
        streams = {"a": "the stream of the earlier one", "b": "that of the later one"}
    said = [f"{letter} is {name}" for letter, name in streams.items() if _has(words, letter)]
    return f", where {' and '.join(said)}" if said else ""


def _has(words: str, letter: str) -> bool:
    return re.search(rf"\b{letter}[.,)]", words) is not None


def sentence(kind: RaceKind, current: Side, previous: Side, size_bytes: int) -> str:
    """Return what happened, in one sentence."""
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
    """Return the smallest fix, in terms of CUDA."""
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
    """Return why the last synchronisation was too early; ``recorded`` and ``waited`` are call sites."""
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
    """Return the name of the stream without its properties."""
    return side.stream.partition(" (")[0]


def operation_at(side: Side) -> str:
    """Return the operation with its call site, or else by its name."""
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
    # An assumption is not stated as a fact: a kernel may not access memory that it is passed.
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
