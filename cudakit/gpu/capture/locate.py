"""Where the parts of `cudakit run --sanitize` are: NVIDIA's library, and what was built with cudakit."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from cudakit.errors import EnvironmentUnusable

OVERRIDE = "CUDAKIT_SANITIZER_LIBRARY"
# Older ones do not report the tensor-map loads of Hopper.
NEEDED = (13, 4)
INSTALL = "pip install 'cudakit[sanitize]'"

_LIBRARY = "libsanitizer-public.so"
_HEADERS = "include/sanitizer*.h"
_IN_PACKAGES = f"nvidia/*/compute-sanitizer/{_LIBRARY}"
_IN_TOOLKIT = f"compute-sanitizer/{_LIBRARY}"
_TOOLKITS = (
    "usr/local/cuda*",
    "opt/cuda*",
    "opt/nvidia/cuda*",
    "opt/nvidia/hpc_sdk/*/*/cuda/*",
)
_TOOLKIT_NAME = re.compile(r"(?:cuda-)?(\d+\.\d+)")
_WHEEL_VERSION = re.compile(r"nvidia_cuda_sanitizer_api-(.+)\.dist-info")


@dataclass(frozen=True, slots=True)
class Places:
    """Where to look."""

    environment: Mapping[str, str]
    packages: Sequence[str]  # directories of Python packages, as in sys.path
    root: Path = Path("/")
    native: Path = Path(__file__).parent  # what was built with cudakit

    @classmethod
    def here(cls) -> Places:
        """Return the places of this process."""
        return cls(dict(os.environ), tuple(sys.path))


@dataclass(frozen=True, slots=True)
class Library:
    """One libsanitizer-public.so; a version of no numbers is not known."""

    path: Path
    version: tuple[int, ...]

    @property
    def headers(self) -> tuple[Path, ...]:
        return tuple(sorted(self.path.parent.glob(_HEADERS)))

    def __str__(self) -> str:
        number = ".".join(map(str, self.version)) or "of an unknown version"
        return f"Sanitizer API {number} ({self.path})"


def sanitizer_library(places: Places) -> Library:
    """Return the newest library of the Sanitizer API, or the one that CUDAKIT_SANITIZER_LIBRARY names.

    Raises EnvironmentUnusable where there is none, or the newest is older than 13.4.
    """
    named = places.environment.get(OVERRIDE)
    library = _named(Path(named)) if named else max(_found(places), key=_age, default=None)
    if library is None:
        raise EnvironmentUnusable(
            f"{_LIBRARY}, NVIDIA's Sanitizer API, is not installed", hint=INSTALL
        )
    if library.version and library.version < NEEDED:
        needed = ".".join(map(str, NEEDED))
        hint = f"unset {OVERRIDE}, or name a newer library" if named else INSTALL
        raise EnvironmentUnusable(f"{library} is too old, {needed} is needed", hint=hint)
    return library


def _named(path: Path) -> Library:
    if not path.is_file():
        raise EnvironmentUnusable(
            f"{OVERRIDE} is {str(path)!r}, and that is no file",
            hint=f"unset {OVERRIDE}, or name the {_LIBRARY} to use",
        )
    return Library(path.absolute(), _version_around(path))


def _age(library: Library) -> tuple[int, ...]:
    return library.version


def _found(places: Places) -> Iterator[Library]:
    for directory in _unique(map(Path, places.packages)):
        yield from _libraries(directory, _IN_PACKAGES)
    for toolkit in _unique(_toolkits(places)):
        yield from _libraries(toolkit, _IN_TOOLKIT)


def _libraries(directory: Path, pattern: str) -> Iterator[Library]:
    for path in directory.glob(pattern):
        yield Library(path, _version_around(path))


def _toolkits(places: Places) -> Iterator[Path]:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if place := places.environment.get(name):
            yield Path(place)
    for pattern in _TOOLKITS:
        yield from places.root.glob(pattern)


def _unique(places: Iterable[Path]) -> Iterator[Path]:
    return iter(dict.fromkeys(place.resolve() for place in places if place.is_dir()))


def _version_around(library: Path) -> tuple[int, ...]:
    """Read the version from what stands above the file: a toolkit, or the packages with its wheel."""
    for directory in library.resolve().parents[1:4]:
        if text := _toolkit_version(directory) or _wheel_version(directory):
            return tuple(int(number) for number in re.findall(r"\d+", text))
    return ()


def _wheel_version(packages: Path) -> str:
    records = map(_WHEEL_VERSION.fullmatch, (place.name for place in packages.glob("*.dist-info")))
    return next((record[1] for record in records if record), "")


def _toolkit_version(toolkit: Path) -> str:
    """Read version.json, which names each component; images may lack it, then the directory must do."""
    try:
        components = json.loads((toolkit / "version.json").read_text(encoding="utf-8"))
        return str(components["cuda_sanitizer_api"]["version"])
    except (OSError, ValueError, KeyError, TypeError):
        named = _TOOLKIT_NAME.fullmatch(toolkit.name)
        return named[1] if named else ""


def recorder(places: Places) -> Path:
    """Return the native recorder. Raises EnvironmentUnusable where it was not built."""
    spec = PathFinder.find_spec("_recorder", [str(places.native)])
    if spec is None or not spec.origin:
        raise EnvironmentUnusable(
            "the recorder was not built, because no C compiler was there when cudakit was installed",
            hint="install a C compiler, then"
            " pip install --force-reinstall --no-binary cudakit cudakit",
        )
    return Path(spec.origin)


def walkers(places: Places) -> dict[str, Path]:
    """Return what reads Python's frames, by the version of the interpreter that it was built for.

    The names are those of ``sys.implementation.cache_tag``, such as ``cpython-312``. There may be none.
    """
    built = sorted(places.native.glob("_frames.*.so"))
    return {"-".join(path.name.split(".")[1].split("-")[:2]): path for path in built}
