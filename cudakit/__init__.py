"""Answers about the GPU for people who write Python on CUDA.

The public names are imported when they are first used, so that ``import cudakit`` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cudakit.api import load_snapshot, memviz, memviz_diff
    from cudakit.errors import (
        CudakitError,
        EnvironmentUnusable,
        InputError,
        MissingDependency,
        SnapshotError,
        UsageError,
    )

    __version__: str

_HOMES = {
    "CudakitError": "cudakit.errors",
    "EnvironmentUnusable": "cudakit.errors",
    "InputError": "cudakit.errors",
    "MissingDependency": "cudakit.errors",
    "SnapshotError": "cudakit.errors",
    "UsageError": "cudakit.errors",
    "load_snapshot": "cudakit.api",
    "memviz": "cudakit.api",
    "memviz_diff": "cudakit.api",
}

__all__ = [
    "CudakitError",
    "EnvironmentUnusable",
    "InputError",
    "MissingDependency",
    "SnapshotError",
    "UsageError",
    "__version__",
    "load_snapshot",
    "memviz",
    "memviz_diff",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("cudakit")
    if name not in _HOMES:
        raise AttributeError(f"module 'cudakit' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
