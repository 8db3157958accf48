"""A simulated device with algorithms that compute wrong values, are unsupported, or are slow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from cudakit.errors import CudaError, Unsupported
from cudakit.gpu.api import Stream
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
from cudakit.gpu.sim import Sim
from cudakit.units import Unavailable

_SPOILED_BYTES = 8


@dataclass
class Faults:
    """Predicates that select algorithms with wrong values, without support, or with an error."""

    wrong: Callable[[Algorithm], bool] = lambda _: False
    unsupported: Callable[[Algorithm], bool] = lambda _: False
    failing: Callable[[Algorithm], bool] = lambda _: False
    # Number of executions per call, which makes an algorithm slow. Others have one.
    runs: Mapping[Algorithm, int] = field(default_factory=dict)


class FaultySim(Sim):
    """A simulated device whose BLAS library has faulty algorithms."""

    faults: Faults = Faults()

    def blas(self, library: Library = "cublaslt") -> Blas:
        return _FaultyBlas(self, super().blas(library), self.faults)


@dataclass
class _FaultyBlas:
    sim: Sim
    blas: Blas
    faults: Faults

    @property
    def library(self) -> Library:
        return self.blas.library

    @property
    def version(self) -> str:
        return self.blas.version

    def prepare(
        self, gemm: Gemm, settings: GemmSettings, algorithm: Algorithm | None = None
    ) -> GemmPlan:
        chosen = algorithm or self.blas.heuristics(gemm, settings, 1)[0]
        if self.faults.unsupported(chosen):
            raise Unsupported("refused")
        plan = self.blas.prepare(gemm, settings, algorithm)
        return _FaultyPlan(self.sim, plan, chosen, self.faults)

    def heuristics(self, gemm: Gemm, settings: GemmSettings, max_count: int) -> Sequence[Algorithm]:
        return self.blas.heuristics(gemm, settings, max_count)

    def algorithms(
        self, gemm: Gemm, settings: GemmSettings, is_over: Callable[[], bool] = never_over
    ) -> Iterator[Algorithm]:
        return self.blas.algorithms(gemm, settings, is_over)

    def close(self) -> None:
        self.blas.close()


@dataclass
class _FaultyPlan:
    sim: Sim
    plan: GemmPlan
    chosen: Algorithm
    faults: Faults

    @property
    def algorithm(self) -> Algorithm | Unavailable:
        return self.plan.algorithm

    @property
    def settings(self) -> Mapping[str, str]:
        return self.plan.settings

    def enqueue(self, operands: Operands, stream: Stream) -> None:
        if self.faults.failing(self.chosen):
            raise CudaError(13, "CUBLAS_STATUS_EXECUTION_FAILED", "cublasLtMatmul failed")
        for _ in range(self.faults.runs.get(self.chosen, 1)):
            self.plan.enqueue(operands, stream)
        if self.faults.wrong(self.chosen):
            self.sim.fill(operands.d, 0x42, _SPOILED_BYTES, stream)

    def close(self) -> None:
        self.plan.close()
