"""The errors that cudakit raises, each with the exit code of a command that it ends.

All errors derive from ``cudakit.CudakitError``. ``message`` is one line that states the problem and the
actual value; ``hint`` is one line that states the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence

# The message if the machine has no driver, the same in every command and call.
NO_DRIVER = "no CUDA driver found: libcuda.so.1 cannot be loaded"


def one_of(names: Sequence[str]) -> str:
    """Join the alternatives in a hint: ``a``, ``a or b``, ``a, b or c``."""
    *earlier_names, last_name = names
    return f"{', '.join(earlier_names)} or {last_name}" if earlier_names else last_name


class CudakitError(Exception):
    """The base class of all errors. An instance of the base class itself reports a bug in cudakit."""

    exit_code = 4

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class RaceError(CudakitError):
    """Two GPU operations access the same bytes without synchronization. The message is the report."""

    exit_code = 1


class UsageError(CudakitError):
    """The arguments of a command or a call are not valid."""

    exit_code = 2


class InputError(CudakitError):
    """An input file is missing, unreadable or of the wrong format."""

    exit_code = 2


class SnapshotError(InputError):
    """A file is not a memory snapshot, or is truncated, damaged or malicious."""


class Unsupported(InputError):
    """A device or a library does not support the requested operation."""


class EnvironmentUnusable(CudakitError):
    """The machine lacks a required driver, GPU, library, memory or disk space."""

    exit_code = 3


class GpuUnavailable(EnvironmentUnusable):
    """The machine has no NVIDIA driver, or no GPU that CUDA can use."""

    def __init__(
        self,
        message: str = NO_DRIVER,
        *,
        hint: str = "install the NVIDIA driver, or give the container its GPUs (docker run --gpus all); "
        "cudakit doctor finds the cause",
    ) -> None:
        super().__init__(message, hint=hint)


class MissingDependency(EnvironmentUnusable):
    """A Python package is missing; the hint is the pip command that installs it."""

    def __init__(
        self,
        package: str,
        *,
        purpose: str,
        requirement: str | None = None,
        problem: str = "is not installed",
        where: str = "",
    ) -> None:
        super().__init__(
            f"{package} {problem}, and {purpose} needs it",
            hint=f"pip install '{requirement or package}'{where}",
        )


class CudaError(EnvironmentUnusable):
    """A call of the CUDA driver failed; ``code`` and ``name`` are those of the driver."""

    def __init__(self, code: int, name: str, explanation: str, *, hint: str = "") -> None:
        super().__init__(f"{name}: {explanation}", hint=hint)
        self.code = code
        self.name = name


class StorageError(EnvironmentUnusable):
    """A transfer between a file and device memory failed, for example because the drive failed."""


class CollectiveError(EnvironmentUnusable):
    """A collective operation failed, or a process that takes part in collective operations ended."""
