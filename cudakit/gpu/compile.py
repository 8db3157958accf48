"""CUDA C++ to machine code, by NVRTC."""

from __future__ import annotations

from collections.abc import Sequence

from cudakit.errors import CudaError
from cudakit.gpu.compile_cache import CompileCache, cache_key
from cudakit.gpu.nvrtc import Nvrtc


def compile_cuda(
    source: str,
    capability: tuple[int, int],
    *,
    options: Sequence[str] = (),
    cache: CompileCache | None = None,
) -> bytes:
    """Compile a source to a cubin for a compute capability, as (9, 0).

    A capability newer than this NVRTC gets PTX of the newest that it knows, which the driver compiles.
    ``options`` are nvcc's, as NVRTC takes them. What is in the ``cache`` is not compiled. Raises CudaError
    with the compiler's log for a source that does not compile, MissingDependency without NVRTC.
    """
    nvrtc = Nvrtc()
    target, kind = choose_target(capability, nvrtc.architectures())
    whole = [f"--gpu-architecture={target}", *options]
    if cache is None:
        return nvrtc.compile(source, kind, whole)
    key = cache_key(f"NVRTC {nvrtc.version}", target, options, source)
    image = cache.get(key)
    if image is None:
        image = nvrtc.compile(source, kind, whole)
        cache.keep(key, image)
    return image


def choose_target(capability: tuple[int, int], known: Sequence[int]) -> tuple[str, str]:
    """Choose from what NVRTC knows the architecture to compile for, and "CUBIN" or "PTX".

    Raises CudaError where the device is older than all of them.
    """
    wanted = capability[0] * 10 + capability[1]
    if wanted in known:
        return f"sm_{wanted}", "CUBIN"
    older = [arch for arch in known if arch < wanted]
    if not older:
        raise CudaError(
            5,
            "NVRTC_ERROR_INVALID_OPTION",
            f"this NVRTC compiles for sm_{min(known)} and newer, the device is sm_{wanted}",
            hint="install an older nvidia-cuda-nvrtc",
        )
    return f"compute_{max(older)}", "PTX"
