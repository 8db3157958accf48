"""Compilation of CUDA C++ with NVRTC, found in NVIDIA's wheels or the CUDA toolkit."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from cudakit.errors import CudaError, MissingDependency
from cudakit.gpu.compile_cache import CompileCache, Label, cache_key

_KERNEL_PATTERN = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\(")
# The first line of a source whose kernels have the same names as those of another source.
_SOURCE_NAME_PATTERN = re.compile(r"// source: (.+)\n")


def compile_cuda(
    source: str,
    capability: tuple[int, int],
    *,
    cache: CompileCache | None = None,
) -> bytes:
    """Compile CUDA C++ to a cubin for a compute capability such as (9, 0).

    If NVRTC is too old for the device, the result is PTX for the newest architecture that NVRTC supports,
    which the driver compiles. Results are stored in ``cache``. Raises CudaError with the compiler log
    if compilation fails, MissingDependency without NVRTC.
    """
    nvrtc = Nvrtc()
    target, image_kind = choose_target(capability, nvrtc.architectures())
    options = [f"--gpu-architecture={target}"]
    if cache is None:
        return nvrtc.compile(source, image_kind, options)
    key = cache_key(f"NVRTC {nvrtc.version}", target, (), source)
    image = cache.get(key)
    if image is None:
        image = nvrtc.compile(source, image_kind, options)
        compiler = "NVRTC {}.{}".format(*nvrtc.version)
        cache.keep(key, image, Label(_kernels_text(source), target, compiler))
    return image


def _kernels_text(source: str) -> str:
    """Return the names of the kernels, after the name of the source if its first line has one."""
    kernel_names = ", ".join(_KERNEL_PATTERN.findall(source))
    source_name = _SOURCE_NAME_PATTERN.match(source)
    return f"{source_name[1]}: {kernel_names}" if source_name else kernel_names


def choose_target(
    capability: tuple[int, int], supported_architectures: Sequence[int]
) -> tuple[str, str]:
    """Return the target architecture for NVRTC, and "CUBIN" or "PTX".

    Raises CudaError if the device is older than all supported architectures.
    """
    architecture = capability[0] * 10 + capability[1]
    if architecture in supported_architectures:
        return f"sm_{architecture}", "CUBIN"
    older_architectures = [arch for arch in supported_architectures if arch < architecture]
    if not older_architectures:
        raise CudaError(
            5,
            "NVRTC_ERROR_INVALID_OPTION",
            f"this NVRTC supports sm_{min(supported_architectures)} and newer,"
            f" the device is sm_{architecture}",
            hint="install an older nvidia-cuda-nvrtc",
        )
    return f"compute_{max(older_architectures)}", "PTX"


class Nvrtc:
    """The NVRTC compiler. Raises MissingDependency if it is not found."""

    def __init__(self) -> None:
        self._nvrtc = _load_nvrtc()
        self.version: tuple[int, int] = _check_nvrtc(self._nvrtc.nvrtcVersion())

    def architectures(self) -> list[int]:
        """Return the supported architectures as numbers, such as 90 for compute capability 9.0."""
        supported_architectures: list[int] = _check_nvrtc(self._nvrtc.nvrtcGetSupportedArchs())
        return supported_architectures

    def compile(
        self,
        source: str,
        image_kind: str,
        options: Sequence[str],
        *,
        name: str = "kernels.cu",
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> bytes:
        """Compile a source to "CUBIN" or "PTX"; ``headers`` maps names to the texts of includable files.

        Raises CudaError with the compiler log if compilation fails.
        """
        nvrtc = self._nvrtc
        program = _check_nvrtc(
            nvrtc.nvrtcCreateProgram(
                source.encode(),
                name.encode(),
                len(headers),
                [text.encode() for text in headers.values()],
                [header.encode() for header in headers],
            )
        )
        try:
            compile_result = nvrtc.nvrtcCompileProgram(
                program, len(options), [option.encode() for option in options]
            )
            _check_nvrtc(compile_result, lambda: f"with {' '.join(options)}\n{self._log(program)}")
            image = bytes(_check_nvrtc(getattr(nvrtc, f"nvrtcGet{image_kind}Size")(program)))
            _check_nvrtc(getattr(nvrtc, f"nvrtcGet{image_kind}")(program, image))
        finally:
            nvrtc.nvrtcDestroyProgram(program)
        return image

    def _log(self, program: Any) -> str:
        log_bytes = bytes(_check_nvrtc(self._nvrtc.nvrtcGetProgramLogSize(program)))
        _check_nvrtc(self._nvrtc.nvrtcGetProgramLog(program, log_bytes))
        return log_bytes.rstrip(b"\0").decode(errors="replace").rstrip()


def _check_nvrtc(result: tuple[Any, ...], detail: Callable[[], str] | None = None) -> Any:
    status, *returned_values = result
    if status:
        explanation = "the CUDA C++ source does not compile" if detail else "an NVRTC call failed"
        message = f"{explanation} {detail()}" if detail else explanation
        raise CudaError(int(status), status.name, message)
    return returned_values[0] if len(returned_values) == 1 else tuple(returned_values)


def _load_nvrtc() -> Any:
    from cuda.bindings import nvrtc  # type: ignore[import-untyped]

    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as error:
        raise MissingDependency(
            "NVRTC",
            purpose="compiling kernels",
            requirement=_nvrtc_requirement(),
            problem="was not found by cuda.bindings",
            where=" (cuda.bindings searches the site-packages of this Python),"
            " or set LD_LIBRARY_PATH to the directory of libnvrtc",
        ) from error
    return nvrtc


def _nvrtc_requirement() -> str:
    from importlib.metadata import version

    is_cuda_12 = version("cuda-bindings").startswith("12.")
    return "nvidia-cuda-nvrtc-cu12" if is_cuda_12 else "nvidia-cuda-nvrtc"
