"""Settings of a whole process, changed while something is enqueued and put back at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Switch:
    """One setting, and the value that it must have."""

    read: Callable[[], Any]
    write: Callable[[Any], None]
    value: Any


def attribute(holder: Any, name: str, value: Any) -> Switch:
    """Return the switch that is an attribute of an object."""

    def read() -> Any:
        return getattr(holder, name)

    def write(other: Any) -> None:
        setattr(holder, name, other)

    return Switch(read, write, value)


def run_with(switches: Sequence[Switch], work: Callable[[], object]) -> None:
    """Run ``work`` with every switch at its value; those that were not are put back, whatever happens."""
    changed: list[tuple[Switch, Any]] = []
    try:
        for switch in switches:
            before = switch.read()
            if before != switch.value:
                changed.append((switch, before))
                switch.write(switch.value)
        work()
    finally:
        for switch, before in reversed(changed):
            switch.write(before)
