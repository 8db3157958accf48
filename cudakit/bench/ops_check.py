"""The check of operations against an fp64 computation on the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cudakit.bench.case import Verification, verification, worst_verification
from cudakit.gpu.api import LEGACY, ComputeDevice, Ptr
from cudakit.gpu.api.arrays import FP32, ArrayView, contiguous_strides
from cudakit.gpu.api.gemm import Operation

_ROUNDING = 2.0**-24  # Relative error of one rounding to fp32.
# Tolerances as numbers of roundings. add rounds once; softmax rounds a subtraction, an exponential, a sum and
# a division. The tolerance of sum is relative to the sum of absolute values, so that the rounding errors of
# partial sums contribute little.
_ADD_ROUNDINGS, _SOFTMAX_ROUNDINGS, _SUM_ROUNDINGS = 1, 16, 4
# matmul: rounding errors of a sum of k products grow as the square root of k (N. Higham and T. Mary, "A new
# approach to probabilistic rounding error analysis", 2019). tf32 would exceed the tolerance a hundredfold.
_MATMUL_ROUNDINGS = 2
_CHECKED_ROWS = 16  # Number of rows of a matrix product to check.

_ALIGNMENT_BYTES = 512  # Alignment of every array: good for vector loads of all libraries.

_Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ArrayBlock:
    """One block of device memory with several arrays of float32 of one shape, each aligned."""

    ptr: Ptr
    shape: tuple[int, ...]
    array_count: int

    @property
    def pitch_bytes(self) -> int:
        """Distance between the first bytes of two arrays."""
        size_bytes = FP32.size_bytes * math.prod(self.shape)
        return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    @property
    def size_bytes(self) -> int:
        """Bytes of all arrays, including the padding between them."""
        return self.array_count * self.pitch_bytes

    @property
    def views(self) -> list[ArrayView]:
        """Views of the arrays in the block of memory."""
        strides = contiguous_strides(self.shape, FP32.size_bytes)
        addresses = (Ptr(self.ptr + i * self.pitch_bytes) for i in range(self.array_count))
        return [ArrayView(address, "float32", self.shape, strides) for address in addresses]


class OperationCheck:
    """The fp64 result of an operation on given inputs. All outputs that are checked have these inputs."""

    def __init__(
        self, gpu: ComputeDevice, operation: Operation, inputs: Sequence[ArrayView]
    ) -> None:
        self._gpu, self._operation, self._inputs = gpu, operation, inputs
        self._reference: _Values | None = None  # fp64 result; None before the first check.
        self._error_norm = 1.0  # Norm to which errors are relative.

    def verify(self, outputs: Sequence[ArrayBlock]) -> Verification:
        """Compare the first output with fp64, and each other output whose bits differ from the first."""
        distinct_outputs: list[npt.NDArray[np.float32]] = []
        for block in outputs:
            padded_arrays = self._read(block.ptr, block.size_bytes).reshape(block.array_count, -1)
            arrays = padded_arrays[:, : math.prod(block.shape)]
            first_output = distinct_outputs[0] if distinct_outputs else arrays[0]
            is_different = (arrays.view(np.uint32) != first_output.view(np.uint32)).any(axis=1)
            distinct_outputs += [] if distinct_outputs else [first_output]
            distinct_outputs += list(arrays[is_different])
        shape = outputs[0].shape
        return worst_verification(
            self._verify_output(values.reshape(shape)) for values in distinct_outputs
        )

    def _verify_output(self, output_values: npt.NDArray[np.float32]) -> Verification:
        unwritten_count = int(np.isnan(output_values).sum())
        detail = (
            f"{unwritten_count} of {output_values.size} values were never written"
            if unwritten_count
            else ""
        )
        if self._reference is None:
            self._reference, self._error_norm = self._compute()
        checked_values = output_values[self._rows] if self._operation == "matmul" else output_values
        error = float(np.linalg.norm(checked_values - self._reference)) / self._error_norm
        return verification(error, self._tolerance, self._reference_description, detail)

    def _compute(self) -> tuple[_Values, float]:
        """Return the fp64 result of the checked values, and the norm to which errors are relative."""
        first_input, *other_inputs = map(self._read_input, self._inputs)
        match self._operation:
            case "add":
                result = first_input + other_inputs[0]
            case "matmul":
                result = first_input[self._rows] @ other_inputs[0]
            case "softmax":
                exponentials = np.exp(first_input - first_input.max(axis=-1, keepdims=True))
                result = exponentials / exponentials.sum(axis=-1, keepdims=True)
            case "sum":
                return np.asarray(first_input.sum()), float(np.abs(first_input).sum())
        return result, float(np.linalg.norm(result))

    @property
    def _rows(self) -> npt.NDArray[np.int64]:
        """Indices of the rows of a matrix product that are checked: the first, the last and some between."""
        rows = self._inputs[0].shape[0]
        return np.unique(np.linspace(0, rows - 1, _CHECKED_ROWS).astype(np.int64))

    @property
    def _tolerance(self) -> float:
        match self._operation:
            case "add":
                return _ADD_ROUNDINGS * _ROUNDING
            case "matmul":
                return _MATMUL_ROUNDINGS * _ROUNDING * math.sqrt(self._inputs[0].shape[1])
            case "softmax":
                return _SOFTMAX_ROUNDINGS * _ROUNDING
            case "sum":
                return _SUM_ROUNDINGS * _ROUNDING

    @property
    def _reference_description(self) -> str:
        """Description of the reference, for the report."""
        if self._operation == "matmul":
            return f"an fp64 computation of {len(self._rows)} rows"
        return "an fp64 computation of all values"

    def _read_input(self, view: ArrayView) -> _Values:
        """Return an input in fp64."""
        values = self._read(view.ptr, view.size * FP32.size_bytes)
        return values.reshape(view.shape).astype(np.float64)

    def _read(self, ptr: Ptr, size_bytes: int) -> npt.NDArray[np.float32]:
        """Copy device memory to the host, and wait."""
        host_ptr = self._gpu.host_malloc(size_bytes)
        try:
            self._gpu.copy(host_ptr, ptr, size_bytes, LEGACY)
            self._gpu.sync()
            host_view = self._gpu.host_view(host_ptr, size_bytes)
            host_values = np.frombuffer(host_view, np.float32).copy()
            host_view.release()
        finally:
            self._gpu.host_free(host_ptr)
        return host_values
