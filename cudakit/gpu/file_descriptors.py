"""Duplication of file descriptors from other processes, to import their physical memory.

Uses pidfd_open(2) and pidfd_getfd(2), as PyTorch does for expandable segments
(c10/cuda/CUDACachingAllocator.cpp, ExpandableSegment::fromShared).
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from pathlib import Path

from cudakit.errors import CudakitError, EnvironmentUnusable, Unsupported
from cudakit.gpu.api import DescriptorHandle, ProcessId

# Number of the system call pidfd_getfd, the same on all architectures of CUDA
# (include/uapi/asm-generic/unistd.h).
_PIDFD_GETFD = 438
# Index of starttime, field 22 of /proc/PID/stat, among the fields after the process name, field 2
# (proc_pid_stat(5)).
_START_TIME = 22 - 3


def this_process() -> ProcessId:
    """Return the id of this process."""
    return ProcessId(os.getpid(), _start_time(os.getpid()) or 0)


def duplicate(
    descriptor: DescriptorHandle, *, pidfd_getfd: Callable[[int, int], int] | None = None
) -> int:
    """Return a duplicate of another process's file descriptor, which the caller must close.

    ``pidfd_getfd`` replaces the system call. Raises EnvironmentUnusable if the process has ended, has closed
    the descriptor, or denies access; Unsupported if the system lacks pidfd_open.
    """
    process, copy_descriptor = descriptor.process, pidfd_getfd or _pidfd_getfd
    if not hasattr(os, "pidfd_open"):
        raise Unsupported(
            "this system cannot pass file descriptors between processes (no pidfd_open)",
            hint="share memory without expandable segments: expandable_segments:False",
        )
    try:
        pidfd = os.pidfd_open(process.pid)
        try:
            # The open pidfd prevents reuse of the pid.
            if _start_time(process.pid) != process.started:
                raise ended_error(process)
            return copy_descriptor(pidfd, descriptor.number)
        finally:
            os.close(pidfd)
    except OSError as error:
        raise _copy_error(descriptor, error) from error


def ended_error(process: ProcessId) -> CudakitError:
    """Return the error for a process that has ended."""
    return EnvironmentUnusable(
        f"process {process.pid}, which shared the memory, has ended or is not visible",
        hint="open the memory while that process runs; containers must share a PID namespace (--pid)",
    )


def closed_error(descriptor: DescriptorHandle) -> CudakitError:
    """Return the error for a descriptor that its process has closed."""
    return EnvironmentUnusable(
        f"process {descriptor.process.pid} has freed the memory that it shared as file descriptor "
        f"{descriptor.number}",
        hint="keep the memory allocated until all other processes have opened it",
    )


def _copy_error(descriptor: DescriptorHandle, error: OSError) -> CudakitError:
    process = descriptor.process
    if error.errno == errno.ESRCH:
        return ended_error(process)
    if error.errno == errno.EBADF:
        return closed_error(descriptor)
    source = f"file descriptor {descriptor.number} of process {process.pid}"
    return EnvironmentUnusable(
        f"process {os.getpid()} cannot copy {source}: {os.strerror(error.errno or 0)}",
        hint=_errno_hint(error.errno),
    )


def _errno_hint(error_number: int | None) -> str:
    """Return a hint for an errno of pidfd_getfd(2), which needs permission to attach by ptrace."""
    alternative = "share memory without expandable segments: expandable_segments:False"
    if error_number in (errno.EPERM, errno.EACCES):
        return (
            "run both processes as the same user, in a container with --cap-add=SYS_PTRACE, and set "
            f"kernel.yama.ptrace_scope to 0; or {alternative}"
        )
    if error_number == errno.ENOSYS:
        return (
            f"pidfd_getfd needs Linux 5.6, and a container that permits the call; or {alternative}"
        )
    return f"allow more open files (ulimit -n); or {alternative}"


def _start_time(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot; None if it is not visible."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[_START_TIME])


def _pidfd_getfd(pidfd: int, number: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    duplicate_descriptor: int = libc.syscall(_PIDFD_GETFD, pidfd, number, 0)
    if duplicate_descriptor < 0:
        error_number = ctypes.get_errno()
        raise OSError(error_number, os.strerror(error_number))
    return duplicate_descriptor
