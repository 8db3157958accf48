"""Find what recording needs: NVIDIA's Sanitizer API, cudakit's native modules, and ptxas."""

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

LIBRARY_OVERRIDE = "CUDAKIT_SANITIZER_LIBRARY"
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
    override = paths.environment.get(LIBRARY_OVERRIDE)
    if override:
        path = Path(override)
        if not path.is_file():
            raise EnvironmentUnusable(
                f"{LIBRARY_OVERRIDE} is {override!r}, which is not a file",
                hint=f"unset {LIBRARY_OVERRIDE}, or set it to the path of {_LIBRARY_NAME}",
            )
        library = Library(path.absolute(), _library_version(path))
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
            hint=f"unset {LIBRARY_OVERRIDE}, or set it to a newer library"
            if override
            else INSTALL_LIBRARY,
        )
    return library


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
    """Return the version of the toolkit or wheel that contains the library; () if it is unknown."""
    for directory in library.resolve().parents[1:4]:
        if version_text := _toolkit_or_wheel_version(directory):
            return tuple(int(number_text) for number_text in re.findall(r"\d+", version_text))
    return ()


def _toolkit_or_wheel_version(directory: Path) -> str:
    """Return the version in version.json, else in the name of a toolkit's directory or of a wheel, or ""."""
    try:
        components = json.loads((directory / "version.json").read_text(encoding="utf-8"))
        return str(components["cuda_sanitizer_api"]["version"])
    except (OSError, ValueError, KeyError, TypeError):  # container images do not have the file
        names = (path.name for path in directory.glob("*.dist-info"))
        matches = (_TOOLKIT_NAME.fullmatch(directory.name), *map(_WHEEL_VERSION.fullmatch, names))
        return next((match[1] for match in matches if match), "")


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
