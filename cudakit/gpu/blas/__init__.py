"""GEMM libraries on a real device: cuBLASLt, cuBLAS, torch and CuPy."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cudakit.gpu.api.facts import Capability
    from cudakit.gpu.api.gemm import Blas, Library
    from cudakit.gpu.vendor import CudaDevice


def open_blas(cuda: CudaDevice, library: Library, capability: Capability) -> Blas:
    """Import a GEMM library, and open it on a device.

    Raises MissingDependency with the package to install, EnvironmentUnusable if torch was built without CUDA.
    """
    from cudakit.gpu import vendor as vendor

    match library:
        case "torch":
            from cudakit.gpu.blas.frameworks import TorchBlas

            return TorchBlas(cuda, vendor.load_torch())
        case "cupy":
            from cudakit.gpu.blas.frameworks import CupyBlas

            return CupyBlas(cuda, vendor.load_cupy())
        case "cublas":
            from cudakit.gpu.blas.cublas import Cublas

            return Cublas(cuda, vendor.load_nvmath())
        case "cublaslt":
            from cudakit.gpu.blas.cublaslt import CublasLt

            return CublasLt(cuda, vendor.load_nvmath(), capability)
