"""The state shared by the components of a simulated device: clock, schedule, injected errors, recorder."""

from __future__ import annotations

import atexit
import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from cudakit.errors import CudaError, EnvironmentUnusable
from cudakit.gpu.api.facts import Capability, CudaView, DeviceFacts
from cudakit.gpu.driver_errors import Status, cuda_error, known_errors
from cudakit.gpu.machine import model_record
from cudakit.gpu.sim.recorder import (
    EVENTS_VARIABLE,
    PROFILE_EVENTS,
    ActivityRecorder,
    Recorder,
    Sink,
    Sources,
    attach_to_spool,
)
from cudakit.gpu.sim.schedule import Clock, Schedule, Task
from cudakit.trace.events import DeviceInfo, Event, EventBody

# The fields of a model that a profile records, in the order of the fields of DeviceInfo after its name.
_PROFILED_FACTS = (
    "multiprocessor_count",
    "memory_bytes",
    "max_threads_per_multiprocessor",
    "max_blocks_per_multiprocessor",
    "max_registers_per_multiprocessor",
    "max_shared_memory_per_multiprocessor_bytes",
    "reserved_shared_memory_per_block_bytes",
)


class Context:
    """One device of a simulated machine; the options are those of ``Sim``."""

    def __init__(
        self,
        model: str,
        *,
        ordinal: int,
        seed: int | None,
        sink: Sink | None,
        current_site: Callable[[], int] | None,
    ) -> None:
        self.model = model
        self.name = f"sim:{model}"
        self.ordinal = ordinal
        self.closed = False
        self.lock = threading.RLock()
        self.clock = Clock()
        self.schedule = Schedule(self.clock, seed=seed)
        self._spool = None if sink else attach_to_spool(os.environ)
        if self._spool:
            sink, current_site = self._spool.sink, self._spool.current_site
            atexit.register(self._finish_work_at_exit)
        is_profiled = os.environ.get(EVENTS_VARIABLE) == PROFILE_EVENTS
        self.recorder = Recorder(None if is_profiled else sink)
        view = model_record(model).cuda
        if not isinstance(view, CudaView):
            raise EnvironmentUnusable(f"sim:{model} models a machine without CUDA: {view.reason}")
        self.cuda_view = view
        self.facts = self.facts_of(ordinal)
        self.costs = costs_of(self.facts)
        self._read_call_site = current_site or int
        self._program_call = self._spool.program_call if self._spool else int
        self._event_number = 0
        self._thread_numbers: dict[int, int] = {}
        # Records a profile instead of the events of ``recorder``; None without a profile.
        self.activity: ActivityRecorder | None = None
        if is_profiled and sink:
            self.activity = ActivityRecorder(sink, self._event)
            self.activity.begin(
                DeviceInfo(
                    self.name,
                    *(self.integer_fact(field, 0) for field in _PROFILED_FACTS),
                )
            )
        self._injected_errors: defaultdict[str, deque[CudaError]] = defaultdict(deque)

    def fail_next(self, call: str, error: CudaError) -> None:
        """Queue an error for the next call with this name."""
        self._injected_errors[call].append(error)

    def enter(self, call: str) -> None:
        """Begin a driver call: advance the clock, run due tasks, and raise injected or sticky errors."""
        if self.closed:
            raise cuda_error(Status.CONTEXT_IS_DESTROYED, detail=f"{self.name} was closed")
        self.clock.advance(self.costs.call_ns)
        self.schedule.run_due()
        self.raise_fault()
        self._event_number += 1
        if self._injected_errors[call]:
            error = self._injected_errors[call].popleft()
            if error.code in known_errors() and known_errors()[error.code].lost:
                self.schedule.fault = error
            raise error

    def raise_fault(self) -> None:
        """Raise the sticky error of the device, if there is one."""
        if self.schedule.fault is not None:
            raise self.schedule.fault.with_traceback(None)

    def wait_for(self, tasks: tuple[Task, ...]) -> None:
        """Block the host until tasks complete. Raises the error of a task that failed."""
        self.schedule.wait(tasks)
        self.raise_fault()

    def wait_for_all(self) -> None:
        """Block the host until all enqueued work completes. Raises the error of a task that failed."""
        self.schedule.wait_for_all()
        self.raise_fault()

    def emit(
        self, body: EventBody, task_by_node: Sources | None = None, *, device: int | None = None
    ) -> None:
        """Record an event on this or another ``device``, followed by the accesses of the tasks."""
        if not self.activity:
            self.recorder.record(self._event(body, device), task_by_node or {})

    def _event(self, body: EventBody, device: int | None = None) -> Event:
        """Return an event of the current call."""
        ordinal = self.ordinal if device is None else device
        return Event(
            body,
            seq=self._event_number,
            time_ns=self.clock.now_ns,
            thread=self.thread,
            context=ordinal + 1,
            site=self._read_call_site(),
            program_call=self._program_call(),
            device=ordinal,
        )

    @property
    def thread(self) -> int:
        """The number of the calling thread: 1 for the first thread that made a call, and so on."""
        return self._thread_numbers.setdefault(threading.get_ident(), len(self._thread_numbers) + 1)

    def integer_fact(self, name: str, default: int) -> int:
        """Return an integer field of the model's facts, or the default."""
        value = self.facts.fields.get(name)
        return value if isinstance(value, int) else default

    def facts_of(self, ordinal: int) -> DeviceFacts:
        """Return the facts of a device of this machine.

        Raises CUDA_ERROR_INVALID_DEVICE if the machine has no device with this number.
        """
        devices = self.cuda_view.devices
        if not 0 <= ordinal < len(devices):
            raise cuda_error(
                Status.INVALID_DEVICE,
                detail=f"device {ordinal} requested, {self.name} has {len(devices)}",
            )
        return devices[ordinal]

    def close(self) -> None:
        """Complete all work and reject later calls. A second call has no effect."""
        with self.lock:
            self.schedule.wait_for_all()
            self._end_recording()
            self.closed = True
        atexit.unregister(self._finish_work_at_exit)

    def _finish_work_at_exit(self) -> None:
        """Complete and record the work of a device that the program did not close."""
        with suppress(Exception):  # no caller is left to receive errors of kernels
            self.schedule.wait_for_all()
        self._end_recording()

    def _end_recording(self) -> None:
        self.recorder.flush(force=True)
        if self.activity:
            self.activity.end()
        if self._spool:
            self._spool.close()


