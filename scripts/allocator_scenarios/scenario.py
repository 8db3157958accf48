"""Scenarios: operations, and what must be true between them, whoever allocates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from allocator_scenarios.subject import Subject

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

FREE, LIVE, PENDING = "inactive", "active_allocated", "active_pending_free"
Layout: TypeAlias = "list[list[tuple[int, str]]]"


@dataclass(frozen=True, slots=True)
class Check:
    """A point at which statistics and a snapshot are taken, and what must hold there.

    ``changes`` are those of statistics since the check before: ``segment`` stands for
    ``segment.all.current``, ``segment.small_pool`` for its ``current``, and others for themselves. ``now``
    are values. ``blocks`` are the size and the state of each block, segment by segment as they were taken;
    ``facts`` are all true. ``restored``: since the check before, a pool of several segments was brought back
    to a state, and nothing else was done; in which order it went through the segments is left open.
    """

    label: str
    changes: Mapping[str, int] = field(default_factory=dict)
    now: Mapping[str, int] = field(default_factory=dict)
    blocks: Layout | None = None
    facts: Mapping[str, bool] = field(default_factory=dict)
    restored: bool = False


Steps: TypeAlias = Iterator[Check]


@dataclass(frozen=True, slots=True)
class Scenario:
    """One of the numbered scenarios; several may share a number."""

    number: int
    name: str
    steps: Callable[[Subject], Steps]
    settings: str = ""
    without_torch: str = ""  # why PyTorch has no part in it
    without_memory: str = ""  # why a device in memory cannot carry it


def scenario(
    number: int,
    name: str,
    *,
    settings: str = "",
    without_torch: str = "",
    without_memory: str = "",
) -> Callable[[Callable[[Subject], Steps]], Scenario]:
    """Make a function a scenario."""

    def make(steps: Callable[[Subject], Steps]) -> Scenario:
        return Scenario(number, name, steps, settings, without_torch, without_memory)

    return make


def full_name(statistic: str) -> str:
    """Return the name in the statistics that a short one stands for."""
    if statistic.startswith(("num_", "max_")):
        return statistic
    parts = statistic.split(".")
    if parts[0].startswith("oversize_"):
        return statistic if len(parts) == 2 else f"{statistic}.current"
    return ".".join([*parts, *("all", "current")[len(parts) - 1 :]])
