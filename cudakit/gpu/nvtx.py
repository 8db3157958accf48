"""Named ranges and marks for tools attached through NVTX; almost free without one.

Whether one listens is settled when a domain is first used, as in the nvtx package: NVTX injects its
listener at the process's first call, and never later.
"""

# ruff: noqa: A001 range is the word of NVTX and of every tool that shows one

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
    """The part of ``nvtx.Domain`` that is used here."""

    def push_range(self, attributes: Any) -> None: ...
    def pop_range(self) -> None: ...
    def mark(self, attributes: Any) -> None: ...
    def get_event_attributes(
        self, message: str, color: str | int | None, category: str | None, payload: Payload | None
    ) -> Any: ...


class Silent:
    """A range without an attached tool: no effect, as context manager or as decorator."""

    __slots__ = ()

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def __call__(self, function: _F) -> _F:
        _refuse_suspended(function)
        return function


class Range(Silent):
    """A range with an attached tool. It can be entered repeatedly and recursively."""

    __slots__ = ("_attributes", "_domain")

    def __init__(self, domain: Domain, attributes: Any) -> None:
        self._domain = domain
        self._attributes = attributes

    def __enter__(self) -> None:
        self._domain.push_range(self._attributes)

    def __exit__(self, *_: object) -> None:
        self._domain.pop_range()

    def __call__(self, function: _F) -> _F:
        _refuse_suspended(function)

        @functools.wraps(function)
        def ranged(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return ranged  # type: ignore[return-value]


_SILENT = Silent()


def listened(name: str) -> Domain | None:
    """Return a domain by name, or None if no tool is attached to it."""
    domain = nvtx.get_domain(name)
    return domain if isinstance(domain, nvtx.Domain) else None


def range(
    name: str,
    *,
    domain: str = "cudakit",
    color: str | int | None = None,
    category: str | None = None,
    payload: Payload | None = None,
) -> Silent:
    """Name a stretch of the program: a context manager, and a decorator of functions.

    Tools that listen through NVTX show it: nsys, ncu and others. ``color`` is a name
    as matplotlib's or 0xAARRGGBB, ``payload`` a number shown with the range. As a decorator it raises
    UsageError for a coroutine or a generator, whose call is over before it runs.

    >>> import cudakit
    >>> with cudakit.range("load"):
    ...     batch = [1, 2, 3]
    >>> @cudakit.range("step", color="green")
    ... def step(batch):
    ...     return sum(batch)
    >>> step(batch)
    6
    """
    heard = listened(domain)
    if heard is None:
        return _SILENT
    return Range(heard, heard.get_event_attributes(name, color, category, payload))


def push_range(
    name: str,
    *,
    domain: str = "cudakit",
    color: str | int | None = None,
    category: str | None = None,
    payload: Payload | None = None,
) -> None:
    """Begin a range of this thread; ``pop_range`` of the same domain ends it.

    >>> import cudakit
    >>> cudakit.push_range("epoch", payload=3)
    >>> cudakit.pop_range()
    """
    heard = listened(domain)
    if heard is not None:
        heard.push_range(heard.get_event_attributes(name, color, category, payload))


def pop_range(*, domain: str = "cudakit") -> None:
    """End the range of this thread that ``push_range`` began last."""
    heard = listened(domain)
    if heard is not None:
        heard.pop_range()


def mark(
    name: str,
    *,
    domain: str = "cudakit",
    color: str | int | None = None,
    category: str | None = None,
    payload: Payload | None = None,
) -> None:
    """Note a moment of this thread.

    >>> import cudakit
    >>> cudakit.mark("checkpoint written")
    """
    heard = listened(domain)
    if heard is not None:
        heard.mark(heard.get_event_attributes(name, color, category, payload))


def _refuse_suspended(function: Callable[..., Any]) -> None:
    """Raise for a function that returns before it runs: its range would end before the work begins."""
    if (
        inspect.iscoroutinefunction(function)
        or inspect.isgeneratorfunction(function)
        or inspect.isasyncgenfunction(function)
    ):
        raise UsageError(
            f"{function.__qualname__} is a coroutine or generator, whose work begins after the call",
            hint="use `with cudakit.range(...)` inside it, around code without await or yield",
        )
