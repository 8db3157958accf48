"""Find what recording needs: NVIDIA's Sanitizer API and CUPTI, cudakit's native modules, and ptxas."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from operator import attrgetter
from pathlib import Path

from cudakit.errors import EnvironmentUnusable

SANITIZER_OVERRIDE = "CUDAKIT_SANITIZER_LIBRARY"
CUPTI_OVERRIDE = "CUDAKIT_CUPTI_LIBRARY"
PTXAS_OVERRIDE = "CUDAKIT_PTXAS"
# Older libraries do not report the tensor-map loads of Hopper.
OLDEST_LIBRARY = (13, 4)
INSTALL_LIBRARY = "pip install 'cudakit[sanitize]'"

_LIBRARY_NAME = "libsanitizer-public.so"
_HEADER_PATTERN = "include/sanitizer*.h"
_LIBRARY_IN_PACKAGES = f"nvidia/*/compute-sanitizer/{_LIBRARY_NAME}"
_LIBRARY_IN_TOOLKIT = f"compute-sanitizer/{_LIBRARY_NAME}"
_TOOLKIT_PATTERNS = (
    "usr/local/cuda*",
    "opt/cuda*",
    "opt/nvidia/cuda*",
    "opt/nvidia/hpc_sdk/*/*/cuda/*",
)
_TOOLKIT_NAME = re.compile(r"(?:cuda-)?(\d+\.\d+)")
_WHEEL_VERSION = re.compile(r"nvidia_cuda_sanitizer_api-(.+)\.dist-info")

_PTXAS_IN_PACKAGES = (
    "nvidia/*/bin/ptxas",  # the wheels of nvidia-cuda-nvcc: cu13 for CUDA 13, cuda_nvcc for CUDA 12
    "torch/bin/ptxas",
    "triton/backends/nvidia/bin/ptxas",
    "triton/backends/nvidia/bin/ptxas-blackwell",
)
_PTXAS_RELEASE = re.compile(r"release \d+\.\d+, V(\d+(?:\.\d+)*)")
_PTXAS_TIMEOUT_S = 60  # a run takes about 0.3 s


@dataclass(frozen=True, slots=True)
class SearchPaths:
    """The directories and environment variables in which libraries and tools are searched."""

    environment: Mapping[str, str]
    packages: Sequence[str]  # directories that contain Python packages, as in sys.path
    root: Path = Path("/")
    native_directory: Path = Path(__file__).parent  # directory of cudakit's native modules

    @classmethod
    def of_this_process(cls) -> SearchPaths:
        """Return the search paths of this process."""
        return cls(dict(os.environ), tuple(sys.path))


@dataclass(frozen=True, slots=True)
class Library:
    """A libsanitizer-public.so; its version is empty if it is unknown."""

    path: Path
    version: tuple[int, ...]

    @property
    def headers(self) -> tuple[Path, ...]:
        """The headers of the Sanitizer API that are installed with the library."""
        return tuple(sorted(self.path.parent.glob(_HEADER_PATTERN)))

    def __str__(self) -> str:
        version = ".".join(map(str, self.version)) or "of unknown version"
        return f"Sanitizer API {version} ({self.path})"


def find_sanitizer_library(paths: SearchPaths) -> Library:
    """Return the newest library of the Sanitizer API, or the one that CUDAKIT_SANITIZER_LIBRARY names.

    Raises EnvironmentUnusable if there is none, or the newest is older than 13.4.
    """
    override = overriding_library(paths, SANITIZER_OVERRIDE, _LIBRARY_NAME)
    if override:
        library = Library(override, _library_version(override))
    else:
        directories = (
            *(
                (path, _LIBRARY_IN_PACKAGES)
                for path in unique_directories(map(Path, paths.packages))
            ),
            *(
                (path, _LIBRARY_IN_TOOLKIT)
                for path in unique_directories(toolkit_directories(paths))
            ),
        )
        files = [path for directory, pattern in directories for path in directory.glob(pattern)]
        libraries = [Library(path, _library_version(path)) for path in files]
        if not libraries:
            raise EnvironmentUnusable(
                f"{_LIBRARY_NAME}, NVIDIA's Sanitizer API, is not installed", hint=INSTALL_LIBRARY
            )
        library = max(libraries, key=attrgetter("version"))
    if library.version and library.version < OLDEST_LIBRARY:
        needed_version = ".".join(map(str, OLDEST_LIBRARY))
        raise EnvironmentUnusable(
            f"{library} is too old; version {needed_version} or newer is required",
            hint=f"unset {SANITIZER_OVERRIDE}, or set it to a newer library"
            if override
            else INSTALL_LIBRARY,
        )
    return library


_DRIVER_VERSION_FILE = "proc/driver/nvidia/version"
# "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build ..."
_DRIVER_VERSION = re.compile(r"Kernel Module(?: for \S+)?\s+((\d+)\.[\d.]+)")


def driver_version(root: Path) -> tuple[str, int] | None:
    """Return the version of the driver and its first number.

    Returns None if there is no driver, which a program without CUDA does not need, or its version is hidden.
    """
    try:
        version_text = (root / _DRIVER_VERSION_FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    version_match = _DRIVER_VERSION.search(version_text)
    return (version_match[1], int(version_match[2])) if version_match else None


def overriding_library(paths: SearchPaths, variable: str, name: str) -> Path | None:
    """Return the library that an environment variable names. Raises EnvironmentUnusable if it is no file."""
    override = paths.environment.get(variable)
    if override and not Path(override).is_file():
        raise EnvironmentUnusable(
            f"{variable} is {override!r}, which is not a file",
            hint=f"unset {variable}, or set it to the path of {name}",
        )
    return Path(override).absolute() if override else None


def toolkit_directories(paths: SearchPaths) -> Iterator[Path]:
    """Yield the directories in which a CUDA toolkit may be installed."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if path := paths.environment.get(name):
            yield Path(path)
    for pattern in _TOOLKIT_PATTERNS:
        yield from paths.root.glob(pattern)


