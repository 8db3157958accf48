"""Sentences about a race, and its fix in terms of CUDA and of the frameworks involved."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from cudakit.core.sanitize.names import HOST, call_site, is_backward
from cudakit.core.sanitize.races import RaceKind, SyncKind
from cudakit.core.sanitize.result import Side
from cudakit.document import Frame
from cudakit.trace.kinds import Precision
from cudakit.units import format_bytes


@dataclass(frozen=True, slots=True)
class Framework:
    """The fixes in terms of one framework; ``a`` is the stream of the earlier side, ``b`` of the later."""

    name: str
    files: re.Pattern[str]  # matches the files of its frames
    kernels: re.Pattern[str]  # matches the demangled names of its kernels
    order: str  # makes b wait for a
    keep: str  # keeps the memory allocated while a uses it
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
        keep="keep a reference to the array until a.synchronize()",
        wait="a.synchronize()",
    ),
    _framework(
        "JAX",
        "jax|jaxlib",
        r"$.",
        order="jax.block_until_ready(array) before another library uses it on its own stream",
        keep="keep a reference to the array until the other library's stream has finished with it",
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
    """Return the fix for each framework that the kernels, the stacks or the frames ``more`` belong to."""
    frames = [*more, *current.stack, *previous.stack]
    kernels = [side.kernel for side in (current, previous) if side.kernel is not None]
    return tuple(
        f"{framework.name}: {code}{_where(code, current, previous)}"
        for framework in FRAMEWORKS
        if _is_involved(framework, frames, kernels)
        for code in (_fix_for(framework, kind, current),)
    )


def _fix_for(framework: Framework, kind: RaceKind, current: Side) -> str:
    if kind is RaceKind.HOST or current.stream_number == HOST:
        return framework.wait
    reused = kind in (RaceKind.REUSE, RaceKind.USE_AFTER_FREE)
    return framework.keep if reused else framework.order


def _is_involved(framework: Framework, frames: Iterable[Frame], kernels: Iterable[str]) -> bool:
    return any(framework.files.search(frame.filename) for frame in frames) or any(
        map(framework.kernels.match, kernels)
    )


def _where(code: str, current: Side, previous: Side) -> str:
    """Return the legend of a fix: ``, where a is stream 7``."""
    # After a free, the side that still uses the memory is the later one: the memory must be kept for it.
    earlier = current if previous.operation == "free" else previous
    streams = {"a": short_stream_name(earlier), "b": short_stream_name(current)}
    if short_stream_name(previous) == short_stream_name(current):
        streams = {
            "a": "the stream of the earlier operation",
            "b": "the stream of the later operation",
        }
    legend = [f"{letter} is {name}" for letter, name in streams.items() if _uses(code, letter)]
    return f", where {' and '.join(legend)}" if legend else ""


def _uses(code: str, letter: str) -> bool:
    return re.search(rf"\b{letter}[.,)]", code) is not None


def sentence(kind: RaceKind, current: Side, previous: Side, size_bytes: int) -> str:
    """Return the race in one sentence: which operations access how much memory, and how."""
    later, earlier, size = _subject(current), _subject(previous), format_bytes(size_bytes)
    uses = _RECEIVES if current.known >= Precision.ASSUMED else "uses"
    match kind:
        case RaceKind.USE_BEFORE_ALLOCATION:
            return f"{later} {uses} {size} while {earlier} may still be pending"
        case RaceKind.USE_AFTER_FREE if current.operation == "free":
            return f"{later} releases {size} that {earlier} may still be using"
        case RaceKind.USE_AFTER_FREE:
            return f"{later} {uses} {size} that {earlier} has freed"
        case RaceKind.REUSE:
            return (
                f"{later} {uses} {size} of a reused block, "
                f"while {earlier} may still be using the block's previous contents"
            )
    verb, participle = _verb(kind, current, previous), _participle(kind, previous)
    return f"{later} {verb} {size} that {earlier} may still be {participle}"


def fix(kind: RaceKind, current: Side, previous: Side) -> str:
    """Return the smallest fix in terms of CUDA."""
    a, b = short_stream_name(previous), short_stream_name(current)
    earlier, later = operation_at(previous), operation_at(current)
    if current.graph and current.graph == previous.graph:
        return (
            f"during capture, record an event after {earlier} and make the stream of {later} wait "
            f"for it: no edge of the graph orders node {current.node} after node {previous.node}"
        )
    if previous.stream_number == HOST:
        return f"synchronize the host threads: {earlier} must finish before {later} is enqueued"
    if kind is RaceKind.HOST or current.stream_number == HOST:
        then = "frees" if current.operation == "free" else "uses"
        return (
            f"make the host wait for {a}, or for an event recorded there after {earlier}, before "
            f"the host {then} the memory{_at(call_site(current.stack))}"
        )
    if kind is RaceKind.USE_AFTER_FREE and previous.operation == "free":
        return f"free the memory after its last use: move {earlier} after {later}"
    order = f"record an event on {a} after {earlier} and make {b} wait for it before {later}"
    if kind is RaceKind.USE_AFTER_FREE:
        return f"{order}, or free the memory on {a}"
    if kind is RaceKind.REUSE:
        return f"keep a reference to the memory until {a} has finished with it, or {order}"
    return order


def why_not_covered(
    kind: SyncKind, current: Side, previous: Side, recorded: str, waited: str
) -> str:
    """Return why the last synchronization was too early; ``recorded`` and ``waited`` are call sites."""
    a, b = short_stream_name(previous), short_stream_name(current)
    before = f"before {operation_at(previous)} was enqueued"
    match kind:
        case SyncKind.EVENT:
            event = f"an event recorded{_at(recorded)}"
            return f"too early: {b} last waited for {a}{_at(waited)}, for {event} {before}"
        case SyncKind.HOST:
            return f"too early: the host last waited for {a}{_at(waited)}, {before}"
        case SyncKind.DEFAULT_STREAM:
            implicit = "the implicit synchronization of the default stream"
            return f"too early: {implicit} last made {b} wait for {a}{_at(waited)}, {before}"


def short_stream_name(side: Side) -> str:
    """Return the name of the stream without its properties."""
    return side.stream.partition(" (")[0]


def operation_at(side: Side) -> str:
    """Return the operation with its call site, or else by its name."""
    site = call_site(side.stack)
    operation = "kernel" if side.kernel is not None else side.operation
    start = "backward pass started at " if is_backward(side.stack) else ""
    return f"the {operation} ({start}{site})" if site else _operation(side)


def _subject(side: Side) -> str:
    if side.stream_number == HOST:
        return f"the host, for {operation_at(side)},"
    node = f" (node {side.node} of graph {side.graph})" if side.graph else ""
    return f"{_operation(side)}{node} on {short_stream_name(side)}"


def _operation(side: Side) -> str:
    return side.operation if side.kernel is not None else f"the {side.operation}"


# Not "reads" or "writes": a kernel may not access the memory behind a pointer argument.
_RECEIVES: Final = "receives a pointer to"


def _verb(kind: RaceKind, current: Side, previous: Side) -> str:
    if current.known >= Precision.ASSUMED:
        return _RECEIVES
    if kind is RaceKind.READ_AFTER_WRITE or not current.writes:
        return "reads"
    overwrites = kind is RaceKind.WRITE_AFTER_READ or not previous.writes
    return "overwrites" if overwrites else "writes"


def _participle(kind: RaceKind, previous: Side) -> str:
    if previous.known >= Precision.ASSUMED:
        return "using"
    return "writing" if kind is not RaceKind.WRITE_AFTER_READ and previous.writes else "reading"


def _at(call_site: str) -> str:
    return f" at {call_site}" if call_site else ""
