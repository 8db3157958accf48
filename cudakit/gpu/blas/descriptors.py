"""A product as cuBLASLt wants it described: the operation, four layouts, and what the heuristics may take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

import numpy as np

from cudakit.gpu.api import Ptr
from cudakit.gpu.api.gemm import Gemm, GemmSettings, Matrix
from cudakit.gpu.blas.configuration import Cell
from cudakit.gpu.blas.search import allowed_reductions
from cudakit.gpu.blas.types import TypeNames, Types, narrow, numbered, type_names
from cudakit.gpu.blas.vendor import Nvmath

# Of cublasLtEpilogue_t. Its gelu is the one by tanh (cuBLAS Library, "cublasLtEpilogue_t").
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

# What cuMemAlloc promises at least (CUDA C++ Programming Guide, "Device Memory Accesses"), and what the
# preference assumes of itself: said all the same, as the choice of an algorithm rests on it.
_ALIGNMENT_BYTES = 256


class Problem:
    """The descriptors of one product, until ``close``; C is D, which beta = 0 keeps from being read.

    ``one`` is where on the device an fp32 of 1 is: the scale of the factors in fp8, and until a product is
    computed, the place of the bias, since the heuristics may look at whether there is one.
    """

    def __init__(self, vendor: Nvmath, gemm: Gemm, settings: GemmSettings, one: Ptr) -> None:
        self._lt = vendor.lt
        self._vendor = vendor
        self.gemm, self.settings = gemm, settings
        self.names: TypeNames = type_names(gemm)
        self.types: Types = numbered(self.names, vendor.cublas.ComputeType, vendor.data_types)
        self._scalars = np.array([1, 0], self.names.scalar)
        self.alpha: int = self._scalars[:1].ctypes.data
        self.beta: int = self._scalars[1:].ctypes.data
        pointer = vendor.lt.MatmulDescAttribute["BIAS_POINTER"]
        self._bias = Cell(pointer, vendor.lt.get_matmul_desc_attribute_dtype(pointer))
        self._bias_at = one
        with ExitStack() as owned:
            self._owned = owned
            self._describe(one)
            self._owned = owned.pop_all()

    @property
    def layouts(self) -> tuple[int, int, int, int]:
        """Of A, B, C and D."""
        return self.a, self.b, self.c, self.d

    @property
    def reads_c(self) -> bool:
        """Whether C is given at all: there is no C of fp8, and what is D cannot be C."""
        return not narrow(self.gemm)

    def place_bias(self, bias: Ptr) -> None:
        """Say where the bias is; costs next to nothing where it is where it was."""
        if bias != self._bias_at:
            self._bias.number = self._bias_at = bias
            self._lt.matmul_desc_set_attribute(
                self.operation, self._bias.attribute, self._bias.address, self._bias.size_bytes
            )

    def preference(self) -> int:
        """Describe which algorithms the heuristics may propose; lives as long as the rest."""
        lt = self._lt
        preference: int = lt.matmul_preference_create()
        self._owned.callback(lt.matmul_preference_destroy, preference)
        put = self._putting(
            preference,
            lt.matmul_preference_set_attribute,
            lt.MatmulPreferenceAttribute,
            lt.get_matmul_preference_attribute_dtype,
        )
        put("MAX_WORKSPACE_BYTES", self.settings.workspace_bytes)
        put("REDUCTION_SCHEME_MASK", sum(allowed_reductions(self.gemm, self.settings)))
        for matrix in "ABCD":
            put(f"MIN_ALIGNMENT_{matrix}_BYTES", _ALIGNMENT_BYTES)
        return preference

    def close(self) -> None:
        """Destroy the descriptors. A second time does nothing."""
        self._owned.close()

    def _describe(self, one: Ptr) -> None:
        gemm, types = self.gemm, self.types
        self.operation = self._operation(one)
        self.a, self.b = self._layout(gemm.a, types.a), self._layout(gemm.b, types.b)
        self.c, self.d = self._layout(gemm.d, types.c), self._layout(gemm.d, types.d)

    def _operation(self, one: Ptr) -> int:
        lt, gemm = self._lt, self.gemm
        attributes, kind = lt.MatmulDescAttribute, lt.get_matmul_desc_attribute_dtype
        operation: int = lt.matmul_desc_create(self.types.compute, self.types.scale)
        self._owned.callback(lt.matmul_desc_destroy, operation)
        put = self._putting(operation, lt.matmul_desc_set_attribute, attributes, kind)
        for letter, name in zip(gemm.layout, ("TRANSA", "TRANSB"), strict=True):
            put(name, self._vendor.cublas.Operation[letter.upper()])
        put("EPILOGUE", lt.Epilogue[_EPILOGUES[gemm.epilogue]])
        if gemm.has_bias:
            put("BIAS_DATA_TYPE", self.types.bias)
            put("BIAS_POINTER", one)
        if gemm.dtype.startswith("fp8"):
            self._put_fp8(put, one)
        return operation

    def _put_fp8(self, put: Callable[[str, int], None], one: Ptr) -> None:
        put("A_SCALE_POINTER", one)
        put("B_SCALE_POINTER", one)
        if narrow(self.gemm):
            put("D_SCALE_POINTER", one)
        put("FAST_ACCUM", self.settings.fast_accumulate)

    def _layout(self, matrix: Matrix, kind: int) -> int:
        lt = self._lt
        layout: int = lt.matrix_layout_create(kind, matrix.rows, matrix.columns, matrix.leading)
        self._owned.callback(lt.matrix_layout_destroy, layout)
        if matrix.batch > 1:
            put = self._putting(
                layout,
                lt.matrix_layout_set_attribute,
                lt.MatrixLayoutAttribute,
                lt.get_matrix_layout_attribute_dtype,
            )
            put("BATCH_COUNT", matrix.batch)
            put("STRIDED_BATCH_OFFSET", matrix.stride)
        return layout

    @staticmethod
    def _putting(
        descriptor: int, setter: Any, attributes: Any, kind: Any
    ) -> Callable[[str, int], None]:
        """Return what sets an attribute of a descriptor by its name."""

        def put(name: str, number: int) -> None:
            cell = Cell(attributes[name], kind(attributes[name]))
            cell.number = number
            setter(descriptor, cell.attribute, cell.address, cell.size_bytes)

        return put
