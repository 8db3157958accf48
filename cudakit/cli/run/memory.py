"""The memory of a program that ``run --memory`` records: its files, and the limit that it may have passed."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cudakit.errors import EnvironmentUnusable, InputError, SnapshotError
from cudakit.record.protocol import AgentMessage, AgentMessageKind
from cudakit.stacks import call_site_index
from cudakit.units import format_bytes

if TYPE_CHECKING:
    from cudakit.memory.process import ProcessMemory
    from cudakit.memory.torch_snapshot import LimitPassed
    from cudakit.trace.spool import Batch


class MemoryMonitor:
    """Collects the memory of all processes of a program, and writes one snapshot for each.

    ``path`` is the snapshot of the process that cudakit started; the agents of other processes choose the
    names of their snapshots. ``limit_bytes`` is the limit of memory that a process may reserve on one device,
    None for no limit.
    """

    def __init__(
        self, path: Path, *, limit_bytes: int | None, add_note: Callable[[str], None]
    ) -> None:
        self._path = path
        self._limit_bytes = limit_bytes
        self._add_note = add_note
        # Recorded memory by PID and by the number of the trace within the process.
        self._memory_by_trace: dict[tuple[int, int], ProcessMemory] = {}
        self._paths: defaultdict[int, list[str]] = defaultdict(list)  # paths of snapshots by PID
        self._torch_paths: list[str] = []  # files that PyTorch wrote
        self._oom_paths: list[str] = []  # snapshots of out-of-memory errors of other pools
        # Snapshots of out-of-memory errors that are not written yet: PID, number of the trace, snapshot.
        self._unwritten_ooms: list[tuple[int, int, dict[str, Any]]] = []
        self._unix_offset_ns = time.time_ns() - time.monotonic_ns()

    def on_batch(self, batch: Batch) -> None:
        """Apply the records of a batch; those of simulated devices are ignored."""
        if not batch.simulated:
            self._memory_of(batch.process, batch.trace_number).feed(batch)

    def on_message(self, message: AgentMessage) -> bool:
        """Handle a message of an agent about memory; return False for other messages."""
        if message.kind is AgentMessageKind.MEMORY:
            self._paths[message.process].append(message.text)
            self._write_ooms()
        elif message.kind is AgentMessageKind.SNAPSHOTS:
            self._torch_paths.append(message.text)
            trace = message.process, self._last_trace_number(message.process)
            memory = self._memory_by_trace.get(trace)
            is_of_failure = message.text not in self._paths[message.process]
            if is_of_failure and memory is not None and not memory.is_empty:
                # PyTorch has just run out of memory, so the recorded memory is still that of the failure.
                self._write_snapshot(memory, message.text, has_torch=True)
        elif message.kind is AgentMessageKind.JAX:
            self._add_jax_arrays(message)
        else:
            return False
        return True

    def finish(self) -> tuple[list[str], list[str]]:
        """Write the snapshots of all processes, and check the limit.

        Returns the paths of the snapshots, and a sentence for each process and device that passed the limit.
        """
        self._write_ooms()
        paths = list(dict.fromkeys([*self._oom_paths, *self._torch_paths]))
        limits_passed: list[str] = []
        unread_paths = set(self._torch_paths)
        for (pid, trace_number), memory in self._memory_by_trace.items():
            path = self._path_of(pid, trace_number)
            if memory.is_empty:
                continue
            unread_paths.discard(path)
            snapshot = self._write_snapshot(memory, path, has_torch=path in self._torch_paths)
            if snapshot is not None and path not in paths:
                paths.append(path)
            limits_passed += self._check_limit(snapshot, pid)
        for path in sorted(unread_paths) if self._limit_bytes is not None else ():
            limits_passed += self._check_limit(self._read_torch_snapshot(path), 0)
        return paths, list(dict.fromkeys(limits_passed))

    def _memory_of(self, pid: int, trace_number: int) -> ProcessMemory:
        from cudakit.memory.process import ProcessMemory

        if (pid, trace_number) not in self._memory_by_trace:
            memory = self._memory_by_trace[pid, trace_number] = ProcessMemory()
            memory.on_out_of_memory = lambda: self._build_oom_snapshot(pid, trace_number)
        return self._memory_by_trace[pid, trace_number]

    def _build_oom_snapshot(self, pid: int, trace_number: int) -> None:
        """Build the snapshot of the moment when a pool ran out of memory."""
        from cudakit.memory.torch_snapshot import build_snapshot

        memory = self._memory_by_trace[pid, trace_number]
        snapshot = build_snapshot(memory, unix_offset_ns=self._unix_offset_ns, torch_snapshot=None)
        self._unwritten_ooms.append((pid, trace_number, snapshot))
        if self._paths[pid]:
            self._write_ooms()

    def _write_ooms(self) -> None:
        """Write the snapshots of out-of-memory errors. The agent must have reported the path before."""
        from cudakit.memory.torch_snapshot import extended_stem

        for pid, trace_number, snapshot in self._unwritten_ooms:
            path = Path(self._path_of(pid, trace_number))
            oom_path = extended_stem(path, "-oom")
            if self._write_file(snapshot, oom_path):
                self._oom_paths.append(str(oom_path))
        self._unwritten_ooms.clear()

    def _path_of(self, pid: int, trace_number: int) -> str:
        """Return the path that the agent of a process chose; without one, a name with the PID."""
        paths = self._paths[pid]
        if paths:
            return paths[min(trace_number, len(paths) - 1)]
        from cudakit.memory.torch_snapshot import extended_stem

        return str(extended_stem(self._path, f"-{pid}").absolute())

    def _add_jax_arrays(self, message: AgentMessage) -> None:
        from cudakit.memory.jax_profile import arrays_of_message
        from cudakit.memory.snapshot import JAX

        try:
            time_ns, jax_arrays = arrays_of_message(message.text)
        except InputError as error:
            self._add_note(error.message)
            return
        memory = self._memory_of(message.process, self._last_trace_number(message.process))
        memory.model.replace_blocks(JAX, jax_arrays, time_ns)

    def _last_trace_number(self, process: int) -> int:
        return max((number for pid, number in self._memory_by_trace if pid == process), default=0)

    def _write_snapshot(
        self, memory: ProcessMemory, path: str, *, has_torch: bool
    ) -> dict[str, Any] | None:
        """Write the snapshot of a process. If that is impossible, add a note and return None."""
        from cudakit.memory.torch_snapshot import build_snapshot

        torch_snapshot = self._read_torch_snapshot(path) if has_torch else None
        if has_torch and torch_snapshot is None:
            return None
        snapshot = build_snapshot(
            memory, unix_offset_ns=self._unix_offset_ns, torch_snapshot=torch_snapshot
        )
        return snapshot if self._write_file(snapshot, Path(path)) else None

    def _write_file(self, snapshot: dict[str, Any], path: Path) -> bool:
        """Write a snapshot. If that is impossible, add a note and return False."""
        from cudakit.memory.torch_snapshot import write_snapshot

        try:
            write_snapshot(snapshot, path)
        except OSError as error:
            self._add_note(f"cannot write {path}: {error.strerror}")
            return False
        return True

    def _read_torch_snapshot(self, path: str) -> dict[str, Any] | None:
        from cudakit.memory.torch_snapshot import read_snapshot

        try:
            return read_snapshot(Path(path))
        except SnapshotError as error:
            self._add_note(f"memory outside of PyTorch is missing: {error.message}")
            return None

    def _check_limit(self, snapshot: dict[str, Any] | None, pid: int) -> list[str]:
        from cudakit.memory.torch_snapshot import find_limit_passed

        if snapshot is None or self._limit_bytes is None:
            return []
        prefix = f"process {pid}: " if len(self._memory_by_trace) > 1 and pid else ""
        return [
            f"{prefix}{_limit_sentence(limit_passed, self._limit_bytes)}"
            for limit_passed in find_limit_passed(snapshot, self._limit_bytes)
        ]


def _limit_sentence(passed: LimitPassed, limit_bytes: int) -> str:
    """Return a sentence such as "cuda:0 passed the limit of 20 GiB: ... at train.py:33 in forward"."""
    text = f"memory on cuda:{passed.device} passed the limit of {format_bytes(limit_bytes)}"
    if not passed.pool:
        return f"{text} before the recorded events; peak {format_bytes(passed.peak_bytes)}"
    text += (
        f": {format_bytes(passed.reserved_bytes)} after {passed.pool} allocated"
        f" {format_bytes(passed.size_bytes)}"
    )
    if passed.stack:
        frame = passed.stack[call_site_index(passed.stack)]
        text += f" at {frame.filename}:{frame.line} in {frame.name}"
    return f"{text}; peak {format_bytes(passed.peak_bytes)}"


def recorder_settings(
    python: str | None, add_note: Callable[[str], None], *, use_driver: bool
) -> dict[str, Any]:
    """Return the recorder settings for memory alone, and add a note on the memory that is not recorded.

    Without ``use_driver`` or NVIDIA's Sanitizer API, or with another tool attached, only the hooks of pools
    are used.
    """
    from cudakit.gpu.cuda.current import device_count
    from cudakit.record.installed import SearchPaths, find_frame_readers, find_recorder
    from cudakit.record.preflight import RecorderFiles, preflight

    preflight_result = preflight(python) if use_driver else None
    if isinstance(preflight_result, RecorderFiles):
        return preflight_result.settings()
    paths = SearchPaths.of_this_process()
    try:
        recorder = find_recorder(paths)
    except EnvironmentUnusable as error:
        add_note(f"only PyTorch's memory is recorded: {error.message}; {error.hint}")
        return {}
    if preflight_result and device_count():
        add_note(
            "only PyTorch's memory and the pools of CuPy, Numba, RMM and JAX are recorded:"
            f" {preflight_result.message}; {preflight_result.hint}"
        )
    frame_readers = {tag: str(path) for tag, path in find_frame_readers(paths).items()}
    return {"recorder": str(recorder), "frames": frame_readers}
