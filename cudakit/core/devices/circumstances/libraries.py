"""Where the libraries of CUDA lie, in the order in which the dynamic loader looks (man 8 ld.so)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from cudakit.core.devices.circumstances.files import Files
from cudakit.core.devices.circumstances.packages import Distribution

# What the loader looks at last; the multiarch names are Debian's.
_SYSTEM = (
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/lib64",
    "/usr/lib64",
    "/lib",
    "/usr/lib",
)
# The name that programs ask for: libcudnn.so.9, not libcudnn.so nor libcudnn.so.9.19.0.
_SONAME = re.compile(
    r"lib(cuda|nvidia-ml|cudart|cublas|cublasLt|cudnn|nccl|nvrtc|cupti|nvJitLink"
    r"|cusparse|cusolver|cufft|curand)\.so\.\d+(\.\d)?"
)


@dataclass(frozen=True, slots=True)
class Library:
    """One copy of a library, under the name that programs ask for."""

    soname: str
    path: str
    real: str  # where symbolic links lead
    source: str  # "LD_LIBRARY_PATH", "package", "system" (ld.so's own list) or "toolkit"


def libraries(
    files: Files, environment: Mapping[str, str], distributions: Iterable[Distribution]
) -> Iterator[Library]:
    """Find the driver's and CUDA's libraries, the sooner found by the loader the sooner here."""
    wheels = {one.place for one in distributions if one.name.startswith("nvidia-")}
    for source, directories in (
        ("LD_LIBRARY_PATH", search_path(environment)),
        ("package", _wheel_directories(files, sorted(wheels))),
        ("system", (*_configured(files), *_SYSTEM)),
        ("toolkit", _toolkits(files, environment)),
    ):
        for directory in dict.fromkeys(directories):
            yield from _in(files, directory, source)


def search_path(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the absolute directories of LD_LIBRARY_PATH."""
    parts = re.split("[:;]", environment.get("LD_LIBRARY_PATH", ""))
    return tuple(os.path.normpath(part) for part in parts if part.startswith("/"))


def _in(files: Files, directory: str, source: str) -> Iterator[Library]:
    for name in files.names(directory):
        if _SONAME.fullmatch(name):
            path = f"{directory}/{name}"
            yield Library(name, path, files.resolve(path), source)


def _wheel_directories(files: Files, places: Iterable[str]) -> Iterator[str]:
    for place in places:
        for package in files.names(f"{place}/nvidia"):
            yield f"{place}/nvidia/{package}/lib"


def _configured(files: Files) -> Iterator[str]:
    """Give the directories that /etc/ld.so.conf.d adds, before the loader's own."""
    for name in files.names("/etc/ld.so.conf.d"):
        for line in (files.text(f"/etc/ld.so.conf.d/{name}") or "").splitlines():
            directory = line.partition("#")[0].strip()
            if directory.startswith("/"):
                yield os.path.normpath(directory)


def _toolkits(files: Files, environment: Mapping[str, str]) -> Iterator[str]:
    named = (environment.get(name, "") for name in ("CUDA_PATH", "CUDA_HOME", "CONDA_PREFIX"))
    for place in (*filter(None, named), *toolkit_directories(files)):
        yield f"{place}/lib64"
        yield f"{place}/lib"


def toolkit_directories(files: Files) -> tuple[str, ...]:
    """Return the CUDA toolkits under /usr/local; links to one another count once."""
    found = (f"/usr/local/{name}" for name in files.names("/usr/local") if name.startswith("cuda"))
    return tuple(dict.fromkeys(files.resolve(place) for place in found))
