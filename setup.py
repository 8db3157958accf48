"""The native extensions; everything else about the package is in pyproject.toml.

All extensions are optional: without a C compiler the install succeeds, and a slower or smaller
fallback is used. They are declared here, and not in pyproject.toml, so that sources and headers
are found by pattern.
"""

from __future__ import annotations

from glob import glob

from setuptools import Extension, setup

_FLAGS = ["-O2", "-std=c11", "-Wall", "-Wextra", "-fvisibility=hidden"]
_RECORD = "cudakit/record"


def _extension(
    name: str,
    *,
    headers: tuple[str, ...] = (),
    include: tuple[str, ...] = (),
    libraries: tuple[str, ...] = (),
    flags: tuple[str, ...] = (),
    limited_api: bool = False,
) -> Extension:
    """``package._name`` is built from ``package/native/name.c``, or the folder ``package/native/name``."""
    package, _, stem = name.rpartition("._")
    native = f"{package.replace('.', '/')}/native"
    return Extension(
        name,
        sources=sorted(
            glob(f"{native}/{stem}.c") + glob(f"{native}/{stem}/**/*.c", recursive=True)
        ),
        # Also what the sdist contains besides the sources.
        depends=sorted([*headers, *glob(f"{native}/{stem}/**/*.h", recursive=True)]),
        include_dirs=list(include),
        libraries=list(libraries),
        extra_compile_args=[*_FLAGS, *flags],
        py_limited_api=limited_api,
        optional=True,
    )


EXTENSIONS = [
    # Without it, snapshots are read by the pure-Python reader.
    _extension("cudakit.memory.load._pickled"),
    # Without it, the allocator's calls are pure Python.
    _extension("cudakit.allocator._fast"),
    # Without it, kernels of cudakit.elementwise and cudakit.reduction are launched through Python.
    _extension("cudakit.gpu._fast_call"),
    # Without it, the race detector's shadow memory is pure Python.
    _extension("cudakit.sanitize._shadow_memory"),
    # Without it, buffers of cuda.core are allocated through pure Python.
    _extension("cudakit.arrays.plugs._buffers"),
    # Without it, `cudakit.torch_pool` is unavailable and says so.
    _extension("cudakit.arrays.plugs._torch_pool", libraries=("dl", "pthread"), limited_api=True),
    # Without it, or on a newer CPython, races are reported without Python stacks. It is built
    # against the internal headers of one version of CPython, which have unused parameters.
    _extension(
        "cudakit.record._frames",
        headers=(f"{_RECORD}/native/walker.h",),
        flags=("-Wno-unused-parameter",),
    ),
    # Without it, `cudakit run --sanitize` is unavailable and says so.
    _extension(
        "cudakit.record._recorder",
        headers=(f"{_RECORD}/native/walker.h", f"{_RECORD}/patch/arena.h"),
        include=(f"{_RECORD}/native/recorder", f"{_RECORD}/native", _RECORD),
        libraries=("dl", "pthread"),
        limited_api=True,
    ),
]

setup(ext_modules=[extension for extension in EXTENSIONS if extension.sources])
