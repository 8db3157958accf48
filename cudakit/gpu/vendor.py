"""The packages of vendors that cudakit loads, and what they need of a real device."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from cudakit.errors import EnvironmentUnusable, MissingDependency, Unsupported
from cudakit.gpu.api import Memory, Ptr, Stream, Streams

_T = TypeVar("_T")

# torch's data types by the name of the element type.
TORCH_DTYPES: Mapping[str, str] = MappingProxyType(
    {
        "fp64": "float64",
        "fp32": "float32",
        "fp16": "float16",
        "bf16": "bfloat16",
        "fp8_e4m3": "float8_e4m3fn",
        "fp8_e5m2": "float8_e5m2",
        "int8": "int8",
        "int32": "int32",
    }
)

# The first version of torch with cuBLASLt tuning (ATen/cuda/tunable/GemmCublaslt.h in its wheel).
FIRST_TUNING_TORCH = "2.15"


class CudaDevice(Memory, Streams, Protocol):
    """The methods of a real device that the GEMM libraries call."""

    @property
    def ordinal(self) -> int:
        """The CUDA device index."""

    @property
    def closed(self) -> bool:
        """Whether the device was closed, which frees its memory."""

    def in_context(self, function: Callable[..., _T], *args: object) -> _T:
        """Call a function with the device's context current in this thread."""

    def stream_address(self, stream: Stream) -> int:
        """Return the driver handle of a stream as an int."""


class DeviceBytes:
    """A range of device memory as an array of bytes (CUDA Array Interface, version 3)."""

    def __init__(self, address: Ptr, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (int(address), False),
            "strides": None,
            "version": 3,
        }


@dataclass(frozen=True, slots=True)
class Nvmath:
    """The nvmath-python bindings; ``data_types`` is cudaDataType_t."""

    lt: Any
    cublas: Any
    data_types: Any
    # Address of cublasLtMatmul in the library that the bindings call; None if it is not known.
    matmul_address: int | None = None

    def data_type(self, name: str) -> int:
        """Return the value of a cudaDataType_t, such as ``CUDA_R_16F``."""
        return int(self.data_types[name])

    def compute_type(self, name: str) -> int:
        """Return the value of a cublasComputeType_t, such as ``COMPUTE_32F``."""
        return int(self.cublas.ComputeType[name])


def load_nvmath() -> Nvmath:
    """Load nvmath-python and cuBLAS. Raises MissingDependency if one of them is missing.

    cuBLAS is found in NVIDIA's wheels or the CUDA toolkit (cuda.pathfinder, "load_nvidia_dynamic_lib").
    """
    try:
        nvmath = import_module("nvmath")
        cublas, lt = (import_module(f"nvmath.bindings.{name}") for name in ("cublas", "cublasLt"))
    except ImportError as error:
        raise MissingDependency(
            "nvmath-python", purpose="calling cuBLAS", requirement="nvmath-python>=1.0,<2"
        ) from error
    try:
        lt.get_version(), cublas.get_property(0)
    except RuntimeError as error:  # The bindings load cuBLAS at the first call.
        raise MissingDependency(
            "cuBLAS",
            purpose="computing GEMMs",
            requirement="nvidia-cublas-cu12" if cuda_major() == 12 else "nvidia-cublas",
        ) from error
    return Nvmath(lt, cublas, nvmath.CudaDataType, _matmul_address())


def _matmul_address() -> int | None:
    """Return the address of cublasLtMatmul in the library that cuda.pathfinder finds for nvmath-python."""
    try:
        pathfinder = import_module("cuda.pathfinder")
        path = pathfinder.load_nvidia_dynamic_lib("cublasLt").abs_path
        function = ctypes.CDLL(path).cublasLtMatmul
    except (ImportError, OSError, AttributeError, RuntimeError, TypeError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value


def load_torch() -> Any:
    """Import torch. Raises MissingDependency, or EnvironmentUnusable for a torch built without CUDA."""
    try:
        torch = import_module("torch")
    except ImportError as error:
        raise MissingDependency("torch", purpose="computing GEMMs with torch") from error
    if torch.version.cuda is None:
        raise EnvironmentUnusable(
            f"torch {torch.__version__} was built without CUDA",
            hint="pip install torch from an index of builds with CUDA",
        )
    return torch


def torch_validators() -> Mapping[str, str]:
    """Return the tuning validators of torch by name (``torch.cuda.tunable.get_validators``).

    Raises MissingDependency without torch, Unsupported if torch was built without CUDA.
    """
    try:
        torch = import_module("torch")
    except ImportError:
        raise MissingDependency(
            "torch",
            purpose="reading its tuning validators",
            requirement=f"torch>={FIRST_TUNING_TORCH}",
        ) from None
    try:
        validator_pairs = import_module("torch.cuda.tunable").get_validators()
    except (AttributeError, ImportError, RuntimeError):
        raise Unsupported(
            f"torch {torch.__version__} is built without CUDA and cannot be tuned",
            hint=f"install a torch {FIRST_TUNING_TORCH} or newer for CUDA",
        ) from None
    return {str(name): str(value) for name, value in validator_pairs}


def load_cupy() -> Any:
    """Import CuPy. Raises MissingDependency if it is not installed."""
    try:
        return import_module("cupy")
    except ImportError as error:
        wheel = f"cupy-cuda{cuda_major()}x"
        raise MissingDependency(
            "cupy", purpose="computing GEMMs with CuPy", requirement=wheel
        ) from error


def cuda_major() -> int:
    """Return the CUDA major version of the installed cuda-bindings."""
    return int(version("cuda-bindings").partition(".")[0])
