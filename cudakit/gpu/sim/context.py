"""The context that the parts of a simulated device share: time, work, faults, and the entry of every call."""

from __future__ import annotations

import atexit
import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from cudakit.errors import CudaError, EnvironmentUnusable
from cudakit.gpu.api.facts import CudaView, DeviceFacts
from cudakit.gpu.driver_errors import STICKY, Status, cuda_error
from cudakit.gpu.machine import model_record
from cudakit.gpu.sim.costs import costs_of
from cudakit.gpu.sim.recorder import Recorder, Sink, Sources, attachment
from cudakit.gpu.sim.schedule import Clock, Schedule, Task
from cudakit.trace.events import Event, Fact


class Context:
    """One device of a simulated machine; the options are those of ``Sim``."""

    def __init__(
        self,
        model: str,
        *,
        ordinal: int,
        seed: int | None,
        sink: Sink | None,
        site: Callable[[], int] | None,
    ) -> None:
        self.model = model
        self.name = f"sim:{model}"
        self.ordinal = ordinal
        self.closed = False
        self.lock = threading.RLock()
        self.clock = Clock()
        self.schedule = Schedule(self.clock, seed=seed)
        self._attached = None if sink else attachment(os.environ)
        if self._attached:
            sink, site = self._attached.sink, self._attached.site
            atexit.register(self._finish_at_exit)
        self.recorder = Recorder(sink)
        self.view = _cuda_view(model)
        self.facts = self.device(ordinal)
        self.costs = costs_of(self.facts)
        self._site = site or (lambda: 0)
        self._seq = 0
        self._threads: dict[int, int] = {}
        self._failures: defaultdict[str, deque[CudaError]] = defaultdict(deque)

    def fail_next(self, call: str, error: CudaError) -> None:
        """Make the next call of that name fail; several errors are kept in order."""
        self._failures[call].append(error)

    def enter(self, call: str) -> None:
        """Begin a call: advance time, run what is due, and raise what has failed by then."""
        if self.closed:
            raise cuda_error(Status.CONTEXT_IS_DESTROYED, seen=f"{self.name} was closed")
        self.clock.advance(self.costs.call_ns)
        self.schedule.catch_up()
        self.check()
        self._seq += 1
        if self._failures[call]:
            error = self._failures[call].popleft()
            if error.code in STICKY:
                self.schedule.fault = error
            raise error

    def check(self) -> None:
        """Raise the fault of the device, if it has one; it stays."""
        if self.schedule.fault is not None:
            raise self.schedule.fault.with_traceback(None)

    def wait_for(self, tasks: tuple[Task, ...]) -> None:
        """Make the host wait for tasks, and raise what failed meanwhile."""
        self.schedule.wait(tasks)
        self.check()

    def wait_for_all(self) -> None:
        """Make the host wait for all enqueued work, and raise what failed meanwhile."""
        self.schedule.wait_for_all()
        self.check()

    def emit(
        self, fact: Fact, sources: Sources | None = None, *, device: int | None = None
    ) -> None:
        """Record what this call did, here or on another ``device``; the accesses of ``sources`` follow."""
        where = self.ordinal if device is None else device
        event = Event(
            fact,
            seq=self._seq,
            time_ns=self.clock.now_ns,
            thread=self.thread,
            context=where + 1,
            site=self._site(),
            device=where,
        )
        self.recorder.record(event, sources or {})

    @property
    def thread(self) -> int:
        """The number of the calling thread: 1 for the first thread that made a call, and so on."""
        return self._threads.setdefault(threading.get_ident(), len(self._threads) + 1)

    def limit(self, name: str, default: int) -> int:
        """Return a fact that is an integer, or the default if the model does not have it."""
        value = self.facts.fields.get(name)
        return value if isinstance(value, int) else default

    def device(self, ordinal: int) -> DeviceFacts:
        """Return the facts of a device of the machine. Raises CUDA_ERROR_INVALID_DEVICE."""
        devices = self.view.devices
        if not 0 <= ordinal < len(devices):
            raise cuda_error(
                Status.INVALID_DEVICE,
                seen=f"device {ordinal} requested, {self.name} has {len(devices)}",
            )
        return devices[ordinal]

    def close(self) -> None:
        """Complete all work, and refuse every later call. A second time has no effect."""
        with self.lock:
            self.schedule.wait_for_all()
            self._end_recording()
            self.closed = True
        atexit.unregister(self._finish_at_exit)

    def _finish_at_exit(self) -> None:
        """Complete and record the work of a device that the program never closed."""
        with suppress(Exception):  # nobody waits any more for what its kernels raise
            self.schedule.wait_for_all()
        self._end_recording()

    def _end_recording(self) -> None:
        self.recorder.flush(all_of_it=True)
        if self._attached:
            self._attached.close()


class _Part(Protocol):
    @property
    def context(self) -> Context: ...


_Self = TypeVar("_Self", bound=_Part)
_P = ParamSpec("_P")
_T = TypeVar("_T")


def driver_call(
    method: Callable[Concatenate[_Self, _P], _T],
) -> Callable[Concatenate[_Self, _P], _T]:
    """Make a method a driver call: one at a time, and refused if the context is closed or has failed."""

    @wraps(method)
    def call(part: _Self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        context = part.context
        with context.lock:
            context.enter(method.__name__)
            try:
                return method(part, *args, **kwargs)
            finally:
                context.recorder.flush()

    return call


def _cuda_view(model: str) -> CudaView:
    view = model_record(model).cuda
    if not isinstance(view, CudaView):
        raise EnvironmentUnusable(f"sim:{model} models a machine without CUDA: {view.reason}")
    return view
