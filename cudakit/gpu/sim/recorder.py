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
from cudakit.trace.events import (
    ApiCall,
    CopyRun,
    DeviceInfo,
    Event,
    EventBody,
    FillRun,
    GraphNodeSite,
    KernelRun,
    ProfileWindow,
)
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
            and (force or all(task.is_done for task in self._queued_events[0][1].values()))
        ):
            event, task_by_node = self._queued_events.popleft()
            self._sink(event)
            for node, task in task_by_node.items():
                for access in task.accesses:
                    self._sink(replace(event, body=replace(access, node=node)))


SPOOL_VARIABLE = "CUDAKIT_SPOOL"
# Environment variable with the id of the only traced process; unset if child processes are traced, too.
PROCESS_VARIABLE = "CUDAKIT_SPOOL_PROCESS"

# Environment variable that selects the events that simulated devices record: ``PROFILE_EVENTS`` selects those
# of a profile; if it is unset, they record the events for the race detector.
EVENTS_VARIABLE = "CUDAKIT_SPOOL_EVENTS"
PROFILE_EVENTS = "profile"

# Environment variable with the name of the module that numbers the calls of the program. The recorder has it.
FRAMES_VARIABLE = "CUDAKIT_SPOOL_FRAMES"

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
    program_call = _program_calls(environment.get(FRAMES_VARIABLE))
    return SpoolSink(writer.write, StackNumbers(writer.stack), program_call, writer.close)


def _program_calls(module_name: str | None) -> Callable[[], int]:
    """Return a function that gives the number of the current program call, or 0 if the number is unknown."""
    try:
        frames_module = import_module(module_name or "")
    except (ImportError, ValueError):  # not named, or cudakit was installed without a compiler
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
            self._number_by_key[key] = self._number_stack(
                tuple(
                    Frame(frame.f_code.co_qualname, frame.f_code.co_filename, frame.f_lineno or 0)
                    for frame in frames
                )
            )
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


# --- Record the calls and the work of a simulated device in virtual time, as events of a profile ---

# Names of functions of the CUDA driver API, by the equivalent call of the simulated device.
_FUNCTIONS = {
    "launch": "cuLaunchKernel",
    "launch_host_kernel": "cuLaunchKernel",
    "copy": "cuMemcpyAsync",
    "fill": "cuMemsetD8Async",
    "graph_launch": "cuGraphLaunch",
    "instantiate": "cuGraphInstantiateWithFlags",
    "malloc": "cuMemAlloc_v2",
    "free": "cuMemFree_v2",
    "host_malloc": "cuMemHostAlloc",
    "host_free": "cuMemFreeHost",
    "record": "cuEventRecord",
    "wait": "cuStreamWaitEvent",
    "sync": "cuCtxSynchronize",
    "sync_stream": "cuStreamSynchronize",
    "sync_event": "cuEventSynchronize",
    "load": "cuModuleLoadData",
}


class ActivityRecorder:
    """Passes the profile of one device to a sink.

    ``make_event`` returns an event with the number, the thread and the call stack of the current call.
    """

    def __init__(self, sink: Sink, make_event: Callable[[EventBody], Event]) -> None:
        self._sink = sink
        self._make_event = make_event
        # enqueued work, whose times are known after it has run
        self._pending: list[tuple[Task, Event]] = []

    def begin(self, device: DeviceInfo) -> None:
        """Record the device and the begin of the profile."""
        self._sink(self._make_event(device))
        self._sink(self._make_event(ProfileWindow(is_open=True)))

    def call(self, name: str, start_ns: int, end_ns: int) -> None:
        """Record a call of the device that has returned, and the work that has run since the last call."""
        event = self._make_event(ApiCall("", 0, start_ns, end_ns))
        function = _FUNCTIONS.get(name, name)
        body = ApiCall(function, event.seq, start_ns, end_ns)
        self._sink(replace(event, body=body))
        self._emit_finished_work()

    def record_enqueued(self, task: Task, stream: int, graph_node: int = 0) -> None:
        """Record the work of a task once it has run."""
        activity = task.job.activity
        if activity is None:
            return
        event = self._make_event(activity)
        body = replace(activity, stream=stream, correlation=event.seq, graph_node=graph_node)
        self._pending.append((task, replace(event, body=body)))

    def record_graph_node(self, graph_node: int) -> None:
        """Record the call stack that created a graph node."""
        self._sink(self._make_event(GraphNodeSite(graph_node)))

    def end(self) -> None:
        """Record the remaining work and the end of the profile."""
        self._emit_finished_work()
        self._sink(self._make_event(ProfileWindow(is_open=False)))

    def _emit_finished_work(self) -> None:
        finished = [(task, event) for task, event in self._pending if task.is_done]
        if finished:
            self._pending = [(task, event) for task, event in self._pending if not task.is_done]
        for task, event in finished:
            assert isinstance(event.body, (KernelRun, CopyRun, FillRun))  # noqa: S101 see record_enqueued
            body = replace(event.body, start_ns=task.begin_ns, end_ns=task.end_ns)
            self._sink(replace(event, body=body))
