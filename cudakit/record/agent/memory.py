"""Record torch's CUDA memory history; save snapshots at the first out-of-memory error and at exit.

``History`` serves the agent of ``cudakit run``, which loads this file by path into programs that may not have
cudakit installed; ``TorchHistory`` serves blocks of ``cudakit.record_memory()``. The supervisor adds the
memory of other libraries to the snapshots of the agent, and writes those of processes without torch.

Recording begins when torch initializes CUDA. This module never imports torch: ``torch_import`` waits for the
program to do so. It calls private functions of ``torch.cuda.memory`` that exist in torch 2.1 and newer.
"""

import atexit
import os
import sys

TYPE_CHECKING = False  # has the meaning of typing.TYPE_CHECKING, without importing typing
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Protocol

    class Spool(Protocol):
        """The directory for messages to the supervisor: the interface of ``start.Spool``."""

        directory: str

        def attempt(self, action: "Callable[[], None]") -> None: ...

        def report(self, notice_kind: str, line: str) -> None: ...


# Number of events that torch keeps for each device. They take at most a few hundred MB of host memory.
_MAX_EVENTS = 200_000
# Names of the function that registers an out-of-memory observer: the first in torch 2.5 and newer, the second
# in older versions.
_OBSERVER_FUNCTIONS = ("_cuda_attach_out_of_memory_observer", "_cuda_attachOutOfMemoryObserver")


def _device_memory(torch: "Any") -> "dict[str, list[float]]":
    """Return the memory of each device in bytes, and the fraction of the memory that this process may use."""
    cuda = torch.cuda
    devices = range(cuda.device_count())
    memory_sizes = {
        "device_total_bytes": [cuda.get_device_properties(i).total_memory for i in devices]
    }
    if hasattr(cuda.memory, "get_per_process_memory_fraction"):  # torch 2.7 and newer
        memory_sizes["memory_fraction"] = [
            cuda.memory.get_per_process_memory_fraction(i) for i in devices
        ]
    return memory_sizes


def _split_name(path: str) -> "tuple[str, str]":
    """Return the path without its suffix, and the suffix: two of a compressed file, such as ``.pkl.gz``."""
    stem, suffix = os.path.splitext(path)
    if suffix == ".gz":
        stem, inner_suffix = os.path.splitext(stem)
        suffix = inner_suffix + suffix
    return stem, suffix


def _attach_observer(torch: "Any", observer: "Callable[..., None]") -> bool:
    """Call a function at each out-of-memory error. Return False if torch cannot do that."""
    names = [name for name in _OBSERVER_FUNCTIONS if hasattr(torch._C, name)]
    if names:
        getattr(torch._C, names[0])(observer)
    return bool(names)


