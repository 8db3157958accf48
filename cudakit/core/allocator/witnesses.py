"""Who is told when memory has run out, and who is asked; never with the allocator's guard held."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from cudakit.core.allocator.oom import OutOfMemory, out_of_memory
from cudakit.gpu.api.facts import Process
from cudakit.torch_rules.oom_facts import OomReport
from cudakit.units import Unavailable

Observer: TypeAlias = Callable[[OomReport], object]
Asker: TypeAlias = Callable[[], "tuple[Process, ...] | Unavailable"]


class Witnesses:
    """Functions to be told of a failure; what fails in them is said, and never hides it."""

    def __init__(self) -> None:
        self.observers: list[Observer] = []
        self.of_rejections: list[Observer] = []
        self.saver: Observer | None = None
        self.asker: Asker | None = None

    def error(self, report: OomReport) -> OutOfMemory:
        """Tell all, and return the error, with a note for each that failed."""
        if self.asker is not None:
            report = replace(report, processes=_answer(self.asker))
        saver = [self.saver] if self.saver else []
        told = self.of_rejections if report.rejected else self.observers + saver
        failures = [note for observer in list(told) if (note := _told(observer, report))]
        error = out_of_memory(report)
        for note in failures:
            error.add_note(note)
        return error


def _answer(asker: Asker) -> tuple[Process, ...] | Unavailable:
    try:
        return asker()
    except Exception as error:  # noqa: BLE001  # NVML's, whose absence is no reason to fail otherwise
        return Unavailable(str(error) or type(error).__name__)


def _told(observer: Observer, report: OomReport) -> str:
    try:
        observer(report)
    except Exception as error:  # noqa: BLE001  # it comes second to what it was told of
        name = getattr(observer, "__qualname__", repr(observer))
        return f"{name} failed when it was told: {type(error).__name__}: {error}"
    return ""
