"""How the frameworks write the fixes: the smallest one in the terms of those that took part in a race."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from cudakit.core.sanitize.hint import stream_words
from cudakit.core.sanitize.names import HOST
from cudakit.core.sanitize.races import RaceKind
from cudakit.core.sanitize.result import Side
from cudakit.document import Frame


@dataclass(frozen=True, slots=True)
class Framework:
    """How one framework writes the fixes, with ``a`` the stream of the earlier side, ``b`` the other's."""

    name: str
    files: re.Pattern[str]  # of its frames
    kernels: re.Pattern[str]  # that it launches, by readable name
    order: str  # b after a
    keep: str  # memory while a uses it
    wait: str  # on the host, for a


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
    """Say the fix in the terms of the frameworks that the kernels, their stacks and ``more`` show."""
    frames = [*more, *current.stack, *previous.stack]
    kernels = [side.kernel for side in (current, previous) if side.kernel is not None]
    return tuple(
        f"{framework.name}: {words}{_where(words, current, previous)}"
        for framework in FRAMEWORKS
        if _takes_part(framework, frames, kernels)
        for words in (_in_terms_of(framework, kind, current),)
    )


def _in_terms_of(framework: Framework, kind: RaceKind, current: Side) -> str:
    if kind is RaceKind.HOST or current.stream_number == HOST:
        return framework.wait
    reused = kind in (RaceKind.REUSE, RaceKind.USE_AFTER_FREE)
    return framework.keep if reused else framework.order


def _takes_part(framework: Framework, frames: Iterable[Frame], kernels: Iterable[str]) -> bool:
    return any(framework.files.search(frame.filename) for frame in frames) or any(
        map(framework.kernels.match, kernels)
    )


def _where(words: str, current: Side, previous: Side) -> str:
    """Say which streams the letters of a fix stand for."""
    # What is kept after it was freed is kept for who used it afterwards.
    earlier = current if previous.operation == "free" else previous
    streams = {"a": stream_words(earlier), "b": stream_words(current)}
    if stream_words(previous) == stream_words(current):
        streams = {"a": "the stream of the earlier one", "b": "that of the later one"}
    said = [f"{letter} is {name}" for letter, name in streams.items() if _has(words, letter)]
    return f", where {' and '.join(said)}" if said else ""


def _has(words: str, letter: str) -> bool:
    return re.search(rf"\b{letter}[.,)]", words) is not None
