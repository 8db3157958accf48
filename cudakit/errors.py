"""Every error that cudakit raises on purpose, and the exit code of each.

CudakitError                     4   something inside cudakit is wrong
├── RaceError                    1   operations on the GPU touch the same bytes, unordered
├── UsageError                   2   the command line cannot be carried out
├── InputError                   2   a file that cannot be used
│   ├── SnapshotError            2   not a memory snapshot, or a broken or hostile one
│   └── Unsupported              2   a device or library cannot do what was asked, and says why
└── EnvironmentUnusable          3   no driver, no GPU, a library is missing
    ├── MissingDependency        3   names the exact ``pip install``
    └── CudaError                3   the driver refused a call: its code, its name, what to do

A message says what happened and the value seen; ``hint`` says what to do.

The caching allocator has errors of its own: ``cudakit.OutOfMemory``, a CudaError that is a MemoryError too
and says where the memory is, and ``cudakit.PoolError``, a UsageError of private pools.
"""

from __future__ import annotations


class CudakitError(Exception):
    """Base of all deliberate errors: one line of message, one line of hint."""

    exit_code = 4

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class RaceError(CudakitError):
    """Two operations on the GPU touch the same bytes, and nothing orders them: the message is the report."""

    exit_code = 1


class UsageError(CudakitError):
    """The command line asks for something that cannot be done."""

    exit_code = 2


class InputError(CudakitError):
    """An input file is missing, unreadable or of the wrong kind."""

    exit_code = 2


class SnapshotError(InputError):
    """A file is not a memory snapshot, or is truncated, damaged or hostile."""


class Unsupported(InputError):
    """A device, or a library on it, does not offer what was asked."""


class EnvironmentUnusable(CudakitError):
    """The machine lacks what the command needs."""

    exit_code = 3


class MissingDependency(EnvironmentUnusable):
    """A Python package is missing; the hint is the command that installs it."""

    def __init__(self, package: str, *, purpose: str, requirement: str | None = None) -> None:
        super().__init__(
            f"{package} is not installed, and {purpose} needs it",
            hint=f"pip install '{requirement or package}'",
        )


class CudaError(EnvironmentUnusable):
    """The CUDA driver refused a call."""

    def __init__(self, code: int, name: str, explanation: str, *, hint: str = "") -> None:
        super().__init__(f"{name}: {explanation}", hint=hint)
        self.code = code
        self.name = name