def unique_directories(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield each existing directory once."""
    return iter(dict.fromkeys(path.resolve() for path in paths if path.is_dir()))


def _library_version(library: Path) -> tuple[int, ...]:
    for directory in library.resolve().parents[1:4]:
        try:
            components = json.loads((directory / "version.json").read_text(encoding="utf-8"))
            version = str(components["cuda_sanitizer_api"]["version"])
        except (OSError, ValueError, KeyError, TypeError):  # container images do not have the file
            names = (path.name for path in directory.glob("*.dist-info"))
            wheels = map(_WHEEL_VERSION.fullmatch, names)
            matches = (_TOOLKIT_NAME.fullmatch(directory.name), *wheels)
            version = next((match[1] for match in matches if match), "")
        if version:
            return tuple(map(int, re.findall(r"\d+", version)))
    return ()


def find_recorder(paths: SearchPaths) -> Path:
    """Return the path of the native recorder. Raises EnvironmentUnusable if it was not built."""
    spec = PathFinder.find_spec("_recorder", [str(paths.native_directory)])
    if spec is None or not spec.origin:
        raise EnvironmentUnusable(
            "the recorder is missing: no C compiler was found when cudakit was installed",
            hint="install a C compiler, then"
            " pip install --force-reinstall --no-binary cudakit cudakit",
        )
    return Path(spec.origin)


def is_recorder(path: str) -> bool:
    """Return whether a path, as of an injection library, is that of a recorder of cudakit."""
    return os.path.basename(path).startswith("_recorder.")


def find_frame_readers(paths: SearchPaths) -> dict[str, Path]:
    """Return the paths of the native modules that read Python frames, by the interpreter they were built for.

    Keys are values of ``sys.implementation.cache_tag``, such as ``cpython-312``. The result may be empty.
    """
    reader_paths = sorted(paths.native_directory.glob("_frames.*.so"))
    return {"-".join(path.name.split(".")[1].split("-")[:2]): path for path in reader_paths}


class AssemblerError(Exception):
    """ptxas failed; the message is its output."""


@dataclass(frozen=True, slots=True)
class Assembler:
    """A ptxas executable, with the version of its toolkit."""

    path: Path
    version: tuple[int, ...]

    def assemble(self, ptx: bytes, target: str) -> bytes:
        """Assemble a patch for a target, such as "sm_90". Raises AssemblerError."""
        with tempfile.TemporaryDirectory(prefix="cudakit-") as directory:
            ptx_path, cubin_path = Path(directory, "patch.ptx"), Path(directory, "patch.cubin")
            ptx_path.write_bytes(ptx)
            _run_ptxas(
                self.path, "-astoolspatch", f"-arch={target}", str(ptx_path), "-o", str(cubin_path)
            )
            return cubin_path.read_bytes()

    def __str__(self) -> str:
        return f"ptxas {'.'.join(map(str, self.version))} ({self.path})"


def find_assemblers(paths: SearchPaths) -> list[Assembler]:
    """Return every ptxas that runs, newest first, or only the one that CUDAKIT_PTXAS names.

    Raises EnvironmentUnusable if CUDAKIT_PTXAS names no working ptxas.
    """
    if override := paths.environment.get(PTXAS_OVERRIDE):
        assembler = _probe_ptxas(Path(override).absolute())
        if assembler is None:
            raise EnvironmentUnusable(
                f"{PTXAS_OVERRIDE} is {override!r}, which does not run as ptxas",
                hint=f"unset {PTXAS_OVERRIDE}, or set it to the path of a ptxas",
            )
        return [assembler]
    assemblers = filter(None, map(_probe_ptxas, dict.fromkeys(_ptxas_files(paths))))
    return sorted(assemblers, key=attrgetter("version"), reverse=True)


def _ptxas_files(paths: SearchPaths) -> Iterator[Path]:
    environment = paths.environment
    toolkits = filter(None, map(environment.get, ("CUDA_HOME", "CUDA_PATH")))
    search_path = filter(None, environment.get("PATH", "").split(os.pathsep))
    for directory, pattern in (
        *((Path(name), pattern) for name in paths.packages for pattern in _PTXAS_IN_PACKAGES),
        *((Path(name), "bin/ptxas") for name in toolkits),
        *((Path(name), "ptxas") for name in search_path),
        *((paths.root, f"{pattern}/bin/ptxas") for pattern in _TOOLKIT_PATTERNS),
    ):
        for path in sorted(directory.glob(pattern)) if directory.is_dir() else ():
            if path.is_file() and os.access(path, os.X_OK):
                yield path.resolve()


def _probe_ptxas(path: Path) -> Assembler | None:
    try:
        version_match = _PTXAS_RELEASE.search(_run_ptxas(path, "--version"))
    except AssemblerError:
        return None
    return Assembler(path, tuple(map(int, version_match[1].split(".")))) if version_match else None


def _run_ptxas(*command: str | Path) -> str:
    try:
        result = subprocess.run(  # noqa: S603 runs a ptxas that was found on this machine
            command, capture_output=True, text=True, check=False, timeout=_PTXAS_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise AssemblerError(str(error)) from error
    if result.returncode:
        raise AssemblerError(
            (result.stderr or result.stdout).strip() or f"exit status {result.returncode}"
        )
    return result.stdout


# --- CUPTI, NVIDIA's library for profilers ----------------------------------------------------------

_CUPTI_NAME = re.compile(r"libcupti\.so\.(\d+)")
# The wheels of CUDA 13 and of CUDA 12. torch and JAX load CUPTI from there.
_CUPTI_IN_PACKAGES = ("nvidia/cu*/lib", "nvidia/cuda_cupti/lib")
_CUPTI_IN_TOOLKIT = ("extras/CUPTI/lib64", "targets/*/lib", "lib64")
# Directories below the root for packages of Linux distributions.
_CUPTI_IN_SYSTEM = ("usr/lib/*-linux-gnu", "usr/lib64", "usr/local/lib")
# torch/version.py: cuda: Optional[str] = '13.0'
_TORCH_CUDA_VERSION = re.compile(r"^cuda\b[^=\n]*=\s*['\"](\d+)\.", re.MULTILINE)
# The first driver of each CUDA release, by the major version of the release, on which CUPTI depends too.
_FIRST_DRIVERS = {13: 580, 12: 525}
_INSTALL_CUPTI = {13: "pip install 'cudakit[profile]'", 12: "pip install nvidia-cuda-cupti-cu12"}


@dataclass(frozen=True, slots=True)
class Cupti:
    """A libcupti.so, with the major version of its CUDA release."""

    path: Path
    major: int


def find_cupti(paths: SearchPaths) -> Cupti:
    """Return the library of CUPTI that torch loads, or else the newest that the driver supports.

    The variable CUDAKIT_CUPTI_LIBRARY overrides this choice with a path. Raises EnvironmentUnusable if no
    library is found.
    """
    if path := overriding_library(paths, CUPTI_OVERRIDE, "libcupti.so"):
        name_match = _CUPTI_NAME.fullmatch(path.name)
        return Cupti(path, int(name_match[1]) if name_match else 0)
    supported_major = _supported_major(paths.root)
    libraries = [library for library in _installed_cupti(paths) if library.major <= supported_major]
    torch_major = _torch_major(paths.packages)
    preferred_libraries = [library for library in libraries if library.major == torch_major]
    # Among libraries of one version the first is used: packages come before toolkits.
    library = max(preferred_libraries or libraries, key=lambda library: library.major, default=None)
    if library is None:
        raise EnvironmentUnusable(
            f"CUPTI, NVIDIA's profiling library, is not installed for CUDA {supported_major}",
            hint=_INSTALL_CUPTI.get(supported_major, _INSTALL_CUPTI[max(_INSTALL_CUPTI)]),
        )
    return library


def _installed_cupti(paths: SearchPaths) -> Iterator[Cupti]:
    library_path = filter(None, paths.environment.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    places: list[tuple[Path, Sequence[str]]] = []
    for packages in unique_directories(map(Path, paths.packages)):
        places.append((packages, _CUPTI_IN_PACKAGES))
        # site-packages of a Conda environment: PREFIX/lib/python3.12/site-packages
        places += [(parent, (".",)) for parent in packages.parents[1:2]]
    places += [
        (toolkit, _CUPTI_IN_TOOLKIT) for toolkit in unique_directories(toolkit_directories(paths))
    ]
    places += [(Path(name), (".",)) for name in library_path]
    for directory, patterns in (*places, (paths.root, _CUPTI_IN_SYSTEM)):
        for path in (
            path
            for pattern in patterns
            for path in sorted(directory.glob(f"{pattern}/libcupti.so.*"))
        ):
            name_match = _CUPTI_NAME.fullmatch(path.name)
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
