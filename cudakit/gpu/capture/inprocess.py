"""Recording of the very process that asks for it, for blocks of code and for tests."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, TypeAlias

from cudakit.errors import CudakitError, EnvironmentUnusable, UsageError
from cudakit.gpu.capture.exact import Accesses, with_accesses
from cudakit.gpu.capture.preflight import Ready, Refusal, preflight
from cudakit.gpu.sim.recorder import VARIABLE as SPOOL
from cudakit.trace.spool import Batch, Spool

Consume: TypeAlias = Callable[[Batch], object]

# The trace of a long block must not fill the disk; a second of it is some megabytes at most.
_SECONDS_BETWEEN_READS = 1.0


@dataclass(frozen=True, slots=True)
class Cuda:
    """How CUDA itself is recorded, besides simulated devices."""

    accesses: Accesses | None = None  # how they are known; None where nothing is recorded
    notes: tuple[str, ...] = ()  # why nothing is, or why accesses are not exact, where that is news
    tell: Callable[[], None] | None = None  # has the recorder say what launches did so far


NOT_RECORDED = Cuda()


class Recording:
    """What this process enqueues on GPUs, from ``begin`` on until it ends, handed to a consumer.

    A recorder can be subscribed once in a process, before CUDA is used. So it stays, and what comes is read
    every second, that neither a block nor what follows it fills the disk.
    """

    def __init__(self, consume: Consume, directory: Path, cuda: Cuda = NOT_RECORDED) -> None:
        self.cuda = cuda
        self._consume = consume
        self._directory = directory
        self._spool = Spool(directory, discard=True)
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        atexit.register(self.close)
        if cuda.accesses:
            threading.Thread(target=self._read_always, name="cudakit", daemon=True).start()

    @contextmanager
    def drained(self) -> Iterator[None]:
        """Hand over what came so far; nothing more comes within the block.

        In a process that was forked off nothing is handed over: the recording is its parent's.
        """
        if os.getpid() != self._process:
            yield
            return
        with self._lock:
            for batch in () if self._closed else self._spool.batches():
                self._consume(batch)
            yield

    @contextmanager
    def settled(self) -> Iterator[None]:
        """As ``drained``, and what launches did so far is told: their work is waited for."""
        if self.cuda.tell and os.getpid() == self._process:
            self.cuda.tell()
        with self.drained():
            yield

    def close(self) -> None:
        """Read no more and delete what was read: the process ends."""
        if os.getpid() != self._process:
            self._spool.close()  # the lock may be held by a thread that was not forked off
            return
        with self._lock:
            self._closed = True
            self._spool.close()
            shutil.rmtree(self._directory, ignore_errors=True)

    def watch_simulated(self, *, wanted: bool) -> None:
        """Record the simulated devices that are opened from now on, or no more of them."""
        if wanted:
            os.environ[SPOOL] = str(self._directory)
        else:
            os.environ.pop(SPOOL, None)

    def _read_always(self) -> None:
        while True:
            time.sleep(_SECONDS_BETWEEN_READS)
            with self.drained():
                pass


def begin(
    consume: Consume,
    *,
    gpu: str = "auto",
    accesses: Accesses | None = None,
    on_missing: str = "refuse",
    found: Ready | Refusal | None = None,
) -> Recording:
    """Record this process; call it before CUDA is used.

    ``gpu`` "sim" leaves CUDA itself alone. So does "auto" where CUDA cannot be recorded and shows no device
    either: nothing can be missed. ``accesses`` are exact where they can be, unless it says which are
    wanted. ``on_missing`` "run" goes on where something is missed. ``found`` replaces the preflight. Raises
    UsageError where it is too late or the process is watched already, EnvironmentUnusable where the
    recorder cannot work, or exact accesses are wanted and cannot be had.
    """
    if SPOOL in os.environ:
        raise UsageError(
            "this process is watched already: by cudakit run --sanitize, pytest --cuda-sanitize or a block",
            hint="one of them is enough: it finds the races of all",
        )
    directory = Path(mkdtemp(prefix="cudakit-"))
    try:
        cuda = _record_cuda(directory, found, accesses) if gpu == "auto" else NOT_RECORDED
    except CudakitError as error:
        if on_missing == "refuse":
            shutil.rmtree(directory)
            raise
        cuda = Cuda(notes=(f"CUDA was not watched: {error.message}",))
    return Recording(consume, directory, cuda)


def _record_cuda(directory: Path, found: Ready | Refusal | None, accesses: Accesses | None) -> Cuda:
    """Start the recorder, unless it does not work and nothing can be missed."""
    from cudakit.gpu.cuda.current import device_count
    from cudakit.gpu.cuda.driver import is_initialized

    if is_initialized():
        raise UsageError(
            "CUDA is in use in this process already: what was enqueued before is not known",
            hint="begin before CUDA is first used, or watch all of it: cudakit run --sanitize SCRIPT",
        )
    found = found or preflight(None)
    if isinstance(found, Ready):
        ready, why_not = with_accesses(found, accesses, directory)
        recorder = _subscribe(ready, directory)
        return Cuda(
            accesses="exact" if ready.patches else "arguments",
            notes=(why_not,) if why_not else (),
            tell=getattr(recorder, "read", None),
        )
    if device_count():
        raise found.error()
    return NOT_RECORDED


def _subscribe(ready: Ready, directory: Path) -> Any:
    """Start the recorder, and return it."""
    frames = ready.frames.get(sys.implementation.cache_tag)
    walker = _load("_frames", frames).walker if frames else 0
    patches = [(number, path.read_bytes()) for number, path in ready.patches.items()]
    recorder = _load("_recorder", ready.recorder)
    try:
        recorder.start(str(directory), str(ready.library), walker, *([patches] if patches else []))
    except RuntimeError as error:
        raise EnvironmentUnusable(
            f"the recorder does not work in this process: {error}",
            hint="try the whole program: cudakit run --sanitize SCRIPT",
        ) from error
    return recorder


def _load(name: str, path: Path) -> Any:
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise EnvironmentUnusable(f"{path} is no extension module of this Python")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
