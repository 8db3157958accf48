"""Named ranges and marks for profilers that are attached through NVTX; they cost little without a profiler.

NVTX injects the profiler at the first call of the process and never later, so a domain is looked up once.
"""

# ruff: noqa: A001 ``range`` is the term of NVTX and its tools

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import nvtx  # type: ignore[import-untyped]

from cudakit.errors import UsageError

_F = TypeVar("_F", bound=Callable[..., Any])

Payload = int | float


class Domain(Protocol):
    """The methods of ``nvtx.Domain`` used here."""

    def push_range(self, attributes: Any) -> None: ...
    def pop_range(self) -> None: ...
    def mark(self, attributes: Any) -> None: ...
    def get_event_attributes(
        self, message: str, color: str | int | None, category: str | None, payload: Payload | None
    ) -> Any: ...


class NoRange:
    """A range that has no effect because no profiler is attached."""

    __slots__ = ()

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def __call__(self, function: _F) -> _F:
        _check_is_plain_function(function)
        return function


class Range(NoRange):
    """A range that an attached profiler records. It can be entered repeatedly and recursively."""

    __slots__ = ("_attributes", "_domain")

    def __init__(self, domain: Domain, attributes: Any) -> None:
        self._domain = domain
        self._attributes = attributes

    def __enter__(self) -> None:
        self._domain.push_range(self._attributes)

    def __exit__(self, *_: object) -> None:
        self._domain.pop_range()

    def __call__(self, function: _F) -> _F:
        _check_is_plain_function(function)

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return wrapper  # type: ignore[return-value]


_NO_RANGE = NoRange()


def attached_domain(name: str) -> Domain | None:
    """Return a domain by name, or None if no profiler is attached."""
    domain = nvtx.get_domain(name)
    return domain if isinstance(domain, nvtx.Domain) else None


def range(
    name: str,
    *,
    domain: str = "cudakit",
    color: str | int | None = None,
    category: str | None = None,
    payload: Payload | None = None,
) -> NoRange:
    """Return an NVTX range, as context manager or function decorator.

    Profilers such as nsys and ncu show the range. ``color`` is a matplotlib color name or 0xAARRGGBB,
    ``payload`` a number shown with the range. The decorator raises UsageError for a coroutine or a
    generator, whose call returns before its body runs.

    >>> import cudakit
    >>> with cudakit.range("load"):
    ...     batch = [1, 2, 3]
    >>> @cudakit.range("step", color="green")
    ... def step(batch):
    ...     return sum(batch)
    >>> step(batch)
    6
    """
    nvtx_domain = attached_domain(domain)
    if nvtx_domain is None:
        return _NO_RANGE
    return Range(nvtx_domain, nvtx_domain.get_event_attributes(name, color, category, payload))


def push_range(
    name: str,
    *,
    domain: str = "cudakit",
    color: str | int | None = None,
    category: str | None = None,
    payload: Payload | None = None,
) -> None:
    """Begin an NVTX range of this thread, which ``pop_range`` of the same domain ends.

    >>> import cudakit
    >>> cudakit.push_range("epoch", payload=3)
    >>> cudakit.pop_range()
    """
    nvtx_domain = attached_domain(domain)
    if nvtx_domain is not None:
        nvtx_domain.push_range(nvtx_domain.get_event_attributes(name, color, category, payload))


def pop_range(*, domain: str = "cudakit") -> None:
    """End the innermost range of this thread that ``push_range`` began."""
    nvtx_domain = attached_domain(domain)
    if nvtx_domain is not None:
        nvtx_domain.pop_range()


def mark(
    name: str,
    *,
    domain: str = "cudakit",
    color: str | int | None = None,
    category: str | None = None,
    payload: Payload | None = None,
) -> None:
    """Record an NVTX mark: a point in time of this thread.

    >>> import cudakit
    >>> cudakit.mark("checkpoint written")
    """
    nvtx_domain = attached_domain(domain)
    if nvtx_domain is not None:
        nvtx_domain.mark(nvtx_domain.get_event_attributes(name, color, category, payload))


def _check_is_plain_function(function: Callable[..., Any]) -> None:
    """Raise UsageError for coroutine and generator functions, whose calls return before the body runs."""
    if (
        inspect.iscoroutinefunction(function)
        or inspect.isgeneratorfunction(function)
        or inspect.isasyncgenfunction(function)
    ):
        raise UsageError(
            f"{function.__qualname__} is a coroutine or generator, whose work begins after the call",
            hint="use `with cudakit.range(...)` inside it, around code without await or yield",
        )
