"""The assembler of PTX, which torch, Triton, the toolkit and the wheel of nvcc all bring along."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cudakit.errors import EnvironmentUnusable
from cudakit.gpu.capture.locate import Places

OVERRIDE = "CUDAKIT_PTXAS"

_IN_PACKAGES = (
    "nvidia/*/bin/ptxas",  # nvidia-cuda-nvcc: cu13, and cuda_nvcc for the one of CUDA 12
    "torch/bin/ptxas",
    "triton/backends/nvidia/bin/ptxas",
    "triton/backends/nvidia/bin/ptxas-blackwell",
)
_TOOLKITS = ("usr/local/cuda*", "opt/cuda*", "opt/nvidia/cuda*", "opt/nvidia/hpc_sdk/*/*/cuda/*")
_RELEASE = re.compile(r"release \d+\.\d+, V(\d+(?:\.\d+)*)")
_SECONDS = 60  # for one run; what it takes is a third of a second


class Refused(Exception):
    """An assembler did not do it; the message is what it said."""


@dataclass(frozen=True, slots=True)
class Assembler:
    """One ptxas; its version is that of the toolkit it belongs to."""

    path: Path
    version: tuple[int, ...]

    def assemble(self, ptx: bytes, target: str) -> bytes:
        """Assemble a patch for a target, such as "sm_90". Raises Refused."""
        with tempfile.TemporaryDirectory(prefix="cudakit-") as name:
            source, image = Path(name, "patch.ptx"), Path(name, "patch.cubin")
            source.write_bytes(ptx)
            _output(self.path, "-astoolspatch", f"-arch={target}", str(source), "-o", str(image))
            return image.read_bytes()

    def __str__(self) -> str:
        return f"ptxas {'.'.join(map(str, self.version))} ({self.path})"


def assemblers(places: Places) -> list[Assembler]:
    """Return all that are found and run, the newest first, or the one that CUDAKIT_PTXAS names.

    Raises EnvironmentUnusable for a name that is none.
    """
    named = places.environment.get(OVERRIDE)
    if named:
        return [_named(Path(named))]
    found = (_assembler(path) for path in dict.fromkeys(_files(places)))
    return sorted((one for one in found if one), key=lambda one: one.version, reverse=True)


def _named(path: Path) -> Assembler:
    assembler = _assembler(path.absolute())
    if assembler is None:
        raise EnvironmentUnusable(
            f"{OVERRIDE} is {str(path)!r}, and that does not run as ptxas",
            hint=f"unset {OVERRIDE}, or name the ptxas to use",
        )
    return assembler


def _files(places: Places) -> Iterator[Path]:
    for directory in places.packages:
        for pattern in _IN_PACKAGES:
            yield from _executables(Path(directory), pattern)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if toolkit := places.environment.get(name):
            yield from _executables(Path(toolkit), "bin/ptxas")
    for directory in places.environment.get("PATH", "").split(os.pathsep):
        if directory:
            yield from _executables(Path(directory), "ptxas")
    for pattern in _TOOLKITS:
        yield from _executables(places.root, f"{pattern}/bin/ptxas")


def _executables(directory: Path, pattern: str) -> Iterator[Path]:
    for path in sorted(directory.glob(pattern)) if directory.is_dir() else ():
        if path.is_file() and os.access(path, os.X_OK):
            yield path.resolve()


def _assembler(path: Path) -> Assembler | None:
    try:
        version = _RELEASE.search(_output(path, "--version"))
    except Refused:
        return None
    return Assembler(path, tuple(map(int, version[1].split(".")))) if version else None


def _output(*command: str | Path) -> str:
    try:
        ran = subprocess.run(  # noqa: S603 the assembler that was found
            command, capture_output=True, text=True, check=False, timeout=_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Refused(str(error)) from error
    if ran.returncode:
        raise Refused((ran.stderr or ran.stdout).strip() or f"exit status {ran.returncode}")
    return ran.stdout
