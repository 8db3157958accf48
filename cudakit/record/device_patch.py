"""Build the device patch: CUDA C++ ▸ NVRTC ▸ PTX ▸ ptxas -astoolspatch ▸ cubin.

The Sanitizer API requires machine code that ptxas assembled as a patch (Sanitizer API guide, "Write a
Patch"); NVRTC alone cannot produce such code, and nvcc would need a C++ compiler of the host.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeAlias

from cudakit.errors import EnvironmentUnusable
from cudakit.gpu.compile import CompileCache, Label, Nvrtc, cache_key, user_cache
from cudakit.gpu.nvml import Nvml, open_nvml
from cudakit.record.installed import AssemblerError, SearchPaths, find_assemblers
from cudakit.record.preflight import RecorderFiles
from cudakit.units import Unavailable

Accesses: TypeAlias = Literal["auto", "exact", "arguments"]
Capability: TypeAlias = tuple[int, int]
PatchBuilder: TypeAlias = Callable[[Capability, SearchPaths], bytes]

# Name of the patch in the list of cached images.
PATCH_IMAGE_NAME = "device patch of run --sanitize"

_SOURCES = Path(__file__).parent / "patch"
_SOURCE_NAMES = ("accesses.cu", "arena.h", "page_table.h", "primitives.h", "tensor_boxes.h")
# The oldest architecture that NVRTC 13 supports: ptxas can assemble its PTX for any newer architecture.
_PTX_TARGET = "compute_75"
# The last version of PTX with "shfl" without ".sync", which primitives.h uses because it is faster (PTX ISA,
# "Data Movement and Conversion Instructions: shfl (deprecated)").
_PTX_VERSION = "6.3"
_COMPILER_OPTIONS = (
    f"--gpu-architecture={_PTX_TARGET}",
    "-rdc=true",
    "--device-as-default-execution-space",
)
# The oldest compute capability that both the Sanitizer API 13 and the warp functions of the patch support.
OLDEST_CAPABILITY = (8, 0)
_INSTALL_PTXAS = "pip install 'nvidia-cuda-nvcc>={},<14'"


def add_device_patches(
    files: RecorderFiles,
    accesses: Accesses | None,
    directory: Path,
    *,
    devices: Callable[[], Collection[Capability]] | None = None,
    build: PatchBuilder | None = None,
) -> tuple[RecorderFiles, str]:
    """Build a device patch for each compute capability of this machine, as files in ``directory``.

    Returns ``files`` with the paths of the patches, and the reason why there are no patches, or "".
    Without a device there are no patches and no reason. ``accesses`` None or "auto" builds patches if
    possible, and launches that repeat known accesses are not recorded. ``devices`` and ``build`` replace
    NVML and the compiler. Raises EnvironmentUnusable if ``accesses`` is "exact" and the patches cannot be
    built.
    """
    if accesses == "arguments":
        return files, ""
    paths = SearchPaths.of_this_process()
    paths = replace(paths, packages=(*paths.packages, *files.packages))
    try:
        capabilities = sorted((devices or device_capabilities)())
        # Devices that are too old are skipped if there are newer devices.
        new_enough = [capability for capability in capabilities if capability >= OLDEST_CAPABILITY]
        image_by_architecture = {
            capability[0] * 10 + capability[1]: build(capability, paths)
            if build
            else build_patch(capability, paths=paths, cache=user_cache(os.environ))
            for capability in new_enough or capabilities
        }
    except EnvironmentUnusable as error:
        if accesses == "exact":
            raise
        message = error.message.partition("\n")[0]
        reason = f"{message}; {error.hint}" if error.hint else message
        return files, f"accesses are inferred from kernel arguments: {reason}"
    patches = {}
    for capability, image in image_by_architecture.items():
        patches[capability] = directory / f"sm_{capability}.cubin"
        patches[capability].write_bytes(image)
    return replace(files, patches=patches, templates=bool(patches) and accesses != "exact"), ""


def device_capabilities(nvml: Nvml | Unavailable | None = None) -> frozenset[Capability]:
    """Return the compute capabilities of this machine's devices, without creating a context.

    Raises EnvironmentUnusable if there are devices but NVML does not report their capability.
    """
    from cudakit.gpu.cuda.current import device_count

    nvml = nvml or open_nvml()
    capabilities = nvml if isinstance(nvml, Unavailable) else nvml.capabilities()
    if isinstance(capabilities, Unavailable):
        if not device_count():
            return frozenset()
        raise EnvironmentUnusable(
            f"the compute capability of the GPUs is unknown: {capabilities.reason}",
            hint="run cudakit doctor",
        )
    return capabilities


def build_patch(
    capability: tuple[int, int],
    *,
    paths: SearchPaths | None = None,
    options: Sequence[str] = (),
    cache: CompileCache | None = None,
) -> bytes:
    """Return the cubin of the device patch for a compute capability, such as (9, 0).

    ``options`` are passed to NVRTC. A patch in the ``cache`` is not built again. Raises EnvironmentUnusable
    if no ptxas can assemble the patch, MissingDependency without NVRTC, and CudaError with the compiler's log
    if the source does not compile.
    """
    if capability < OLDEST_CAPABILITY:
        raise EnvironmentUnusable(
            "exact accesses need compute capability 8.0 or newer;"
            f" this device has {capability[0]}.{capability[1]}",
            hint="use --accesses arguments",
        )
    nvrtc = Nvrtc()
    compiler = _version_text(nvrtc.version)
    assemblers = find_assemblers(paths or SearchPaths.of_this_process())
    target = f"sm_{capability[0] * 10 + capability[1]}"
    (name, source), *headers = sources = [
        (name, (_SOURCES / name).read_text(encoding="utf-8")) for name in _SOURCE_NAMES
    ]
    options = (*_COMPILER_OPTIONS, *options)
    cache_keys = {
        assembler: cache_key(
            f"NVRTC {compiler} ptxas {_version_text(assembler.version)} PTX {_PTX_VERSION} -astoolspatch",
            target,
            options,
            "\0".join(text for _, text in sources),
        )
        for assembler in assemblers
    }
    if cache and (cached_image := next(filter(None, map(cache.get, cache_keys.values())), None)):
        return cached_image
    if not assemblers:
        raise EnvironmentUnusable(
            "ptxas, which assembles the device patch, was not found"
            " in Python packages (nvidia-cuda-nvcc, torch, triton), CUDA_HOME, PATH or /usr/local/cuda*",
            hint=_INSTALL_PTXAS.format(compiler),
        )
    ptx = nvrtc.compile(source, "PTX", options, name=name, headers=dict(headers)).rstrip(b"\0")
    version_line = f".version {_PTX_VERSION}".encode()
    ptx = re.sub(rb"(?m)^\.version .*$", version_line, ptx, count=1)
    errors = []
    for assembler in assemblers:
        try:
            image = assembler.assemble(ptx, target)
        except AssemblerError as error:
            errors.append(f"{assembler}: {str(error).splitlines()[0]}")
            continue
        if cache:
            tools = f"NVRTC {compiler}, ptxas {_version_text(assembler.version)}"
            cache.keep(cache_keys[assembler], image, Label(PATCH_IMAGE_NAME, target, tools))
        return image
    raise EnvironmentUnusable(
        f"no installed ptxas can assemble the device patch for {target}: {'; '.join(errors)}",
        hint=_INSTALL_PTXAS.format(compiler),
    )


def _version_text(version: Sequence[int]) -> str:
    return ".".join(map(str, version))
