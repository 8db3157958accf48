"""Record the current process: for ``cudakit.sanitize()`` and the pytest plugin."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, TypeAlias

from cudakit.errors import CudakitError, EnvironmentUnusable, UsageError
from cudakit.gpu.sim.recorder import EVENTS_VARIABLE, FRAMES_VARIABLE, PROFILE_EVENTS
from cudakit.gpu.sim.recorder import SPOOL_VARIABLE as SPOOL
from cudakit.record.agent.pool_hooks import PoolHooks
from cudakit.record.agent.torch_import import after_import, attribute_backward
from cudakit.record.device_patch import Accesses, add_device_patches
from cudakit.record.installed import SearchPaths, find_frame_readers, find_recorder
from cudakit.record.preflight import RecorderFiles, preflight
from cudakit.stacks import LIBRARY_FILE, TYPED_CODE
from cudakit.trace.spool import SPOOL_PREFIX, Batch, Losses, Spool

# A function that receives each batch of recorded events.
BatchHandler: TypeAlias = Callable[[Batch], object]

# The trace is deleted as it is read, so that a long recording does not fill the disk: it grows by a few MB/s.
_READ_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class CudaRecording:
    """The way in which this process records CUDA calls, and the reasons for its limits."""

    accesses: Accesses | None = None  # source of the accesses; None if CUDA is not recorded
    notes: tuple[str, ...] = ()  # reasons why CUDA is not recorded, or why accesses are not exact
    flush: Callable[[], None] | None = None  # waits for all launches and records their accesses
    is_recorded: bool = False  # whether CUDA is recorded: its accesses, its memory, or a profile


NOT_RECORDED = CudaRecording()

# Name under which the recorder of a profile is registered as a module, because it can be used only once.
_PROFILE_MODULE_NAME = "cudakit._profile_recorder"


class Recording:
    """Passes the GPU work of this process to a consumer, until ``close`` or the end of the process.

    The recorder can be subscribed only once per process, before CUDA is used. Therefore it stays subscribed,
    and its trace is read every second, so that it does not fill the disk.
    """

    def __init__(
        self,
        on_batch: BatchHandler,
        trace_directory: Path,
        cuda: CudaRecording = NOT_RECORDED,
        *,
        simulated_events: str = "",
    ) -> None:
        self.cuda = cuda
        # The events that simulated devices record; "" for the events that the race detector needs.
        self.simulated_events = simulated_events
        self._on_batch = on_batch
        self._trace_directory = trace_directory
        self._spool = Spool(trace_directory, discard=True)
        self._losses = Losses(trace_directory)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._is_closed = False
        atexit.register(self.close)
        if cuda.is_recorded:
            threading.Thread(target=self._read_periodically, name="cudakit", daemon=True).start()

    @property
    def incomplete(self) -> tuple[str, ...]:
        """The reasons why recorded events are missing: events that could not be written, damaged files."""
        losses = () if self._is_closed else self._losses.read_all()
        return (*map(str, losses), *self._spool.error_messages)

    @contextmanager
    def drain(self) -> Iterator[None]:
        """Pass all recorded events to ``on_batch``, and no later event until the ``with`` block ends.

        Passes nothing in a forked process, because the recording belongs to the parent.
        """
        if os.getpid() != self._pid:
            yield
            return
        with self._lock:
            for batch in () if self._is_closed else self._spool.batches():
                self._on_batch(batch)
            yield

    @contextmanager
    def synchronize_and_drain(self) -> Iterator[None]:
        """Wait for all launches and record their accesses, then do the same as ``drain``."""
        if self.cuda.flush and os.getpid() == self._pid:
            self.cuda.flush()
        with self.drain():
            yield

    def close(self) -> None:
        """Stop reading and delete the trace."""
        if os.getpid() != self._pid:
            self._spool.close()  # without self._lock: a thread of the parent may hold it
            self._losses.close()
            return
        with self._lock:
            self._is_closed = True
            self._spool.close()
            self._losses.close()
            shutil.rmtree(self._trace_directory, ignore_errors=True)

    def record_simulated(self, *, enabled: bool) -> None:
        """Start or stop recording simulated devices that are opened from now on."""
        if enabled:
            os.environ[SPOOL] = str(self._trace_directory)
            os.environ[FRAMES_VARIABLE] = "cudakit.record._frames"
            if self.simulated_events:
                os.environ[EVENTS_VARIABLE] = self.simulated_events
        else:
            for name in (SPOOL, FRAMES_VARIABLE, EVENTS_VARIABLE):
                os.environ.pop(name, None)

    def _read_periodically(self) -> None:
        while True:
            time.sleep(_READ_INTERVAL_S)
            with self.drain():
                pass


def begin(
    on_batch: BatchHandler,
    *,
    gpu: str = "auto",
    accesses: Accesses | None = None,
    on_missing: str = "refuse",
    files_or_refusal: RecorderFiles | EnvironmentUnusable | None = None,
) -> Recording:
    """Start recording this process, before it uses CUDA.

    With ``gpu`` "sim", CUDA is not recorded; with "auto", CUDA is recorded unless there is no CUDA
    device. ``accesses`` None means "auto": accesses are recorded until they repeat, and assumed from
    arguments if recording is impossible. With ``on_missing`` "run", the recording continues without CUDA if
    CUDA cannot be recorded. ``files_or_refusal`` is the result of ``preflight``, which is called if the
    argument is None. Raises UsageError if CUDA is already in use or the process is already recorded, and
    EnvironmentUnusable if the recorder does not work or required exact accesses are impossible.
    """
    trace_directory = _new_trace_directory("cudakit run --sanitize")
    cuda = NOT_RECORDED
    try:
        if gpu == "auto":
            cuda = _record_cuda(trace_directory, files_or_refusal, accesses)
    except CudakitError as error:
        if on_missing == "refuse":
            shutil.rmtree(trace_directory)
            raise
        cuda = CudaRecording(notes=(f"CUDA was not recorded: {error.message}",))
    return Recording(on_batch, trace_directory, cuda)


def begin_profile(on_batch: BatchHandler, *, gpu: str = "auto") -> Recording:
    """Start profiling this process; closing the recording ends the profile.

    With ``gpu`` "sim", only simulated devices are profiled. A process can profile real devices once. Raises
    UsageError if the process is recorded, or was profiled before; EnvironmentUnusable if CUPTI does not work.
    """
    trace_directory = _new_trace_directory("cudakit run")
    try:
        cuda = _profile_cuda(trace_directory) if gpu == "auto" else NOT_RECORDED
    except CudakitError:
        shutil.rmtree(trace_directory)
        raise
    return Recording(on_batch, trace_directory, cuda, simulated_events=PROFILE_EVENTS)


def _new_trace_directory(other_recording: str) -> Path:
    if SPOOL in os.environ:
        raise UsageError(
            f"this process is already recorded: by {other_recording}, pytest or another block",
            hint="remove all but one of them: one recording covers the whole process",
        )
    return Path(mkdtemp(prefix=SPOOL_PREFIX))


def _profile_cuda(trace_directory: Path) -> CudaRecording:
    """Start CUPTI. If CUPTI does not work and there is no CUDA device, record nothing."""
    from cudakit.gpu.cuda.current import device_count
    from cudakit.gpu.cuda.driver import is_initialized

    files = preflight(None, profile=True)
    if not isinstance(files, RecorderFiles):
        if device_count():
            raise files
        return NOT_RECORDED
    if _PROFILE_MODULE_NAME in sys.modules:
        raise UsageError(
            "this process was profiled before: CUPTI can be used by one block",
            hint="profile the whole program: cudakit run --profile SCRIPT",
        )
    recorder = load_native_module("_recorder", files.recorder)
    sys.modules[_PROFILE_MODULE_NAME] = recorder
    try:
        other_nvtx_tool = recorder.start(
            str(trace_directory), "", frame_walker_address(files.frame_modules), [], True
        )
        why_no_profile = recorder.profile(
            str(files.library),
            delay=0.0,
            duration=0.0,
            range="",
            paused=False,
            now=is_initialized(),
        )
    except RuntimeError as error:
        raise EnvironmentUnusable(
            f"this process cannot be profiled: {error}",
            hint="profile the whole program: cudakit run --profile SCRIPT",
        ) from error
    if why_no_profile:
        raise EnvironmentUnusable(
            f"another tool is attached by CUDA_INJECTION64_PATH: {why_no_profile}",
            hint="unset the variable",
        )
    return CudaRecording(
        notes=_nvtx_notes(other_nvtx_tool), flush=recorder.finish, is_recorded=True
    )


def _nvtx_notes(other_tool: str) -> tuple[str, ...]:
    text = f"NVTX ranges are not recorded: NVTX_INJECTION64_PATH is {other_tool}"
    return (text,) if other_tool else ()


def _record_cuda(
    trace_directory: Path,
    files_or_refusal: RecorderFiles | EnvironmentUnusable | None,
    accesses: Accesses | None,
) -> CudaRecording:
    """Start the recorder. If the recorder does not work and there is no CUDA device, record nothing."""
    from cudakit.gpu.cuda.current import device_count
    from cudakit.gpu.cuda.driver import is_initialized

    if is_initialized():
        raise UsageError(
            "CUDA is already initialized in this process, so earlier GPU work was not recorded",
            hint="start before the first use of CUDA, or run the whole script: cudakit run --sanitize SCRIPT",
        )
    files_or_refusal = files_or_refusal or preflight(None)
    if not isinstance(files_or_refusal, RecorderFiles):
        if device_count():
            raise files_or_refusal
        return NOT_RECORDED
    files, note = add_device_patches(files_or_refusal, accesses, trace_directory)
    walker_address = frame_walker_address(files.frame_modules, watch_program_calls=True)
    patches = [(capability, path.read_bytes()) for capability, path in files.patches.items()]
    recorder = load_native_module("_recorder", files.recorder)
    try:
        other_nvtx_tool = recorder.start(
            str(trace_directory),
            str(files.library),
            walker_address,
            patches,
            templates=files.templates,
        )
    except RuntimeError as error:
        raise EnvironmentUnusable(
            f"the recorder does not work in this process: {error}",
            hint="try the whole program: cudakit run --sanitize SCRIPT",
        ) from error
    after_import("torch", partial(attribute_backward, recorder))
    return CudaRecording(
        accesses=("auto" if files.templates else "exact") if files.patches else "arguments",
        notes=(*filter(None, (note,)), *_nvtx_notes(other_nvtx_tool)),
        flush=getattr(recorder, "read", None),
        is_recorded=True,
    )


def frame_walker_address(
    frame_readers: Mapping[str, Path], *, watch_program_calls: bool = False
) -> int:
    """Return the address of the stack reader for this interpreter, or 0.

    With ``watch_program_calls``, also make the stack reader number the calls of the program.
    """
    path = frame_readers.get(str(sys.implementation.cache_tag))
    if path is None:
        return 0
    frame_reader = load_native_module("_frames", path)
    if watch_program_calls:
        frame_reader.watch_program_calls(LIBRARY_FILE, TYPED_CODE)
    return int(frame_reader.walker)


def load_native_module(name: str, path: Path) -> Any:
    """Load an extension module by its path. Raises EnvironmentUnusable."""
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise EnvironmentUnusable(
            f"{path} is no extension module of this Python",
            hint="install cudakit with the pip of this Python",
        )
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- Record the memory of this process: allocations from the driver, and the pools of libraries ----


@dataclass(frozen=True, slots=True)
class MemorySource:
    """The recording of the memory of this process, until it ends."""

    recording: Recording | None  # the recording; None if only PyTorch's own history is recorded
    hooks: PoolHooks | None
    notes: tuple[str, ...]  # the allocations that are not recorded, with the reasons


def begin_memory(on_batch: BatchHandler, on_jax_profile: Callable[[str], None]) -> MemorySource:
    """Start recording the memory of this process with every interface that works.

    Allocations from the driver are recorded if CUDA has not been initialized, and the Sanitizer API is
    installed and used by no other tool. ``on_batch`` gets batches of the trace, ``on_jax_profile`` gets
    profiles of JAX.
    """
    from cudakit.gpu.cuda.current import device_count
    from cudakit.gpu.cuda.driver import is_initialized

    paths = SearchPaths.of_this_process()
    try:
        recorder = load_native_module("_recorder", find_recorder(paths))
        walker_address = frame_walker_address(find_frame_readers(paths))
    except EnvironmentUnusable as error:
        return MemorySource(None, None, (f"only PyTorch's memory is recorded: {error.message}",))
    library = reason = ""
    if is_initialized():
        reason = "CUDA was initialized before the block"
    elif isinstance(files_or_refusal := preflight(None), RecorderFiles):
        library = str(files_or_refusal.library)
    elif device_count():
        reason = files_or_refusal.message
    notes = [f"allocations from the driver are not recorded: {reason}"] if reason else []
    trace_directory = Path(mkdtemp(prefix=SPOOL_PREFIX))
    start = partial(recorder.start, str(trace_directory))
    try:
        try:
            other_nvtx_tool = start(library, walker_address, [], True)
        except RuntimeError as error:
            if not library:
                raise
            notes.append(f"allocations from the driver are not recorded: {error}")
            library = ""
            other_nvtx_tool = start(library, walker_address, [], True)
    except RuntimeError as error:
        shutil.rmtree(trace_directory)
        return MemorySource(None, None, (f"only PyTorch's memory is recorded: {error}",))
    notes += _nvtx_notes(other_nvtx_tool)

    def attempt(action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 must not disturb the program
            notes.append(f"{type(error).__name__}: {error}")

    recording = Recording(on_batch, trace_directory, CudaRecording(is_recorded=True))
    pool_hooks = PoolHooks(recorder, attempt, on_jax_profile, driver_is_recorded=bool(library))
    pool_hooks.watch(after_import)
    after_import("torch", partial(attribute_backward, recorder, ranges=True))
    return MemorySource(recording, pool_hooks, tuple(notes))
