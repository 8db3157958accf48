"""BLAS libraries that compute wrong values, or support less."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from cudakit.errors import Unsupported
from cudakit.gpu.api import Gpu, Graph, Ptr, Stream
from cudakit.gpu.api.gemm import (
    Algorithm,
    Blas,
    Gemm,
    GemmPlan,
    GemmSettings,
    Library,
    Operands,
    never,
)
from cudakit.gpu.machine import DEFAULT_MODEL
from cudakit.gpu.sim import Sim
from cudakit.units import Unavailable


class Run(NamedTuple):
    """A GEMM that was just enqueued."""

    gpu: Gpu
    gemm: Gemm
    at: Operands
    stream: Stream
    number: int  # of its plan, from 0 on
    library: Library
    captured: bool  # into a graph, which was not run yet

    @property
    def last(self) -> Ptr:
        """The address of the last element of D."""
        d = self.gemm.d
        return Ptr(self.at.d + (d.elements - self.gemm.padding - 1) * d.element.size_bytes)


# Changes the output after a GEMM.
Spoil = Callable[[Run], None]


class Spoiled(Sim):
    """A simulated device whose libraries spoil their results, or do not support some GEMMs."""

    def __init__(
        self,
        spoil: Spoil | None = None,
        refusing: Sequence[str] = (),
        *,
        model: str = DEFAULT_MODEL,
    ) -> None:
        super().__init__(model)
        self.opened: list[Library] = []
        self.capturing = False
        self._spoil, self._refusing = spoil, refusing

    def capture_begin(self, stream: Stream) -> None:
        super().capture_begin(stream)
        self.capturing = True

    def capture_end(self, stream: Stream) -> Graph:
        self.capturing = False
        return super().capture_end(stream)

    def blas(self, library: Library = "cublaslt") -> Blas:
        self.opened.append(library)
        return _Blas(self, super().blas(library), self._spoil, self._refusing)


class _Blas:
    def __init__(
        self, gpu: Spoiled, inner: Blas, spoil: Spoil | None, refusing: Sequence[str]
    ) -> None:
        self.library, self.version = inner.library, inner.version
        self._gpu, self._inner, self._spoil, self._refusing = gpu, inner, spoil, refusing

    def prepare(
        self, gemm: Gemm, settings: GemmSettings, algorithm: Algorithm | None = None
    ) -> GemmPlan:
        for what in (self.library, gemm.dtype):
            if what in self._refusing:
                raise Unsupported(f"{what} is not available", hint="take another")
        inner = self._inner.prepare(gemm, settings, algorithm)
        return _Multiplication(self._gpu, gemm, inner, self._spoil, self.library)

    def heuristics(self, gemm: Gemm, settings: GemmSettings, most: int) -> Sequence[Algorithm]:
        return self._inner.heuristics(gemm, settings, most)

    def algorithms(
        self, gemm: Gemm, settings: GemmSettings, is_over: Callable[[], bool] = never
    ) -> Iterator[Algorithm]:
        return self._inner.algorithms(gemm, settings, is_over)

    def close(self) -> None:
        self._inner.close()


class _Multiplication:
    def __init__(
        self,
        gpu: Spoiled,
        gemm: Gemm,
        inner: GemmPlan,
        spoil: Spoil | None,
        library: Library,
    ) -> None:
        self._gpu, self._gemm, self._inner, self._spoil = gpu, gemm, inner, spoil
        self._library: Library = library
        self._runs = 0

    @property
    def algorithm(self) -> Algorithm | Unavailable:
        return self._inner.algorithm

    @property
    def settings(self) -> Mapping[str, str]:
        return self._inner.settings

    def enqueue(self, operands: Operands, stream: Stream) -> None:
        self._inner.enqueue(operands, stream)
        if self._spoil:
            gpu = self._gpu
            self._spoil(
                Run(gpu, self._gemm, operands, stream, self._runs, self._library, gpu.capturing)
            )
        self._runs += 1

    def close(self) -> None:
        self._inner.close()
