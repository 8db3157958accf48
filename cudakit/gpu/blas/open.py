"""The library that a name stands for, on a real device."""

from __future__ import annotations

from cudakit.gpu.api.gemm import Blas, Library
from cudakit.gpu.blas.refusals import Capability
from cudakit.gpu.blas.vendor import CudaDevice, load_cupy, load_nvmath, load_torch


def open_blas(cuda: CudaDevice, library: Library, capability: Capability) -> Blas:
    """Open a library; nothing of it is imported before.

    Raises MissingDependency with what to install, EnvironmentUnusable for a torch without CUDA.
    """
    match library:
        case "torch":
            from cudakit.gpu.blas.torch import TorchBlas

            return TorchBlas(cuda, load_torch())
        case "cupy":
            from cudakit.gpu.blas.cupy import CupyBlas

            return CupyBlas(cuda, load_cupy())
        case "cublas":
            from cudakit.gpu.blas.cublas import Cublas

            return Cublas(cuda, load_nvmath())
        case "cublaslt":
            from cudakit.gpu.blas.cublaslt import CublasLt

            return CublasLt(cuda, load_nvmath(), capability)
