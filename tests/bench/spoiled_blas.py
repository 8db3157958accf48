"""BLAS libraries that compute wrong values, or that support fewer GEMMs."""

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
    never_over,
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
    number: int  # Number of earlier executions of the GEMM's plan.
    library: Library
    captured: bool  # Whether the GEMM was captured in a graph instead of executed.

    @property
    def last(self) -> Ptr:
        """The address of the last element of D."""
        d = self.gemm.d
        return Ptr(self.at.d + (d.elements - self.gemm.padding - 1) * d.element.size_bytes)


# A function that changes the output after a GEMM.
Spoil = Callable[[Run], None]


class Spoiled(Sim):
    """A simulated device whose libraries spoil their results, or do not support some GEMMs."""

    def __init__(
        self,
        spoil: Spoil | None = None,
        unsupported: Sequence[str] = (),
        *,
        model: str = DEFAULT_MODEL,
    ) -> None:
        super().__init__(model)
        self.opened: list[Library] = []
        self.capturing = False
        self._spoil, self._unsupported = spoil, unsupported

    def capture_begin(self, stream: Stream) -> None:
        super().capture_begin(stream)
        self.capturing = True

    def capture_end(self, stream: Stream) -> Graph:
        self.capturing = False
        return super().capture_end(stream)

    def blas(self, library: Library = "cublaslt") -> Blas:
        self.opened.append(library)
        return _SpoiledBlas(self, super().blas(library), self._spoil, self._unsupported)


class _SpoiledBlas:
    def __init__(
        self, gpu: Spoiled, blas: Blas, spoil: Spoil | None, unsupported: Sequence[str]
    ) -> None:
        self.library, self.version = blas.library, blas.version
        self._gpu, self._wrapped, self._spoil, self._unsupported = gpu, blas, spoil, unsupported

    def prepare(
        self, gemm: Gemm, settings: GemmSettings, algorithm: Algorithm | None = None
    ) -> GemmPlan:
        for name in (self.library, gemm.dtype):
            if name in self._unsupported:
                raise Unsupported(f"{name} is not available", hint="choose another")
        blas = self._wrapped.prepare(gemm, settings, algorithm)
        return _SpoiledPlan(self._gpu, gemm, blas, self._spoil, self.library)

    def heuristics(self, gemm: Gemm, settings: GemmSettings, max_count: int) -> Sequence[Algorithm]:
        return self._wrapped.heuristics(gemm, settings, max_count)

    def algorithms(
        self, gemm: Gemm, settings: GemmSettings, is_over: Callable[[], bool] = never_over
    ) -> Iterator[Algorithm]:
        return self._wrapped.algorithms(gemm, settings, is_over)

    def close(self) -> None:
        self._wrapped.close()


class _SpoiledPlan:
    def __init__(
        self,
        gpu: Spoiled,
        gemm: Gemm,
        blas: GemmPlan,
        spoil: Spoil | None,
        library: Library,
    ) -> None:
        self._gpu, self._gemm, self._wrapped, self._spoil = gpu, gemm, blas, spoil
        self._library: Library = library
        self._runs = 0

    @property
    def algorithm(self) -> Algorithm | Unavailable:
        return self._wrapped.algorithm

    @property
    def settings(self) -> Mapping[str, str]:
        return self._wrapped.settings

    def enqueue(self, operands: Operands, stream: Stream) -> None:
        self._wrapped.enqueue(operands, stream)
        if self._spoil:
            gpu = self._gpu
            self._spoil(
                Run(gpu, self._gemm, operands, stream, self._runs, self._library, gpu.capturing)
            )
        self._runs += 1

    def close(self) -> None:
        self._wrapped.close()
