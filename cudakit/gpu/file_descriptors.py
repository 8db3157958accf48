"""File descriptors of other processes, which refer to physical memory of a device.

A descriptor is taken by pidfd_open(2) and pidfd_getfd(2), as PyTorch does for its expandable segments
(c10/cuda/CUDACachingAllocator.cpp, ExpandableSegment::fromShared).
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from pathlib import Path

from cudakit.errors import CudakitError, EnvironmentUnusable, Unsupported
from cudakit.gpu.api import Descriptor, ProcessId

# The same on every architecture that CUDA runs on (include/uapi/asm-generic/unistd.h of Linux).
_PIDFD_GETFD = 438
# Index of starttime among the fields behind the name (proc_pid_stat(5): the 22nd, the name is the 2nd).
_STARTED = 22 - 3


def this_process() -> ProcessId:
    """Return the id of this process."""
    return ProcessId(os.getpid(), _started(os.getpid()) or 0)


def take(descriptor: Descriptor, *, pidfd_getfd: Callable[[int, int], int] | None = None) -> int:
    """Return a file descriptor of this process for the same file; it is to be closed.

    ``pidfd_getfd`` asks the kernel. Raises EnvironmentUnusable where the process has ended, has closed the
    descriptor, or this one may not take it; Unsupported where the system has no such calls.
    """
    process, ask = descriptor.process, pidfd_getfd or _pidfd_getfd
    if not hasattr(os, "pidfd_open"):
        raise Unsupported(
            "this system cannot pass file descriptors between processes (no pidfd_open)",
            hint="share memory without expandable segments: expandable_segments:False",
        )
    try:
        held = os.pidfd_open(process.pid)
        try:
            if _started(process.pid) != process.started:  # checked while the pidfd holds its number
                raise ended(process)
            return ask(held, descriptor.number)
        finally:
            os.close(held)
    except OSError as error:
        raise _refused(descriptor, error) from error


def ended(process: ProcessId) -> CudakitError:
    """Return the error for a process that has ended."""
    return EnvironmentUnusable(
        f"process {process.pid}, which shared the memory, has ended or is not visible",
        hint="open the memory while that process runs; containers must share a PID namespace (--pid)",
    )


def withdrawn(descriptor: Descriptor) -> CudakitError:
    """Return the error for a descriptor that its process has closed."""
    return EnvironmentUnusable(
        f"process {descriptor.process.pid} has freed the memory that it shared as file descriptor "
        f"{descriptor.number}",
        hint="keep the memory allocated until all other processes have opened it",
    )


def _refused(descriptor: Descriptor, error: OSError) -> CudakitError:
    process = descriptor.process
    if error.errno == errno.ESRCH:
        return ended(process)
    if error.errno == errno.EBADF:
        return withdrawn(descriptor)
    what = f"process {os.getpid()} cannot copy file descriptor {descriptor.number} of process {process.pid}"
    return EnvironmentUnusable(
        f"{what}: {os.strerror(error.errno or 0)}", hint=_remedy(error.errno)
    )


def _remedy(number: int | None) -> str:
    """Return a hint (pidfd_getfd(2), "ERRORS": it needs the permission of ptrace(2) to attach)."""
    plain = "share memory without expandable segments: expandable_segments:False"
    if number in (errno.EPERM, errno.EACCES):
        return (
            "run both processes as the same user, in a container with --cap-add=SYS_PTRACE, and set "
            f"kernel.yama.ptrace_scope to 0; or {plain}"
        )
    if number == errno.ENOSYS:
        return f"pidfd_getfd needs Linux 5.6, and a container that permits the call; or {plain}"
    return f"allow more open files (ulimit -n); or {plain}"


def _started(pid: int) -> int | None:
    """Return when a process started, None if it is not visible."""
    try:
        told = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return int(told.rpartition(")")[2].split()[_STARTED])


def _pidfd_getfd(pidfd: int, number: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    taken: int = libc.syscall(_PIDFD_GETFD, pidfd, number, 0)
    if taken < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return taken
