"""A product that the simulated library is ready to compute."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from cudakit.gpu.api import Ptr, Stream
from cudakit.gpu.api.elements import Bits
from cudakit.gpu.api.gemm import Algorithm, Gemm, Matrix, Operands
from cudakit.gpu.blas.refusals import closed
from cudakit.gpu.sim.algorithms import blocks, busy_ns
from cudakit.gpu.sim.product import Products
from cudakit.gpu.sim.rates import rates_of
from cudakit.gpu.sim.twins import Launch
from cudakit.units import Unavailable

if TYPE_CHECKING:
    from cudakit.gpu.sim.device import Sim

_THREADS = 256


class SimMultiplication:
    """One kernel a product, which reads its operands and writes D, and nothing between their columns.

    The workspace that the algorithm needs is taken from the device and written by every product, as on a
    real one: two streams that use it at once race.
    """

    def __init__(
        self,
        sim: Sim,
        gemm: Gemm,
        chosen: Algorithm,
        shown: Algorithm | Unavailable,
        settings: Mapping[str, str],
        products: Products,
    ) -> None:
        self.algorithm = shown
        self.settings = MappingProxyType({**settings})
        self._sim = sim
        self._gemm = gemm
        self._name = f"sim_gemm_{gemm.dtype}_{gemm.layout}"
        self._products = products
        self._grid = (blocks(gemm, chosen), 1, 1)
        rates = rates_of(sim.facts(), gemm.dtype)
        self._busy_ns = busy_ns(gemm, chosen, rates, sim.costs.memory_bytes_per_s)
        self._workspace_bytes = chosen.workspace_bytes
        self._workspace = sim.malloc(chosen.workspace_bytes) if chosen.workspace_bytes else Ptr(0)
        self._closed = False

    def enqueue(self, operands: Operands, stream: Stream) -> None:
        """Compute once. Raises what a launch does, and CUDA_ERROR_INVALID_HANDLE after ``close``."""
        if self._closed:
            raise closed(self._name)
        places = (operands.a, operands.b, operands.d, operands.bias)
        block = (_THREADS, 1, 1)
        self._sim.launch_twin(self._multiply, self._name, self._grid, block, places, stream)

    def close(self) -> None:
        """Give back the workspace. A second time does nothing, nor does it where the device was closed."""
        if not self._closed and self._workspace and not self._sim.closed:
            self._sim.free(self._workspace)
        self._closed = True

    def _multiply(self, launch: Launch, a: Ptr, b: Ptr, d: Ptr, bias: Ptr) -> None:
        gemm = self._gemm
        launch.write(self._workspace, np.uint8, self._workspace_bytes)
        added: Bits | None = launch.read(bias, gemm.bias.bits, gemm.m) if gemm.has_bias else None
        factors = _read(launch, a, gemm.a), _read(launch, b, gemm.b)
        result = launch.write(d, *_columns(gemm.d), step_bytes=_step_bytes(gemm.d))
        result["column"][:] = self._products.multiply(gemm, *factors, added)
        launch.busy(self._busy_ns)


def _read(launch: Launch, place: Ptr, matrix: Matrix) -> Bits:
    return launch.read(place, *_columns(matrix), step_bytes=_step_bytes(matrix))["column"]


def _columns(matrix: Matrix) -> tuple[np.dtype[Any], int]:
    """Return a column as an element of a numpy array, and how many of them all the batch has."""
    column = np.dtype([("column", matrix.element.bits, (matrix.rows,))], align=True)
    return column, matrix.columns * matrix.batch


def _step_bytes(matrix: Matrix) -> int:
    return matrix.leading * matrix.element.size_bytes
