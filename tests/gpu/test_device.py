"""Tests the duplication of file descriptors of other processes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from cudakit.errors import EnvironmentUnusable
from cudakit.gpu.api import DescriptorHandle, ProcessId
from cudakit.gpu.device import duplicate, this_process

CHILD = """
import os, sys
from cudakit.gpu.device import this_process
read, write = os.pipe()
os.write(write, b"from the child")
process = this_process()
print(process.pid, process.started, read, flush=True)
sys.stdin.read()
"""


@contextmanager
def child() -> Iterator[DescriptorHandle]:
    """Run a child process with a pipe within a block."""
    with subprocess.Popen(
        [sys.executable, "-P", "-c", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None
        pid, started, number = map(int, running.stdout.readline().split())
        yield DescriptorHandle(ProcessId(pid, started), number, 1)
        running.communicate()


def refuses(code: int) -> Callable[[int, int], int]:
    def ask(pidfd: int, number: int) -> int:  # noqa: ARG001
        raise OSError(code, os.strerror(code))

    return ask


def test_duplicated_descriptor_refers_to_same_file() -> None:
    with child() as descriptor:
        try:
            copied = duplicate(descriptor)
        except EnvironmentUnusable as error:
            pytest.skip(f"this container forbids it: {error}")
        assert os.read(copied, 100) == b"from the child"
        os.close(copied)


def test_ended_process_error_has_pid() -> None:
    with child() as descriptor:
        pass

    with pytest.raises(EnvironmentUnusable, match=f"process {descriptor.process.pid}.* has ended"):
        duplicate(descriptor)


def test_process_with_reused_pid_is_rejected() -> None:
    process = this_process()
    earlier = ProcessId(process.pid, process.started - 1)

    with pytest.raises(EnvironmentUnusable, match="has ended"):
        duplicate(DescriptorHandle(earlier, 0, 1))


def test_closed_descriptor_error_says_memory_was_freed() -> None:
    with pytest.raises(EnvironmentUnusable, match="has freed the memory") as caught:
        duplicate(DescriptorHandle(this_process(), 1 << 20, 1), pidfd_getfd=refuses(errno.EBADF))
    assert "keep the memory allocated" in caught.value.hint


@pytest.mark.parametrize(
    ("code", "hint"),
    [
        (errno.EPERM, "--cap-add=SYS_PTRACE"),
        (errno.EPERM, "expandable_segments:False"),
        (errno.EPERM, "ptrace_scope"),
        (errno.ENOSYS, "Linux 5.6"),
        (errno.EMFILE, "ulimit -n"),
    ],
)
def test_permission_error_has_hint(code: int, hint: str) -> None:
    count_before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(EnvironmentUnusable, match=os.strerror(code)) as caught:
        duplicate(DescriptorHandle(this_process(), 0, 1), pidfd_getfd=refuses(code))

    assert hint in caught.value.hint
    assert len(os.listdir("/proc/self/fd")) == count_before


def test_process_id_differs_after_fork() -> None:
    assert this_process() == this_process()
    with child() as descriptor:
        assert descriptor.process != this_process()
