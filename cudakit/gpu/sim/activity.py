"""Record the calls and the work of a simulated device in virtual time, as events of a profile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from cudakit.gpu.sim.recorder import Sink
from cudakit.gpu.sim.schedule import Task
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


@dataclass(frozen=True, slots=True)
class _PendingWork:
    """Enqueued work, whose times are known after it has run."""

    task: Task
    event: Event


class ActivityRecorder:
    """Passes the profile of one device to a sink.

    ``make_event`` returns an event with the number, the thread and the call stack of the current call.
    """

    def __init__(self, sink: Sink, make_event: Callable[[EventBody], Event]) -> None:
        self._sink = sink
        self._make_event = make_event
        self._pending_work: list[_PendingWork] = []

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
        self._pending_work.append(_PendingWork(task, replace(event, body=body)))

    def record_graph_node(self, graph_node: int) -> None:
        """Record the call stack that created a graph node."""
        self._sink(self._make_event(GraphNodeSite(graph_node)))

    def end(self) -> None:
        """Record the remaining work and the end of the profile."""
        self._emit_finished_work()
        self._sink(self._make_event(ProfileWindow(is_open=False)))

    def _emit_finished_work(self) -> None:
        finished_work = [
            pending_work for pending_work in self._pending_work if pending_work.task.is_done
        ]
        if finished_work:
            self._pending_work = [
                pending_work for pending_work in self._pending_work if not pending_work.task.is_done
            ]
        for pending_work in finished_work:
            body = pending_work.event.body
            assert isinstance(body, (KernelRun, CopyRun, FillRun))  # noqa: S101 see record_enqueued
            body_with_times = replace(
                body, start_ns=pending_work.task.begin_ns, end_ns=pending_work.task.end_ns
            )
            self._sink(replace(pending_work.event, body=body_with_times))
