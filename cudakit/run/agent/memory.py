"""Records the memory of torch from the first use of CUDA; saves snapshots when memory runs out and at exit.

Imports nothing: a hook waits for the import of torch. Calls private functions of ``torch.cuda.memory``, as of
torch 2.1 and newer.
"""

import atexit
import os
import sys

TYPE_CHECKING = False  # as in typing, which is not imported for it
if TYPE_CHECKING:
    from _frozen_importlib import ModuleSpec
    from collections.abc import Callable, Sequence
    from types import ModuleType
    from typing import Any, Protocol

    class Spool(Protocol):
        """The directory for lines to the supervisor."""

        directory: str

        def attempt(self, action: "Callable[[], None]") -> None: ...

        def report(self, what: str, line: str) -> None: ...


# The last events of each device: some hundred MB of the process's memory at most.
_MOST_EVENTS = 200_000
# The second is the name before torch 2.5.
_OBSERVERS = ("_cuda_attach_out_of_memory_observer", "_cuda_attachOutOfMemoryObserver")


class History:
    """The memory history of this process and its forks.

    The process that the supervisor started writes to ``path``, any other to a name with its rank or PID. The
    first out-of-memory error writes a file whose name ends with ``-oom``.
    """

    def __init__(self, path: str, spool: "Spool", supervisor: int) -> None:
        self._stem, self._suffix = os.path.splitext(path)
        self._spool = spool
        self._main = os.getpid() if os.getppid() == supervisor else 0
        self._torch: Any = None
        self._recording = 0  # the PID of the recording process
        self._failed = 0  # the PID of the process that ran out of memory

    def await_torch(self) -> None:
        """Begin at the first use of CUDA through torch."""
        atexit.register(self._at_exit)
        if torch := sys.modules.get("torch"):
            self._imported(torch)
        else:
            sys.meta_path.insert(0, _ImportHook("torch", self._imported))

    def _imported(self, torch: "ModuleType") -> None:
        self._torch = torch
        # torch calls this when CUDA is initialised, or at once if it is.
        self._spool.attempt(lambda: self._torch.cuda._lazy_call(self._initialised))

    def _initialised(self) -> None:
        self._recording = os.getpid()
        self._spool.attempt(self._record)
        self._spool.attempt(self._observe)

    def _record(self) -> None:
        memory = self._torch.cuda.memory
        memory._record_memory_history(stacks="python", max_entries=_MOST_EVENTS)

    def _observe(self) -> None:
        names = [name for name in _OBSERVERS if hasattr(self._torch._C, name)]
        if not names:
            raise AttributeError("this torch does not tell when memory runs out")
        getattr(self._torch._C, names[0])(self._out_of_memory)

    def _out_of_memory(self, *_: int) -> None:
        if self._failed != os.getpid():
            self._failed = os.getpid()
            self._spool.attempt(lambda: self._save("-oom"))

    def _at_exit(self) -> None:
        if self._recording == os.getpid():
            self._spool.attempt(lambda: self._save(""))

    def _save(self, moment: str) -> None:
        path = self._free_path(moment)
        partial = f"{path}.part"
        try:
            self._torch.cuda.memory._dump_snapshot(partial)
            os.replace(partial, path)
        except BaseException:
            if os.path.exists(partial):
                os.unlink(partial)
            raise
        self._spool.report("snapshots", path)

    def _free_path(self, moment: str) -> str:
        """Return a name that no other process of this run has claimed."""
        rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or ""
        who = f"-rank{int(rank):03d}" if rank.isdecimal() else ""
        if not who and os.getpid() != self._main:
            who = f"-{os.getpid()}"
        if not self._claim(f"{who}{moment}"):
            who = f"{who}-{os.getpid()}"
        return f"{self._stem}{who}{moment}{self._suffix}"

    def _claim(self, name: str) -> bool:
        try:
            os.close(os.open(f"{self._spool.directory}/taken{name}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


class _ImportHook:
    """An import hook that calls back after the import of one module, and removes itself."""

    def __init__(self, name: str, imported: "Callable[[ModuleType], None]") -> None:
        self._name = name
        self._imported = imported

    def find_spec(
        self,
        name: str,
        path: "Sequence[str] | None" = None,
        target: "ModuleType | None" = None,
    ) -> "ModuleSpec | None":
        """Find the module by the other finders, and call back after its execution."""
        if name != self._name:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        spec = next(filter(None, (other.find_spec(name, path, target) for other in others)), None)
        if spec and spec.loader:
            self._call_back_after(spec.loader)
        return spec

    def _call_back_after(self, loader: "Any") -> None:
        execute = loader.exec_module

        def exec_module(module: "ModuleType") -> None:
            del loader.exec_module
            sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
            execute(module)
            self._imported(module)

        loader.exec_module = exec_module
