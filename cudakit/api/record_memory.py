"""Record GPU memory while a ``with`` block runs, as ``cudakit run --memory`` does for a program."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, Literal

from cudakit.memory.jax_profile import arrays_of_message
from cudakit.memory.process import ProcessMemory
from cudakit.memory.snapshot import JAX
from cudakit.memory.torch_snapshot import (
    build_snapshot,
    extended_stem,
    write_snapshot,
)
from cudakit.record.agent.memory import TorchHistory
from cudakit.record.agent.torch_import import after_import
from cudakit.record.recording import MemorySource, begin_memory
from cudakit.trace.spool import Batch


class MemoryRecording:
    """The recording of a ``with`` block: its path, the written files, and notes on unrecorded memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: list[Path] = []
        self.notes: tuple[str, ...] = ()


@contextmanager
def record_memory(
    path: str | os.PathLike[str] = "cudakit-memory.pickle",
    *,
    max_entries: int = 200_000,
    stacks: Literal["python", "all"] = "python",
) -> Iterator[MemoryRecording]:
    """Record the GPU memory of a ``with`` block, for ``cudakit memviz``; also a decorator.

    Records PyTorch's history, the pools of CuPy, Numba, RMM and JAX, and, if the first block begins before
    CUDA is initialized, every allocation from the driver, with the Sanitizer API. The snapshot has PyTorch's
    format. It is written to ``path`` when the block ends, also after an exception. When the memory of PyTorch
    or CuPy first runs out in the block, another snapshot is written, to a name with ``-oom``, such as
    ``cudakit-memory-oom.pickle``. With the suffix ``.gz`` the files are compressed. Existing files are
    replaced. The snapshot has the last ``max_entries`` events of each device; with ``stacks`` "all" PyTorch's
    events also have C++ frames.

    The block yields an object with ``path``, ``files`` (the files written so far) and ``notes`` (what is not
    recorded, and why). Memory that a pool allocated before the first block is not recorded. PyTorch's history
    has one state per process: do not nest blocks, and do not call ``_record_memory_history`` in a block.

    >>> with cudakit.record_memory("step.pickle") as recording:  # doctest: +SKIP
    ...     train_step()
    """
    snapshot_path = Path(path).absolute()
    recording = MemoryRecording(snapshot_path)
    session = _session()
    recording.notes = session.source.notes

    def write_snapshot_file(snapshot: dict[str, Any], output_path: Path) -> None:
        write_snapshot(snapshot, output_path)
        recording.files.append(output_path)

    oom_path = extended_stem(snapshot_path, "-oom")
    history = TorchHistory(
        max_entries=max_entries,
        stacks=stacks,
        write_oom=lambda torch: write_snapshot_file(session.snapshot(torch), oom_path),
    )
    session.begin(history, max_entries, lambda snapshot: write_snapshot_file(snapshot, oom_path))
    try:
        yield recording
    finally:
        write_snapshot_file(session.end(), snapshot_path)
        recording.notes = session.source.notes


def _do_nothing() -> None:
    pass


class _Session:
    """The recording of all ``with`` blocks of a process; the recording continues until the process ends."""

    def __init__(self) -> None:
        self._memory = ProcessMemory()
        self._jax_messages: list[str] = []
        # PyTorch's memory history in the current ``with`` block; None outside of ``with`` blocks.
        self._history: TorchHistory | None = None
        self.source: MemorySource = begin_memory(self._feed, self._jax_messages.append)
        after_import("torch", self._start_history)

    def begin(
        self,
        history: TorchHistory,
        max_entries: int,
        write_oom: Callable[[dict[str, Any]], None],
    ) -> None:
        """Begin a ``with`` block: drop the events before the block, and keep the memory in use.

        When a pool other than PyTorch's first runs out of memory, ``write_oom`` is called with the snapshot
        of this moment.
        """
        self._history = history
        if sys.modules.get("torch") is not None:
            self._start_history()
        with self._drain_recorder():
            self._memory.model.forget_entries()
            self._memory.model.max_entries = max_entries
            self._memory.forget_ended_ranges()
            self._memory.has_run_out_of_memory = False
            self._memory.on_out_of_memory = lambda: write_oom(self._build_snapshot(None))

    def end(self) -> dict[str, Any]:
        """End a ``with`` block, and return the snapshot of the block."""
        history, self._history = self._history, None
        torch_snapshot = history.stop() if history else None
        snapshot = self.snapshot(torch_snapshot)
        self._memory.on_out_of_memory = _do_nothing
        return snapshot

    def _start_history(self) -> None:
        if self._history:
            self._history.start()

    def snapshot(self, torch_snapshot: dict[str, Any] | None) -> dict[str, Any]:
        """Return a snapshot of the memory in use. Changes ``torch_snapshot``, PyTorch's snapshot."""
        if self.source.hooks:
            self.source.hooks.profile_jax()
        with self._drain_recorder():
            while self._jax_messages:
                time_ns, jax_arrays = arrays_of_message(self._jax_messages.pop(0))
                self._memory.model.replace_blocks(JAX, jax_arrays, time_ns)
            return self._build_snapshot(torch_snapshot)

    def _build_snapshot(self, torch_snapshot: dict[str, Any] | None) -> dict[str, Any]:
        offset_ns = time.time_ns() - time.monotonic_ns()
        return build_snapshot(self._memory, unix_offset_ns=offset_ns, torch_snapshot=torch_snapshot)

    def _drain_recorder(self) -> Any:
        """Return a context manager; in its block, all recorded events have been passed to ``_feed``."""
        return self.source.recording.drain() if self.source.recording else nullcontext()

    def _feed(self, batch: Batch) -> None:
        if not batch.simulated:
            self._memory.feed(batch)


@cache
def _session() -> _Session:
    """Return the session that all blocks of this process share: CUDA can be recorded only once."""
    return _Session()