class History:
    """The memory history of this process and its forks.

    The process that the supervisor started writes its snapshot to ``path``. Any other process adds its rank
    or PID to the file name. The snapshot of the first out-of-memory error has ``-oom`` in its name.
    ``recorder`` is the native recorder, or None.
    """

    def __init__(
        self, path: str, spool: "Spool", supervisor_pid: int, recorder: "Any" = None
    ) -> None:
        self._stem, self._suffix = _split_name(path)
        self._spool = spool
        self._recorder = recorder
        self._main_pid = os.getpid() if os.getppid() == supervisor_pid else 0
        self._path = ""
        self._claim_path()
        os.register_at_fork(after_in_child=self._claim_path)
        self._torch: Any = None
        # PID of the process that records, and PID of the process that ran out of memory; 0 if none. A forked
        # child inherits both values but has another PID: the child neither records nor ran out of memory.
        self._recording_pid = 0
        self._out_of_memory_pid = 0

    def await_torch(self, after_import: "Callable[[str, Callable[[], None]], None]") -> None:
        """Begin recording when torch initializes CUDA."""
        atexit.register(self._at_exit)
        after_import("torch", self._on_torch_import)

    def run_first_at_exit(self) -> None:
        """Save snapshots before the exit handlers of libraries in the program, which free memory.

        ``weakref.finalize`` registers its handler at its first call.
        """
        weakref = sys.modules.get("weakref")
        if weakref:
            weakref.finalize(self, lambda: None)
        atexit.unregister(self._at_exit)
        atexit.register(self._at_exit)

    def _on_torch_import(self) -> None:
        self._torch = sys.modules["torch"]
        self.run_first_at_exit()
        # torch calls the function when it initializes CUDA, or immediately if CUDA is initialized.
        self._spool.attempt(lambda: self._torch.cuda._lazy_call(self._on_cuda_initialized))

    def _on_cuda_initialized(self) -> None:
        self._recording_pid = os.getpid()
        self._spool.attempt(self._start_recording)
        self._spool.attempt(self._register_observer)

    def _start_recording(self) -> None:
        memory = self._torch.cuda.memory
        memory._record_memory_history(stacks="python", max_entries=_MAX_EVENTS)

    def _register_observer(self) -> None:
        if not _attach_observer(self._torch, self._on_out_of_memory):
            raise AttributeError("this version of torch has no out-of-memory observer")

    def _on_out_of_memory(self, *_: int) -> None:
        if self._out_of_memory_pid != os.getpid():
            self._out_of_memory_pid = os.getpid()
            self._spool.attempt(lambda: self._save_snapshot("-oom"))

    def _at_exit(self) -> None:
        if self._recording_pid == os.getpid():
            self._spool.attempt(lambda: self._save_snapshot(""))
        if self._recorder:
            self._recorder.mark("end of the program")

    def _save_snapshot(self, suffix: str) -> None:
        stem, extension = _split_name(self._path)
        path = f"{stem}{suffix}{extension}"
        # A random name and mode "x": another user could place a symbolic link at a predictable name.
        partial_path = f"{path}.{os.urandom(8).hex()}.part"
        try:
            self._write_snapshot(partial_path, is_compressed=path.endswith(".gz"))
            os.replace(partial_path, path)
        except BaseException:
            if os.path.exists(partial_path):
                os.unlink(partial_path)
            raise
        self._spool.report("snapshots", path)

    def _write_snapshot(self, path: str, *, is_compressed: bool) -> None:
        """Write a snapshot with the memory and the limit of each device in its settings."""
        import gzip
        import pickle

        snapshot = self._torch.cuda.memory._snapshot()
        settings = snapshot.setdefault("allocator_settings", {})
        self._spool.attempt(lambda: settings.update(_device_memory(self._torch)))
        # Level 6 is the default of the gzip program. A higher one takes several times longer.
        with gzip.open(path, "xb", 6) if is_compressed else open(path, "xb") as file:
            pickle.dump(snapshot, file)

    def _claim_path(self) -> None:
        """Choose and report a path for this process that no other process of the run uses."""
        rank_text = os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or ""
        process_suffix = f"-rank{int(rank_text):03d}" if rank_text.isdecimal() else ""
        if not process_suffix and os.getpid() != self._main_pid:
            process_suffix = f"-{os.getpid()}"
        try:
            # Only the first process of the run that uses a name can create the file.
            name = f"{self._spool.directory}/taken{process_suffix}"
            os.close(os.open(name, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            process_suffix = f"{process_suffix}-{os.getpid()}"
        except OSError:
            pass  # the supervisor has ended
        self._path = f"{self._stem}{process_suffix}{self._suffix}"
        self._spool.report("memory", self._path)


class TorchHistory:
    """PyTorch's memory history in a block of this process, which has one state per process.

    ``write_oom`` gets the snapshot of the first out-of-memory error, before the error is raised.
    """

    def __init__(
        self, *, max_entries: int, stacks: str, write_oom: "Callable[[dict[str, Any]], None]"
    ) -> None:
        self._options = {"stacks": stacks, "max_entries": max_entries}
        self._write_oom = write_oom
        self._has_ended = False
        self._is_recording = False
        self._is_first_oom = True

    def start(self) -> None:
        """Begin recording once PyTorch has initialized CUDA. The program must have imported torch."""
        # Before CUDA is initialized, PyTorch has no allocators that could record.
        call_later = getattr(sys.modules["torch"].cuda, "_lazy_call", None)
        if call_later:
            call_later(self._start_recording)
        else:
            self._start_recording()

    def stop(self) -> "dict[str, Any] | None":
        """Stop recording PyTorch's memory, and return its snapshot; None if PyTorch did not use CUDA."""
        self._has_ended = True  # disables the observer, which PyTorch cannot remove
        if not self._is_recording:
            return None
        try:
            return self._snapshot()
        finally:
            sys.modules["torch"].cuda.memory._record_memory_history(enabled=None)

    def _start_recording(self) -> None:
        if self._has_ended:
            return
        torch = sys.modules["torch"]
        torch.cuda.memory._record_memory_history(**self._options)
        self._is_recording = True
        _attach_observer(torch, self._on_out_of_memory)

    def _on_out_of_memory(self, *_: int) -> None:
        if self._is_first_oom and not self._has_ended:
            self._is_first_oom = False
            self._write_oom(self._snapshot())

    def _snapshot(self) -> "dict[str, Any]":
        """Return a snapshot with the memory and the limit of each device in its settings."""
        torch = sys.modules["torch"]
        snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
        snapshot.setdefault("allocator_settings", {}).update(_device_memory(torch))
        return snapshot
