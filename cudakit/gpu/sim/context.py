"""The context of a simulated device: its time, its work, its faults, and the way into every call."""

from __future__ import annotations

import atexit
import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from cudakit.errors import CudaError, EnvironmentUnusable, UsageError
from cudakit.gpu.api.facts import CudaView, DeviceFacts
from cudakit.gpu.explain import STICKY, Status, cuda_error
from cudakit.gpu.machine import DEFAULT_MODEL, model_record
from cudakit.gpu.sim.clock import Clock
from cudakit.gpu.sim.costs import costs_of
from cudakit.gpu.sim.recorder import Recorder, Sink, Sources
from cudakit.gpu.sim.schedule import Schedule
from cudakit.gpu.sim.spool import attachment
from cudakit.trace.events import Event, Fact

_C = TypeVar("_C", bound="Context")
_P = ParamSpec("_P")
_T = TypeVar("_T")


def driver_call(
    method: Callable[Concatenate[_C, _P], _T],
) -> Callable[Concatenate[_C, _P], _T]:
    """Make a method a call of the driver: one at a time, and refused where the context refuses it."""

    @wraps(method)
    def call(context: _C, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        with context.lock:
            context.enter(method.__name__)
            try:
                return method(context, *args, **kwargs)
            finally:
                context.recorder.flush()

    return call


class Context:
    """One device of a simulated machine.

    ``model`` names a recorded machine and ``ordinal`` a device of it. ``seed`` is what the schedule is
    picked by, None for the one in which everything runs as early as it can. ``sink`` is given an event for
    every call, ``site`` says where in the program the call comes from (see ``trace.log.Writer.stack``).
    Without a sink, a device of a program that is watched writes to the spool that the environment names.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        ordinal: int = 0,
        seed: int | None = None,
        sink: Sink | None = None,
        site: Callable[[], int] | None = None,
    ) -> None:
        self.name = f"sim:{model}"
        self.ordinal = ordinal
        self.closed = False
        self.lock = threading.RLock()
        self.clock = Clock()
        self.schedule = Schedule(self.clock, seed=seed)
        self._attached = None if sink else attachment(os.environ)
        if self._attached:
            sink, site = self._attached.sink, self._attached.site
            atexit.register(self._tell_everything)
        self.recorder = Recorder(sink)
        self._view = _cuda_view(model)
        self._facts = self._device(ordinal)
        self.costs = costs_of(self._facts)
        self._site = site or (lambda: 0)
        self._seq = 0
        self._threads: dict[int, int] = {}
        self._failures: defaultdict[str, deque[CudaError]] = defaultdict(deque)

    def fail_next(self, call: str, error: CudaError) -> None:
        """Let the next call of that name fail; several are kept in order. After a sticky error all fail."""
        if not hasattr(getattr(type(self), call, None), "__wrapped__"):
            raise UsageError(f"the simulated device has no call {call!r} that could fail")
        self._failures[call].append(error)

    def enter(self, call: str) -> None:
        """Begin a call: time passes, the device goes on, and what failed by then is raised."""
        if self.closed:
            raise cuda_error(Status.CONTEXT_IS_DESTROYED, seen=f"{self.name} was closed")
        self.clock.advance(self.costs.call_ns)
        self.schedule.catch_up()
        self.check()
        self._seq += 1
        if self._failures[call]:
            self._fail(self._failures[call].popleft())

    def check(self) -> None:
        """Raise what has failed on the device: for ever."""
        if self.schedule.fault is not None:
            raise self.schedule.fault.with_traceback(None)

    def emit(
        self, fact: Fact, sources: Sources | None = None, *, device: int | None = None
    ) -> None:
        """Tell what this call did, here or on another ``device``; of ``sources`` accesses are to follow."""
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
        """A number for the calling thread: 1 for the first one that was seen, and so on."""
        return self._threads.setdefault(threading.get_ident(), len(self._threads) + 1)

    def limit(self, name: str, otherwise: int) -> int:
        """Return a fact that is a whole number, or what holds where it is not known."""
        value = self._facts.fields.get(name)
        return value if isinstance(value, int) else otherwise

    def close(self) -> None:
        """Finish all work, and refuse every call from then on. A second time does nothing."""
        with self.lock:
            self.schedule.wait_for_all()
            self._end_recording()
            self.closed = True
        atexit.unregister(self._tell_everything)

    def _tell_everything(self) -> None:
        """Tell at the end of the program what a device that was never closed has left to do."""
        with suppress(Exception):  # what its kernels raise, nobody waits for any more
            self.schedule.wait_for_all()
        self._end_recording()

    def _end_recording(self) -> None:
        self.recorder.flush(all_of_it=True)
        if self._attached:
            self._attached.close()

    def _device(self, ordinal: int) -> DeviceFacts:
        devices = self._view.devices
        if not 0 <= ordinal < len(devices):
            raise cuda_error(
                Status.INVALID_DEVICE,
                seen=f"{self.name} has {len(devices)} devices, number {ordinal} was asked",
            )
        return devices[ordinal]

    def _fail(self, error: CudaError) -> None:
        if error.code in STICKY:
            self.schedule.fault = error
        raise error


def _cuda_view(model: str) -> CudaView:
    view = model_record(model).cuda
    if not isinstance(view, CudaView):
        raise EnvironmentUnusable(f"sim:{model} is a machine without CUDA: {view.reason}")
    return view
