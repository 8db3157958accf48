"""Find CUPTI's library, and check that it can profile programs that a Python interpreter runs."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cudakit.errors import EnvironmentUnusable
from cudakit.record.installed import (
    SearchPaths,
    find_frame_readers,
    find_recorder,
    toolkit_directories,
    unique_directories,
)
from cudakit.record.preflight import (
    driver_version,
    refuse_other_tools,
    search_path,
    try_library,
)

LIBRARY_OVERRIDE = "CUDAKIT_CUPTI_LIBRARY"

_LIBRARY_NAME = re.compile(r"libcupti\.so\.(\d+)")
# The wheels of CUDA 13 and of CUDA 12. torch and JAX load CUPTI from there.
_PACKAGE_PATTERNS = ("nvidia/cu*/lib", "nvidia/cuda_cupti/lib")
_TOOLKIT_PATTERNS = ("extras/CUPTI/lib64", "targets/*/lib", "lib64")
# Directories below the root for packages of Linux distributions.
_SYSTEM_PATTERNS = ("usr/lib/*-linux-gnu", "usr/lib64", "usr/local/lib")
# torch/version.py: cuda: Optional[str] = '13.0'
_TORCH_CUDA_VERSION = re.compile(r"^cuda\b[^=\n]*=\s*['\"](\d+)\.", re.MULTILINE)
# The first driver of each CUDA release, by the major version of the release, on which CUPTI depends too.
_FIRST_DRIVERS = {13: 580, 12: 525}
_INSTALL_COMMANDS = {13: "pip install 'cudakit[profile]'", 12: "pip install nvidia-cuda-cupti-cu12"}


@dataclass(frozen=True, slots=True)
class Cupti:
    """A libcupti.so, with the major version of its CUDA release."""

    path: Path
    major: int


@dataclass(frozen=True, slots=True)
class ProfileFiles:
    """The files that a profile uses, after all checks passed."""

    library: Path  # path of libcupti.so
    recorder: Path  # path of the native recorder
    # Modules that read Python frames, by sys.implementation.cache_tag.
    frame_modules: Mapping[str, Path]

    def settings(self) -> dict[str, Any]:
        """Return the paths that are passed to the program in its environment, as JSON values."""
        return {
            "cupti": str(self.library),
            "recorder": str(self.recorder),
            "frames": {tag: str(path) for tag, path in self.frame_modules.items()},
        }


def find_cupti(paths: SearchPaths) -> Cupti:
    """Return the library of CUPTI that torch loads, or else the newest that the driver supports.

    The variable CUDAKIT_CUPTI_LIBRARY overrides this choice with a path. Raises EnvironmentUnusable if no
    library is found.
    """
    if override := paths.environment.get(LIBRARY_OVERRIDE):
        path = Path(override)
        if not path.is_file():
            raise EnvironmentUnusable(
                f"{LIBRARY_OVERRIDE} is {override!r}, which is not a file",
                hint=f"unset {LIBRARY_OVERRIDE}, or set it to the path of libcupti.so",
            )
        name_match = _LIBRARY_NAME.fullmatch(path.name)
        return Cupti(path.absolute(), int(name_match[1]) if name_match else 0)
    supported_major = _supported_major(paths.root)
    libraries = [
        library for library in _installed_libraries(paths) if library.major <= supported_major
    ]
    torch_major = _torch_major(paths.packages)
    preferred_libraries = [library for library in libraries if library.major == torch_major]
    # Among libraries of one version the first is used: packages come before toolkits.
    library = max(preferred_libraries or libraries, key=lambda library: library.major, default=None)
    if library is None:
        raise EnvironmentUnusable(
            f"CUPTI, NVIDIA's profiling library, is not installed for CUDA {supported_major}",
            hint=_INSTALL_COMMANDS.get(supported_major, _INSTALL_COMMANDS[max(_INSTALL_COMMANDS)]),
        )
    return library


def preflight_profile(
    python: str | None, *, paths: SearchPaths | None = None
) -> ProfileFiles | EnvironmentUnusable:
    """Check whether programs of an interpreter can be profiled on this machine; return the reason if not.

    ``python`` is the path of the interpreter, or None for the interpreter that runs cudakit. CUDA is not
    loaded into this process: CUPTI is tried in another process.
    """
    try:
        return _find_files(python or sys.executable, paths or SearchPaths.of_this_process())
    except EnvironmentUnusable as error:
        return error


def _find_files(python: str, paths: SearchPaths) -> ProfileFiles:
    refuse_other_tools(paths.environment)
    packages = [] if python == sys.executable else search_path(python, paths.environment)
    # The program's packages come first: its framework loads CUPTI from there.
    paths = replace(paths, packages=(*packages, *paths.packages))
    recorder, library = find_recorder(paths), find_cupti(paths)
    result = try_library(python, paths.environment, recorder, library.path, "profile")
    if "error" in result:
        raise EnvironmentUnusable(
            f"programs cannot be profiled: {result['error']}",
            hint=f"the library is {library.path}; {LIBRARY_OVERRIDE}=FILE names another one",
        )
    return ProfileFiles(library.path, recorder, find_frame_readers(paths))


def _installed_libraries(paths: SearchPaths) -> Iterator[Cupti]:
    library_path = filter(None, paths.environment.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    places: list[tuple[Path, Sequence[str]]] = []
    for packages in unique_directories(map(Path, paths.packages)):
        places.append((packages, _PACKAGE_PATTERNS))
        # site-packages of a Conda environment: PREFIX/lib/python3.12/site-packages
        places += [(parent, (".",)) for parent in packages.parents[1:2]]
    places += [
        (toolkit, _TOOLKIT_PATTERNS) for toolkit in unique_directories(toolkit_directories(paths))
    ]
    places += [(Path(name), (".",)) for name in library_path]
    for directory, patterns in (*places, (paths.root, _SYSTEM_PATTERNS)):
        for path in (
            path
            for pattern in patterns
            for path in sorted(directory.glob(f"{pattern}/libcupti.so.*"))
        ):
            name_match = _LIBRARY_NAME.fullmatch(path.name)
            # Toolkits also have files named after a release of CUPTI, such as libcupti.so.2025.3.1.
            if name_match and int(name_match[1]) < 1000 and path.is_file():
                yield Cupti(path.absolute(), int(name_match[1]))


def _supported_major(root: Path) -> int:
    """Return the newest CUDA release that the driver supports; the newest of all if there is no driver."""
    version = driver_version(root)
    if version is None:
        return max(_FIRST_DRIVERS)
    # A driver is newer than the last known release if its number is higher.
    return next(
        (major for major, first_driver in _FIRST_DRIVERS.items() if version[1] >= first_driver),
        min(_FIRST_DRIVERS),
    )


def _torch_major(packages: Sequence[str]) -> int | None:
    """Return the major version of the CUDA release that the installed torch is built for."""
    for directory in packages:
        try:
            version_source = Path(directory, "torch/version.py").read_text(
                encoding="utf-8", errors="replace"
            )
        except OSError:
            continue
        version_match = _TORCH_CUDA_VERSION.search(version_source)
        return int(version_match[1]) if version_match else None
    return None
