"""Which Python packages are installed, and for which CUDA the frameworks among them were built.

Nothing is imported: the names of metadata directories and one line of a version file say enough
(https://packaging.python.org, Recording installed projects).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# In torch/version.py: ``cuda: Optional[str] = '13.0'`` or ``cuda = None``.
_TORCH_CUDA = re.compile(r"^cuda\b[^=\n]*=\s*(?:'([\d.]+)'|\"([\d.]+)\"|None)", re.MULTILINE)
# cupy-cuda13x, jax-cuda12-plugin, nvidia-cublas-cu12.
_CUDA_IN_NAME = re.compile(r"-cu(?:da)?(\d\d)x?(?:-|$)")


@dataclass(frozen=True, slots=True)
class Distribution:
    """An installed package, under the normalized form of its name."""

    name: str
    version: str
    place: str  # the directory that its modules are in


@dataclass(frozen=True, slots=True)
class Build:
    """For which CUDA a framework was built: (13, 0), (13, None) or None for another device."""

    framework: str
    version: str
    cuda: tuple[int, int | None] | None


def installed(search_path: Iterable[str]) -> Iterator[Distribution]:
    """List what a search path such as sys.path offers, in its order."""
    for place in dict.fromkeys(os.path.abspath(part) for part in search_path):
        try:
            names = sorted(os.listdir(place))
        except OSError:
            continue
        for name in names:
            stem, dot, kind = name.rpartition(".")
            if dot and kind in ("dist-info", "egg-info"):
                title, _, rest = stem.partition("-")
                version = rest.partition("-py")[0] or _told_version(place, name)
                yield Distribution(_normalized(title), version, place)


def _told_version(place: str, name: str) -> str:
    """Read the version that an egg-info of a source tree has inside only."""
    with suppress(OSError):
        for line in Path(place, name, "PKG-INFO").read_text(encoding="utf-8").splitlines():
            if line.startswith("Version: "):
                return line.removeprefix("Version: ")
    return ""


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def cuda_major(name: str) -> int | None:
    """Return the CUDA that the name of a distribution ends in: 13 for cupy-cuda13x."""
    found = _CUDA_IN_NAME.search(name)
    return int(found[1]) if found else None


def builds(distributions: Iterable[Distribution]) -> Iterator[Build]:
    """Say for which CUDA torch, CuPy and JAX were built, as far as they say so without running."""
    for distribution in distributions:
        name, version = distribution.name, distribution.version
        if name == "torch":
            yield Build("torch", version, _torch_cuda(distribution))
        elif re.fullmatch(r"cupy-cuda\d\dx?|jax-cuda\d\d-plugin", name):
            major = cuda_major(name)
            yield Build(name, version, None if major is None else (major, None))


def _torch_cuda(distribution: Distribution) -> tuple[int, int | None] | None:
    try:
        text = Path(distribution.place, "torch", "version.py").read_text(encoding="utf-8")
    except OSError:
        return _local_version(distribution.version)
    found = _TORCH_CUDA.search(text)
    return _numbers(found[1] or found[2]) if found and found.lastindex else None


def _local_version(version: str) -> tuple[int, int | None] | None:
    """Read the CUDA of a version such as 2.11.0+cu130; the last digit is the minor number."""
    found = re.search(r"\+cu(\d+)(\d)$", version)
    return (int(found[1]), int(found[2])) if found else None


def _numbers(text: str) -> tuple[int, int | None]:
    major, _, minor = text.partition(".")
    return int(major), int(minor.partition(".")[0]) if minor else None
