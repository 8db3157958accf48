"""NVRTC, which is looked for where torch, CuPy and the toolkit put it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from cudakit.errors import CudaError, MissingDependency

_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class Nvrtc:
    """The compiler. Raises MissingDependency where there is none."""

    def __init__(self) -> None:
        self._nvrtc = _loaded()
        self.version: tuple[int, int] = _check(self._nvrtc.nvrtcVersion())

    def architectures(self) -> list[int]:
        """List what it compiles for: 90 is compute capability 9.0."""
        known: list[int] = _check(self._nvrtc.nvrtcGetSupportedArchs())
        return known

    def compile(
        self,
        source: str,
        kind: str,
        options: Sequence[str],
        *,
        name: str = "kernels.cu",
        headers: Mapping[str, str] = _NO_HEADERS,
    ) -> bytes:
        """Compile a source to a "CUBIN" or to "PTX"; ``headers`` are what it may include, by name.

        Raises CudaError with the compiler's log for a source that does not compile.
        """
        nvrtc = self._nvrtc
        program = _check(
            nvrtc.nvrtcCreateProgram(
                source.encode(),
                name.encode(),
                len(headers),
                [text.encode() for text in headers.values()],
                [header.encode() for header in headers],
            )
        )
        try:
            result = nvrtc.nvrtcCompileProgram(
                program, len(options), [option.encode() for option in options]
            )
            _check(result, lambda: f"with {' '.join(options)}\n{self._log(program)}")
            image = bytes(_check(getattr(nvrtc, f"nvrtcGet{kind}Size")(program)))
            _check(getattr(nvrtc, f"nvrtcGet{kind}")(program, image))
        finally:
            nvrtc.nvrtcDestroyProgram(program)
        return image

    def _log(self, program: Any) -> str:
        log = bytes(_check(self._nvrtc.nvrtcGetProgramLogSize(program)))
        _check(self._nvrtc.nvrtcGetProgramLog(program, log))
        return log.rstrip(b"\0").decode(errors="replace").rstrip()


def _check(result: tuple[Any, ...], seen: Callable[[], str] | None = None) -> Any:
    status, *values = result
    if status:
        explanation = "CUDA C++ does not compile" if seen else "the compiler refused a call"
        text = f"{explanation} {seen()}" if seen else explanation
        raise CudaError(int(status), status.name, text)
    return values[0] if len(values) == 1 else tuple(values)


def _loaded() -> Any:
    from cuda.bindings import nvrtc  # type: ignore[import-untyped]

    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as error:
        raise MissingDependency(
            "NVRTC", purpose="compiling kernels", requirement=_requirement()
        ) from error
    return nvrtc


def _requirement() -> str:
    from importlib.metadata import version

    old = version("cuda-bindings").startswith("12.")
    return "nvidia-cuda-nvrtc-cu12" if old else "nvidia-cuda-nvrtc"
