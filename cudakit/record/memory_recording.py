"""Record the memory of this process: allocations from the driver, and the pools of libraries."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from cudakit.errors import EnvironmentUnusable
from cudakit.record.installed import SearchPaths, find_frame_readers, find_recorder
from cudakit.record.pool_hooks import PoolHooks
from cudakit.record.preflight import RecorderFiles, preflight
from cudakit.record.recording import (
    BatchHandler,
    CudaRecording,
    Recording,
    frame_walker_address,
    load_native_module,
)
from cudakit.record.torch_import import after_import, attribute_backward
from cudakit.trace.spool import SPOOL_PREFIX


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
    paths = SearchPaths.of_this_process()
    try:
        recorder = load_native_module("_recorder", find_recorder(paths))
        walker_address = frame_walker_address(find_frame_readers(paths))
    except EnvironmentUnusable as error:
        return MemorySource(None, None, (f"only PyTorch's memory is recorded: {error.message}",))
    library, reason = _sanitizer_library()
    trace_directory = Path(mkdtemp(prefix=SPOOL_PREFIX))
    notes = [f"allocations from the driver are not recorded: {reason}"] if reason else []
    try:
        library = _start_recorder(recorder, trace_directory, library, walker_address, notes)
    except RuntimeError as error:
        shutil.rmtree(trace_directory)
        return MemorySource(None, None, (f"only PyTorch's memory is recorded: {error}",))
    recording = Recording(on_batch, trace_directory, CudaRecording(memory_only=True))
    pool_hooks = PoolHooks(
        recorder, _attempt(notes), on_jax_profile, driver_is_recorded=bool(library)
    )
    pool_hooks.watch(after_import)
    after_import("torch", partial(attribute_backward, recorder, ranges=True))
    return MemorySource(recording, pool_hooks, tuple(notes))


def _start_recorder(
    recorder: Any, trace_directory: Path, library: str, walker_address: int, notes: list[str]
) -> str:
    """Start the recorder; return the path of its library, which is empty if no CUDA calls are recorded."""
    try:
        other_nvtx_tool = recorder.start(str(trace_directory), library, walker_address, [], True)
    except RuntimeError as error:
        if not library:
            raise
        notes.append(f"allocations from the driver are not recorded: {error}")
        library = ""
        other_nvtx_tool = recorder.start(str(trace_directory), library, walker_address, [], True)
    if other_nvtx_tool:
        notes.append(f"NVTX ranges are not recorded: NVTX_INJECTION64_PATH is {other_nvtx_tool}")
    return library


def _sanitizer_library() -> tuple[str, str]:
    """Return the path of the Sanitizer API, or an empty path and the reason why it is unusable."""
    from cudakit.gpu.cuda.current import device_count
    from cudakit.gpu.cuda.driver import is_initialized

    if is_initialized():
        return "", "CUDA was initialized before the block"
    files_or_refusal = preflight(None)
    if isinstance(files_or_refusal, RecorderFiles):
        return str(files_or_refusal.library), ""
    return "", files_or_refusal.message if device_count() else ""


def _attempt(notes: list[str]) -> Callable[[Callable[[], None]], None]:
    """Return a function that runs an action, and adds a failure of the action to the notes."""

    def attempt(action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 must not disturb the program
            notes.append(f"{type(error).__name__}: {error}")

    return attempt
