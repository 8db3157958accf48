"""Whether cuBLASLt can run an algorithm, asked as often as one likes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from cudakit.gpu.api.gemm import Algorithm
from cudakit.gpu.blas.descriptors import Problem

if TYPE_CHECKING:
    from cudakit.gpu.blas.cublaslt import CublasLt


class Trial:
    """One algorithm, configured again and again, each time with the question whether it can run."""

    def __init__(self, blas: CublasLt, problem: Problem, number: int) -> None:
        lt = blas.vendor.lt
        self._blas, self._problem = blas, problem
        self._result = np.zeros(1, lt.matmul_heuristic_result_dtype)
        self.structure = np.zeros(1, lt.matmul_algo_dtype)
        self.address: int = self.structure.ctypes.data
        self._arguments = (
            problem.operation,
            *problem.layouts,
            self.address,
            self._result.ctypes.data,
        )
        self.initialized = self._initialize(number)

    def accepts(self, algorithm: Algorithm) -> Algorithm | None:
        """Return the algorithm with the workspace that it needs; None where it cannot run here."""
        blas, lt = self._blas, self._blas.vendor.lt
        if not self.initialized:
            return None
        try:
            blas.configurations.write(self.address, algorithm)
            blas.cuda.ask(lt.matmul_algo_check, blas.handle, *self._arguments)
        except lt.cuBLASLtError:
            return None
        needed = int(self._result["workspace_size"][0])
        if self._result["state"][0] or needed > self._problem.settings.workspace_bytes:
            return None
        return replace(algorithm, workspace_bytes=needed)

    def _initialize(self, number: int) -> bool:
        lt, types = self._blas.vendor.lt, self._problem.types
        try:
            self._blas.cuda.ask(
                lt.matmul_algo_init,
                self._blas.handle,
                types.compute,
                types.scale,
                *types.matrices,
                number,
                self.address,
            )
        except lt.cuBLASLtError:
            return False
        return True
