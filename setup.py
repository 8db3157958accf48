"""The native extensions; everything else about the package is in pyproject.toml.

All extensions are optional: without a C compiler the install succeeds, and a slower or smaller
fallback is used. They are declared here, and not in pyproject.toml, so that sources and headers
are found by pattern.
"""

from __future__ import annotations

from glob import glob

from setuptools import Extension, setup

_FLAGS = ["-O2", "-std=c11", "-Wall", "-Wextra", "-fvisibility=hidden"]
_CAPTURE = "cudakit/record"


def _files(*patterns: str) -> list[str]:
    return sorted(path for pattern in patterns for path in glob(pattern, recursive=True))


def _extension(
    name: str,
    *sources: str,
    headers: tuple[str, ...] = (),
    include: tuple[str, ...] = (),
    libraries: tuple[str, ...] = (),
    flags: tuple[str, ...] = (),
    limited_api: bool = False,
) -> Extension:
    return Extension(
        name,
        sources=_files(*sources),
        depends=_files(*headers),  # also what the sdist contains besides the sources
        include_dirs=list(include),
        libraries=list(libraries),
        extra_compile_args=[*_FLAGS, *flags],
        py_limited_api=limited_api,
        optional=True,
    )


EXTENSIONS = [
    # Without it, snapshots are read by the pure-Python reader.
    _extension(
        "cudakit.memory.load._pickled",
        "cudakit/memory/load/**/*.c",
        headers=("cudakit/memory/load/**/*.h",),
    ),
    # Without it, the allocator's calls are pure Python.
    _extension(
        "cudakit.allocator._fast",
        "cudakit/allocator/fast/fast_path.c",
        headers=("cudakit/allocator/fast/*.h",),
    ),
    # Without it, kernels of cudakit.elementwise and cudakit.reduction are launched through Python.
    _extension("cudakit.gpu._fast_call", "cudakit/gpu/_fast_call.c"),
    # Without it, the race detector's shadow memory is pure Python.
    _extension(
        "cudakit.sanitize._shadow_memory",
        "cudakit/sanitize/native/*.c",
        headers=("cudakit/sanitize/native/*.h",),
    ),
    # Without it, buffers of cuda.core are allocated through pure Python.
    _extension("cudakit.arrays.plugs._buffers", "cudakit/arrays/plugs/_buffers.c"),
    # Without it, `cudakit.torch_pool` is unavailable and says so.
    _extension(
        "cudakit.arrays.plugs._native",
        "cudakit/arrays/plugs/_native.c",
        libraries=("dl", "pthread"),
        limited_api=True,
    ),
    # Without it, or on a newer CPython, races are reported without Python stacks. It is built
    # against the internal headers of one version of CPython, which have unused parameters.
    _extension(
        "cudakit.record._frames",
        f"{_CAPTURE}/_frames.c",
        headers=(f"{_CAPTURE}/walker.h",),
        flags=("-Wno-unused-parameter",),
    ),
    # Without it, `cudakit run --sanitize` is unavailable and says so.
    _extension(
        "cudakit.record._recorder",
        f"{_CAPTURE}/recorder/**/*.c",
        headers=(
            f"{_CAPTURE}/recorder/**/*.h",
            f"{_CAPTURE}/patch/arena.h",
            f"{_CAPTURE}/walker.h",
        ),
        include=(f"{_CAPTURE}/recorder", _CAPTURE),
        libraries=("dl", "pthread"),
        limited_api=True,
    ),
]

setup(ext_modules=[extension for extension in EXTENSIONS if extension.sources])
