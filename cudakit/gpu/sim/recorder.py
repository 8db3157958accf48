"""Passes the trace events of a simulated device, in call order, to a sink or a spool directory."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import CodeType, FrameType
from typing import TypeAlias

from cudakit.gpu.sim.schedule import Task
from cudakit.stacks import LIBRARY_FILE, TYPED_CODE, Frame, Stack
from cudakit.trace.events import Event
from cudakit.trace.spool import SpoolWriter
from cudakit.trace.trace_file import Clock

Sink: TypeAlias = Callable[[Event], None]

# The tasks whose accesses belong to an event, by the number of the graph node; 0 outside of graphs.
Sources: TypeAlias = Mapping[int, Task]


class Recorder:
    """Passes events to a sink in order, each followed by its accesses.

    The accesses of a kernel are known after the kernel has run. Until then the launch and later events are
    queued.
    """

    def __init__(self, sink: Sink | None) -> None:
        self._sink = sink
        self._queued_events: deque[tuple[Event, Sources]] = deque()

    def record(self, event: Event, task_by_node: Sources) -> None:
        if self._sink is not None:
            self._queued_events.append((event, task_by_node))

    def flush(self, *, force: bool = False) -> None:
        """Pass on the events whose accesses are known, or all events with ``force``."""
        while (
            self._sink
            and self._queued_events
            and (force or _accesses_are_known(self._queued_events[0][1]))
        ):
            event, task_by_node = self._queued_events.popleft()
            self._sink(event)
            for node, task in task_by_node.items():
                for access in task.accesses:
                    self._sink(replace(event, body=replace(access, node=node)))


def _accesses_are_known(task_by_node: Sources) -> bool:
    return all(task.is_done for task in task_by_node.values())


SPOOL_VARIABLE = "CUDAKIT_SPOOL"
# Environment variable with the id of the only traced process; unset if child processes are traced, too.
PROCESS_VARIABLE = "CUDAKIT_SPOOL_PROCESS"

# Environment variable that selects the events that simulated devices record: ``PROFILE_EVENTS`` selects those
# of a profile; if it is unset, they record the events for the race detector.
EVENTS_VARIABLE = "CUDAKIT_SPOOL_EVENTS"
PROFILE_EVENTS = "profile"

_PACKAGE = str(Path(__file__).parent.parent)
_MAX_FRAMES = 128


@dataclass(frozen=True, slots=True)
class SpoolSink:
    """The sink of a spool directory, and functions that number the call stack and the call of the program.

    ``current_site`` returns the number of the call stack. ``program_call`` returns the
    number of the current program call, or 0.
    """

    sink: Sink
    current_site: Callable[[], int]
    program_call: Callable[[], int]
    close: Callable[[], None]


def attach_to_spool(environment: Mapping[str, str]) -> SpoolSink | None:
    """Return the sink of the spool directory in the environment; None if this process is not traced."""
    directory = environment.get(SPOOL_VARIABLE)
    if not directory or environment.get(PROCESS_VARIABLE) not in (None, str(os.getpid())):
        return None
    writer = SpoolWriter(Path(directory), clock=Clock.VIRTUAL)
    return SpoolSink(writer.write, StackNumbers(writer.stack), _program_calls(), writer.close)


def _program_calls() -> Callable[[], int]:
    """Return a function that gives the number of the current program call, or 0 if the number is unknown."""
    try:
        frames_module = import_module("cudakit.record._frames")
    except ImportError:  # cudakit was installed without a compiler
        return int
    frames_module.watch_program_calls(LIBRARY_FILE, TYPED_CODE)
    current_program_call: Callable[[], int] = frames_module.program_call
    return current_program_call


class StackNumbers:
    """Numbers Python call stacks; each distinct stack is formatted once."""

    def __init__(self, number_stack: Callable[[Stack], int]) -> None:
        self._number_stack = number_stack
        self._number_by_key: dict[tuple[int, ...], int] = {}
        self._code_objects: list[CodeType] = []  # kept alive, so that their ids stay unique

    def __call__(self) -> int:
        """Return the number of the caller's stack, without frames of this package."""
        frames = _frames()
        key = tuple(number for frame in frames for number in (id(frame.f_code), frame.f_lasti))
        if key not in self._number_by_key:
            self._code_objects += (frame.f_code for frame in frames)
            self._number_by_key[key] = self._number_stack(tuple(map(_to_frame, frames)))
        return self._number_by_key[key]


def _frames() -> list[FrameType]:
    """Return the frames outside this package, innermost first."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    while frame and len(frames) < _MAX_FRAMES:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _to_frame(frame: FrameType) -> Frame:
    return Frame(frame.f_code.co_qualname, frame.f_code.co_filename, frame.f_lineno or 0)