class _Component(Protocol):
    @property
    def context(self) -> Context: ...


_Self = TypeVar("_Self", bound=_Component)
_P = ParamSpec("_P")
_T = TypeVar("_T")


def driver_call(
    method: Callable[Concatenate[_Self, _P], _T],
) -> Callable[Concatenate[_Self, _P], _T]:
    """Wrap a method as a driver call: serialized, and rejected if the context is closed or has failed."""

    @wraps(method)
    def call(component: _Self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        context = component.context
        with context.lock:
            start_ns = context.clock.now_ns
            context.enter(method.__name__)
            try:
                return method(component, *args, **kwargs)
            finally:
                context.recorder.flush()
                if context.activity:
                    context.activity.call(method.__name__, start_ns, context.clock.now_ns)

    return call


# --- Durations in virtual time: estimates of the right order of magnitude, not measurements --------

_NS_PER_S = 1_000_000_000
# Memory bandwidth of devices whose facts lack the clock or the bus width.
_MEMORY_BYTES_PER_S = 1_000_000_000_000


@dataclass(frozen=True, slots=True)
class Costs:
    """Bandwidths and latencies of one device."""

    memory_bytes_per_s: int = _MEMORY_BYTES_PER_S
    link_bytes_per_s: int = 50_000_000_000  # bandwidth between host and device
    pageable_bytes_per_s: int = 10_000_000_000  # bandwidth of copies with pageable memory
    nvlink_bytes_per_s: int = 20_000_000_000  # bandwidth of one NVLink
    call_ns: int = 500  # host time of a driver call
    dispatch_ns: int = 2_000  # delay from a call to the earliest start of its work
    node_ns: int = 500  # delay between the starts of graph nodes
    minimum_ns: int = 1_000  # duration of the shortest kernel, copy or fill

    def duration_ns(self, size_bytes: int, bytes_per_s: int) -> int:
        """Return the time to move bytes at a bandwidth."""
        return self.minimum_ns + size_bytes * _NS_PER_S // bytes_per_s

    def device_memory_ns(self, size_bytes: int) -> int:
        """Return the time to read or write bytes of device memory."""
        return self.duration_ns(size_bytes, self.memory_bytes_per_s)

    def to_peer_ns(self, size_bytes: int, nvlink_count: int) -> int:
        """Return the time to copy bytes to a peer: over NVLink, or at host link speed without NVLink."""
        nvlinks_bytes_per_s = nvlink_count * self.nvlink_bytes_per_s
        return self.duration_ns(size_bytes, nvlinks_bytes_per_s or self.link_bytes_per_s)


def costs_of(facts: DeviceFacts) -> Costs:
    """Return the costs of a device: memory bandwidth is bus width times clock, two transfers per cycle."""
    width_bits = facts.fields.get("global_memory_bus_width_bits")
    clock_khz = facts.fields.get("memory_clock_rate_khz")
    if isinstance(width_bits, int) and isinstance(clock_khz, int) and width_bits * clock_khz > 0:
        return Costs(memory_bytes_per_s=2 * width_bits // 8 * clock_khz * 1000)
    return Costs()


def capability(facts: DeviceFacts) -> Capability:
    """Return the compute capability; 0.0 if unknown."""
    major, _, minor = str(facts.fields.get("compute_capability")).partition(".")
    is_known = major.isdigit() and minor.isdigit()
    return Capability(int(major), int(minor)) if is_known else Capability(0, 0)
