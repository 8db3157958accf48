"""The device patch of a compute capability: CUDA C++ ▸ NVRTC ▸ PTX ▸ ptxas -astoolspatch ▸ cubin.

The Sanitizer API takes machine code that ptxas was told to assemble as a patch (Sanitizer API guide,
"Write a Patch"); NVRTC alone cannot, and nvcc would need a C++ compiler of the host.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from cudakit.errors import EnvironmentUnusable
from cudakit.gpu.capture.locate import Places
from cudakit.gpu.capture.patch.ptxas import Assembler, Refused, assemblers
from cudakit.gpu.compile import Nvrtc
from cudakit.gpu.compile_cache import CompileCache, cache_key

_HERE = Path(__file__).parent
# Of text for the oldest architecture that NVRTC 13 knows, machine code for any newer one can be made.
_TEXT_FOR = "compute_75"
# The last version in which threads of a warp can speak to each other without gathering first: "shfl" without
# ".sync" (PTX ISA, "Data Movement and Conversion Instructions: shfl (deprecated)"); see primitives.h.
_TEXT_VERSION = "6.3"
_OPTIONS = (
    f"--gpu-architecture={_TEXT_FOR}",
    "-rdc=true",
    "--device-as-default-execution-space",
)
# The oldest that the Sanitizer API 13 and the warp functions of the patch agree on.
_OLDEST = (8, 0)
_INSTALL = "pip install 'nvidia-cuda-nvcc>={},<14'"


def build_patch(
    capability: tuple[int, int],
    *,
    places: Places | None = None,
    options: Sequence[str] = (),
    cache: CompileCache | None = None,
) -> bytes:
    """Return the patch for a compute capability, as (9, 0); ``options`` are NVRTC's.

    What is in the ``cache`` is not built. Raises EnvironmentUnusable where no ptxas is found or none can do
    it, MissingDependency without NVRTC, CudaError with its log where the source does not compile.
    """
    if capability < _OLDEST:
        raise EnvironmentUnusable(
            f"accesses are recorded on compute capability 8.0 and newer, this device has"
            f" {capability[0]}.{capability[1]}",
            hint="use --accesses arguments",
        )
    nvrtc = Nvrtc()
    compiler = nvrtc.version
    found = assemblers(places or Places.here())
    number = capability[0] * 10 + capability[1]
    keys = {one: _key(compiler, one, number, options) for one in found}
    if cache and (kept := next(filter(None, map(cache.get, keys.values())), None)):
        return kept
    if not found:
        raise EnvironmentUnusable(
            "ptxas, which assembles the patch that records accesses, is not installed:"
            " looked in the packages of Python (nvidia-cuda-nvcc, torch, triton), in CUDA_HOME,"
            " in PATH and in /usr/local/cuda*",
            hint=_INSTALL.format(_dotted(compiler)),
        )
    ptx = _ptx(nvrtc, options)
    assembler, image = _assembled(found, ptx, f"sm_{number}", compiler)
    if cache:
        cache.keep(keys[assembler], image)
    return image


def _assembled(
    found: Sequence[Assembler], ptx: bytes, target: str, compiler: tuple[int, int]
) -> tuple[Assembler, bytes]:
    said = []
    for assembler in found:
        try:
            return assembler, assembler.assemble(ptx, target)
        except Refused as refused:
            said.append(f"{assembler}: {str(refused).splitlines()[0]}")
    raise EnvironmentUnusable(
        f"no ptxas that was found can assemble the patch for {target}: {'; '.join(said)}",
        hint=_INSTALL.format(_dotted(compiler)),
    )


def _key(
    compiler: tuple[int, int], assembler: Assembler, number: int, options: Sequence[str]
) -> str:
    tools = f"NVRTC {_dotted(compiler)} PTX {_TEXT_VERSION} ptxas {_dotted(assembler.version)} -astoolspatch"
    text = "\0".join(text for _, text in _sources())
    return cache_key(tools, f"sm_{number}", (*_OPTIONS, *options), text)


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def _sources() -> list[tuple[str, str]]:
    names = ("accesses.cu", "arena.h", "primitives.h")
    return [(name, (_HERE / name).read_text(encoding="utf-8")) for name in names]


def _ptx(nvrtc: Nvrtc, options: Sequence[str]) -> bytes:
    (name, source), *headers = _sources()
    asked = (*_OPTIONS, *options)
    text = nvrtc.compile(source, "PTX", asked, name=name, headers=dict(headers)).rstrip(b"\0")
    version = f".version {_TEXT_VERSION}".encode()
    return re.sub(rb"(?m)^\.version .*$", version, text, count=1)
