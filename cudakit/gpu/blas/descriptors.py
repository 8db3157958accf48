"""Structures of cuBLASLt: the descriptors of a GEMM, and the configurations of algorithms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

import numpy as np

from cudakit.errors import Unsupported
from cudakit.gpu.api import Ptr
from cudakit.gpu.api.arrays import BF16, FP16
from cudakit.gpu.api.gemm import Algorithm, Gemm, GemmSettings, Matrix
from cudakit.gpu.blas import TypeNames, is_fp8_output, type_names
from cudakit.gpu.vendor import Nvmath

# Names of values of cublasLtEpilogue_t. Its gelu is the tanh form (cuBLAS Library, "cublasLtEpilogue_t").
_EPILOGUES: Mapping[str, str] = MappingProxyType(
    {
        "none": "DEFAULT",
        "bias": "BIAS",
        "relu": "RELU",
        "gelu": "GELU",
        "relu-bias": "RELU_BIAS",
        "gelu-bias": "GELU_BIAS",
    }
)

# The alignment that cuMemAlloc guarantees (CUDA C++ Programming Guide, "Device Memory Accesses"). The
# preference is set explicitly, because the heuristics depend on it.
_ALIGNMENT_BYTES = 256

# Names of the attributes in cublasLtMatmulAlgoConfigAttributes_t, by field of Algorithm.
FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "tile": "TILE_ID",
        "stages": "STAGES_ID",
        "split_k": "SPLITK_NUM",
        "reduction": "REDUCTION_SCHEME",
        "swizzle": "CTA_SWIZZLING",
        "custom": "CUSTOM_OPTION",
        "inner": "INNER_SHAPE_ID",
        "cluster": "CLUSTER_SHAPE_ID",
    }
)


# Values of cublasLtReductionScheme_t: how the partial sums of split-k are added.
NO_REDUCTION, IN_PLACE, IN_COMPUTE_TYPE, IN_OUTPUT_TYPE = 0, 1, 2, 4
SCHEMES = (IN_PLACE, IN_COMPUTE_TYPE, IN_OUTPUT_TYPE)


def allowed_reductions(gemm: Gemm, settings: GemmSettings) -> tuple[int, ...]:
    """Return the reduction schemes that the settings allow.

    Deterministic mode excludes the in-place scheme: partial sums are added to D in an order that NVIDIA does
    not document as fixed. Disabled reduced precision excludes schemes that store partial sums of a 16-bit D
    in 16 bits, as in torch (aten/src/ATen/cuda/CUDABlas.cpp).
    """
    excluded_schemes = {IN_PLACE} if settings.deterministic else set()
    if not settings.reduced_precision and gemm.d.element in (FP16, BF16):
        excluded_schemes |= {IN_PLACE, IN_OUTPUT_TYPE}
    return tuple(scheme for scheme in SCHEMES if scheme not in excluded_schemes)


class AttributeBuffer:
    """Memory for the value of one attribute, which cuBLASLt reads or writes by address."""

    def __init__(self, attribute: int, dtype: type[np.generic]) -> None:
        self.attribute = attribute
        self._value = np.zeros(1, dtype)
        self.address: int = self._value.ctypes.data
        self.size_bytes: int = self._value.nbytes

    @property
    def number(self) -> int:
        return int(self._value[0])

    @number.setter
    def number(self, number: int) -> None:
        self._value[0] = number


class Problem:
    """The descriptors of one GEMM, which exist until ``close``. C has the address of D, but beta is 0.

    ``unit_scale`` is the device address of an fp32 1.0. It is the fp8 scale, and a placeholder for the bias
    pointer, because the heuristics depend on whether that pointer is set.
    """

    def __init__(self, vendor: Nvmath, gemm: Gemm, settings: GemmSettings, unit_scale: Ptr) -> None:
        self._lt = vendor.lt
        self._vendor = vendor
        self.gemm, self.settings = gemm, settings
        self.names: TypeNames = type_names(gemm)
        cublas_types = self.names
        self.compute_type, self.scale_type = (
            vendor.compute_type(cublas_types.compute_type),
            vendor.data_type(cublas_types.scale_type),
        )
        self.matrix_types = [
            vendor.data_type(name)
            for name in (cublas_types.a, cublas_types.b, cublas_types.c, cublas_types.d)
        ]
        self._scalars = np.array([1, 0], self.names.scalar)
        self.alpha: int = self._scalars[:1].ctypes.data
        self.beta: int = self._scalars[1:].ctypes.data
        bias_attribute = vendor.lt.MatmulDescAttribute["BIAS_POINTER"]
        self._bias = AttributeBuffer(
            bias_attribute, vendor.lt.get_matmul_desc_attribute_dtype(bias_attribute)
        )
        self._bias_address = unit_scale
        with ExitStack() as resources:
            self._resources = resources
            self.operation = self._operation(unit_scale)
            self.a, self.b, self.c, self.d = map(
                self._layout, (gemm.a, gemm.b, gemm.d, gemm.d), self.matrix_types
            )
            self._resources = resources.pop_all()

    @property
    def layouts(self) -> tuple[int, int, int, int]:
        """The layouts of A, B, C and D."""
        return self.a, self.b, self.c, self.d

    @property
    def reads_c(self) -> bool:
        """Whether D is passed as C: not if D is fp8, because C cannot be fp8."""
        return not is_fp8_output(self.gemm)

    def set_bias(self, bias: Ptr) -> None:
        """Set the address of the bias, unless it is already set."""
        if bias != self._bias_address:
            self._bias.number = self._bias_address = bias
            self._lt.matmul_desc_set_attribute(
                self.operation, self._bias.attribute, self._bias.address, self._bias.size_bytes
            )

    def preference(self) -> int:
        """Return a preference descriptor with the limits for the heuristics; ``close`` destroys it."""
        lt = self._lt
        preference: int = lt.matmul_preference_create()
        self._resources.callback(lt.matmul_preference_destroy, preference)
        set_attribute = self._attribute_setter(
            preference,
            lt.matmul_preference_set_attribute,
            lt.MatmulPreferenceAttribute,
            lt.get_matmul_preference_attribute_dtype,
        )
        set_attribute("MAX_WORKSPACE_BYTES", self.settings.workspace_bytes)
        set_attribute("REDUCTION_SCHEME_MASK", sum(allowed_reductions(self.gemm, self.settings)))
        for matrix in "ABCD":
            set_attribute(f"MIN_ALIGNMENT_{matrix}_BYTES", _ALIGNMENT_BYTES)
        return preference

    def close(self) -> None:
        """Destroy the descriptors. A second call has no effect."""
        self._resources.close()

    def _operation(self, unit_scale: Ptr) -> int:
        lt, gemm = self._lt, self.gemm
        attributes, dtype_of = lt.MatmulDescAttribute, lt.get_matmul_desc_attribute_dtype
        operation: int = lt.matmul_desc_create(self.compute_type, self.scale_type)
        self._resources.callback(lt.matmul_desc_destroy, operation)
        set_attribute = self._attribute_setter(
            operation, lt.matmul_desc_set_attribute, attributes, dtype_of
        )
        for letter, name in zip(gemm.layout, ("TRANSA", "TRANSB"), strict=True):
            set_attribute(name, self._vendor.cublas.Operation[letter.upper()])
        set_attribute("EPILOGUE", lt.Epilogue[_EPILOGUES[gemm.epilogue]])
        if gemm.has_bias:
            set_attribute("BIAS_DATA_TYPE", self._vendor.data_type(self.names.bias))
            set_attribute("BIAS_POINTER", unit_scale)
        if gemm.dtype.startswith("fp8"):
            self._set_fp8_attributes(set_attribute, unit_scale)
        return operation

    def _set_fp8_attributes(
        self, set_attribute: Callable[[str, int], None], unit_scale: Ptr
    ) -> None:
        set_attribute("A_SCALE_POINTER", unit_scale)
        set_attribute("B_SCALE_POINTER", unit_scale)
        if is_fp8_output(self.gemm):
            set_attribute("D_SCALE_POINTER", unit_scale)
        set_attribute("FAST_ACCUM", self.settings.fast_accumulate)

    def _layout(self, matrix: Matrix, data_type: int) -> int:
        lt = self._lt
        layout: int = lt.matrix_layout_create(
            data_type, matrix.rows, matrix.columns, matrix.leading
        )
        self._resources.callback(lt.matrix_layout_destroy, layout)
        if matrix.batch > 1:
            set_attribute = self._attribute_setter(
                layout,
                lt.matrix_layout_set_attribute,
                lt.MatrixLayoutAttribute,
                lt.get_matrix_layout_attribute_dtype,
            )
            set_attribute("BATCH_COUNT", matrix.batch)
            set_attribute("STRIDED_BATCH_OFFSET", matrix.stride)
        return layout

    @staticmethod
    def _attribute_setter(
        descriptor: int, setter: Any, attributes: Any, dtype_of: Any
    ) -> Callable[[str, int], None]:
        """Return a function that sets an attribute of a descriptor by name."""

        def set_attribute(name: str, number: int) -> None:
            buffer = AttributeBuffer(attributes[name], dtype_of(attributes[name]))
            buffer.number = number
            setter(descriptor, buffer.attribute, buffer.address, buffer.size_bytes)

        return set_attribute


class Configurations:
    """Reads and writes the configuration in a cublasLtMatmulAlgo_t, given the address of this structure."""

    def __init__(self, lt: Any) -> None:
        self._lt = lt
        self._written_bytes = AttributeBuffer(0, np.uint64)
        attributes = lt.MatmulAlgoConfigAttribute
        self._buffers = {
            field: AttributeBuffer(
                attributes[name], lt.get_matmul_algo_config_attribute_dtype(attributes[name])
            )
            for field, name in {"id": "ID", **FIELDS}.items()
        }

    def read(self, address: int) -> Algorithm:
        """Return the configuration without the workspace size, which the structure does not contain."""
        number_by_field = {
            field: self._read(address, buffer) for field, buffer in self._buffers.items()
        }
        if number_by_field["split_k"] > 1:
            return Algorithm(**number_by_field)
        # The heuristics may return split_k -1 with a reduction scheme, which is invalid for split_k 1.
        return Algorithm(**number_by_field | {"split_k": 1, "reduction": NO_REDUCTION})

    def write(self, address: int, algorithm: Algorithm) -> None:
        """Set all fields except the id, which cublasLtMatmulAlgoInit sets.

        Raises Unsupported for a value that does not fit its attribute.
        """
        for field in FIELDS:
            buffer = self._buffers[field]
            try:
                buffer.number = getattr(algorithm, field)
            except OverflowError:
                raise Unsupported(
                    f"{field} {getattr(algorithm, field)} is out of range for cuBLASLt"
                ) from None
            self._lt.matmul_algo_config_set_attribute(
                address, buffer.attribute, buffer.address, buffer.size_bytes
            )

    def _read(self, address: int, buffer: AttributeBuffer) -> int:
        self._lt.matmul_algo_config_get_attribute(
            address,
            buffer.attribute,
            buffer.address,
            buffer.size_bytes,
            self._written_bytes.address,
        )
        return buffer.number
