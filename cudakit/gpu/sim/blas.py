"""Simulated cuBLAS and cuBLASLt: GEMM in numpy, durations in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from types import MappingProxyType
from typing import Any

import numpy as np

from cudakit.errors import Unsupported
from cudakit.gpu.api import Ptr, Stream
from cudakit.gpu.api.elements import Bits
from cudakit.gpu.api.facts import DeviceFacts
from cudakit.gpu.api.gemm import (
    DATA_TYPES,
    MAX_SIMULATED_EDGE,
    Algorithm,
    Gemm,
    GemmSettings,
    Library,
    Matrix,
    Operands,
    never_over,
)
from cudakit.gpu.api.host_kernels import Launch
from cudakit.gpu.architectures import Capability
from cudakit.gpu.blas.calls import (
    CHOOSES_ITSELF,
    USE_CUBLASLT,
    check_for_cublas,
    check_for_cublaslt,
    closed_error,
)
from cudakit.gpu.driver_errors import Status, cuda_error
from cudakit.gpu.sim.algorithms import (
    algorithms,
    count_blocks,
    excess_over_memory_ns,
    rejection_reason,
    sort_by_estimate,
)
from cudakit.gpu.sim.costs import capability, rates_of
from cudakit.gpu.sim.kernels import SimKernels
from cudakit.gpu.sim.memory import SimMemory
from cudakit.gpu.sim.numpy_gemm import ResultCache
from cudakit.units import Unavailable, format_bytes

_ALGORITHM_NOT_REPORTED = f"cuBLAS {CHOOSES_ITSELF}"
_ALGORITHM_HINT = "let the library choose, or tune again"
_THREADS = 256
# Minimum compute capability of each data type (CUDA C++ Programming Guide, "Compute Capabilities"; for fp8:
# cuBLAS Library, "cublasLtMatmul").
_MIN_CAPABILITY: Mapping[str, Capability] = MappingProxyType(
    {
        "fp16": Capability(5, 3),
        "int8": Capability(6, 1),
        "tf32": Capability(8, 0),
        "bf16": Capability(8, 0),
        "fp8_e4m3": Capability(8, 9),
        "fp8_e5m2": Capability(8, 9),
    }
)
# Required alignment of matrix columns (cuBLAS Library, "cublasLtMatmul").
_FP8_ALIGNMENT_BYTES = 16
_INT8_ALIGNMENT_BYTES = 4
_MAX_ELEMENTS = 3 * MAX_SIMULATED_EDGE**2


class SimBlas:
    """A BLAS library of a simulated device. Raises Unsupported for torch and CuPy, which need a real GPU."""

    version = "simulated"

    def __init__(self, library: Library, memory: SimMemory, kernels: SimKernels) -> None:
        if library not in ("cublaslt", "cublas"):
            raise Unsupported(
                f"{library} needs a real GPU; this device is simulated", hint="use --vs cublas"
            )
        self.library = library
        self._context, self._memory, self._kernels = memory.context, memory, kernels
        self._result_cache = ResultCache()
        self._is_closed = False
        self._check_open()

    def prepare(
        self, gemm: Gemm, settings: GemmSettings, algorithm: Algorithm | None = None
    ) -> SimGemm:
        """Prepare a GEMM. Raises Unsupported for an unknown or excluded algorithm."""
        self._check_gemm(gemm)
        if algorithm is not None:
            selected_algorithm = self._select_algorithm(gemm, settings, algorithm)
        else:
            selected_algorithm = self._algorithms_fastest_first(gemm, settings)[0]
        reported_algorithm = (
            Unavailable(_ALGORITHM_NOT_REPORTED) if self.library == "cublas" else selected_algorithm
        )
        described_settings = _describe_settings(
            settings, selected_algorithm, is_user_choice=algorithm is not None
        )
        return SimGemm(
            self._memory,
            self._kernels,
            self._result_cache,
            gemm,
            selected_algorithm,
            reported_algorithm,
            described_settings,
        )

    def heuristics(self, gemm: Gemm, settings: GemmSettings, limit: int) -> Sequence[Algorithm]:
        """Return at most ``limit`` algorithms by estimated duration; the first is not always the fastest."""
        self._check_gemm(gemm)
        self._check_can_select()
        return self._algorithms_fastest_first(gemm, settings)[:limit]

    def algorithms(
        self, gemm: Gemm, settings: GemmSettings, is_over: Callable[[], bool] = never_over
    ) -> Iterator[Algorithm]:
        """Yield every algorithm that the settings allow."""
        self._check_gemm(gemm)
        self._check_can_select()
        return takewhile(lambda _: not is_over(), self._allowed_algorithms(gemm, settings))

    def close(self) -> None:
        """Reject later calls. A second call has no effect."""
        self._is_closed = True

    def _allowed_algorithms(self, gemm: Gemm, settings: GemmSettings) -> tuple[Algorithm, ...]:
        return tuple(
            candidate for candidate in algorithms(gemm) if not rejection_reason(candidate, settings)
        )

    def _algorithms_fastest_first(
        self, gemm: Gemm, settings: GemmSettings
    ) -> tuple[Algorithm, ...]:
        rates = rates_of(self._context.facts, gemm.dtype)
        return sort_by_estimate(gemm, self._allowed_algorithms(gemm, settings), rates)

    def _select_algorithm(
        self, gemm: Gemm, settings: GemmSettings, requested_algorithm: Algorithm
    ) -> Algorithm:
        """Return the algorithm that differs from the requested one at most in its workspace size."""
        self._check_can_select()
        for candidate in algorithms(gemm):
            if (
                replace(candidate, workspace_bytes=requested_algorithm.workspace_bytes)
                == requested_algorithm
            ):
                if reason := rejection_reason(candidate, settings):
                    raise Unsupported(f"algorithm {candidate.id} {reason}", hint=_ALGORITHM_HINT)
                return candidate
        raise Unsupported(
            f"no such algorithm for this GEMM: {requested_algorithm}", hint=_ALGORITHM_HINT
        )

    def _check_gemm(self, gemm: Gemm) -> None:
        self._check_open()
        _check_supported(gemm, self.library, self._context.facts)

    def _check_can_select(self) -> None:
        if self.library == "cublas":
            raise Unsupported(_ALGORITHM_NOT_REPORTED, hint=USE_CUBLASLT)

    def _check_open(self) -> None:
        if self._context.closed:
            raise cuda_error(Status.CONTEXT_IS_DESTROYED, detail=f"{self._context.name} was closed")
        if self._is_closed:
            raise closed_error(self.library)


class SimGemm:
    """A prepared GEMM: one kernel that reads the operands and writes D, without their padding.

    Each call writes the algorithm's workspace, as on a real device: concurrent calls on two streams race.
    """

    def __init__(
        self,
        memory: SimMemory,
        kernels: SimKernels,
        cache: ResultCache,
        gemm: Gemm,
        algorithm: Algorithm,
        reported_algorithm: Algorithm | Unavailable,
        settings: Mapping[str, str],
    ) -> None:
        self.algorithm = reported_algorithm
        self.settings = MappingProxyType({**settings})
        self._memory, self._kernels = memory, kernels
        self._gemm = gemm
        self._name = f"sim_gemm_{gemm.dtype}_{gemm.layout}"
        self._result_cache = cache
        self._grid = (count_blocks(gemm, algorithm), 1, 1)
        rates = rates_of(memory.context.facts, gemm.dtype)
        self._busy_ns = excess_over_memory_ns(
            gemm, algorithm, rates, memory.context.costs.memory_bytes_per_s
        )
        self._workspace_bytes = algorithm.workspace_bytes
        self._workspace = (
            memory.malloc(algorithm.workspace_bytes) if algorithm.workspace_bytes else Ptr(0)
        )
        self._is_closed = False

    def enqueue(self, operands: Operands, stream: Stream) -> None:
        """Enqueue one GEMM. Raises the errors of a launch, and CUDA_ERROR_INVALID_HANDLE after ``close``."""
        if self._is_closed:
            raise closed_error(self._name)
        addresses = (operands.a, operands.b, operands.d, operands.bias)
        block = (_THREADS, 1, 1)
        self._kernels.launch_host_kernel(
            self._multiply, self._name, self._grid, block, addresses, stream
        )

    def close(self) -> None:
        """Free the workspace. Has no effect if called again, or after the device was closed."""
        if not self._is_closed and self._workspace and not self._memory.context.closed:
            self._memory.free(self._workspace)
        self._is_closed = True

    def _multiply(self, launch: Launch, a: Ptr, b: Ptr, d: Ptr, bias: Ptr) -> None:
        gemm = self._gemm
        launch.write(self._workspace, np.uint8, self._workspace_bytes)
        bias_bits: Bits | None = (
            launch.read(bias, gemm.bias.storage_dtype, gemm.m) if gemm.has_bias else None
        )
        factors = _read_matrix(launch, a, gemm.a), _read_matrix(launch, b, gemm.b)
        result = launch.write(d, *_column_layout(gemm.d), step_bytes=_step_bytes(gemm.d))
        result["column"][:] = self._result_cache.multiply(gemm, *factors, bias_bits)
        launch.busy(self._busy_ns)


def _read_matrix(launch: Launch, address: Ptr, matrix: Matrix) -> Bits:
    return launch.read(address, *_column_layout(matrix), step_bytes=_step_bytes(matrix))["column"]


def _column_layout(matrix: Matrix) -> tuple[np.dtype[Any], int]:
    """Return a dtype whose element is one column of a matrix, and the number of columns in the batch."""
    column_dtype = np.dtype([("column", matrix.element.storage_dtype, (matrix.rows,))], align=True)
    return column_dtype, matrix.columns * matrix.batch


def _step_bytes(matrix: Matrix) -> int:
    return matrix.leading * matrix.element.size_bytes


def _describe_settings(
    settings: GemmSettings, algorithm: Algorithm, *, is_user_choice: bool
) -> Mapping[str, str]:
    workspace_text, limit_text = (
        format_bytes(algorithm.workspace_bytes),
        format_bytes(settings.workspace_bytes),
    )
    not_simulated_text = "not simulated: every sum is rounded once"
    return {
        "chosen_by": "the user" if is_user_choice else "the simulator's heuristics",
        "workspace": f"{workspace_text} used, {limit_text} at most",
        "deterministic": "yes" if settings.deterministic else "no",
        "reduced_precision": not_simulated_text,
        "fast_accumulate": not_simulated_text,
    }


def _check_supported(gemm: Gemm, library: Library, facts: DeviceFacts) -> None:
    """Raise Unsupported if the library cannot compute a GEMM on this device."""
    _check_device(gemm, facts)
    _check_size(gemm)
    if library == "cublas":
        check_for_cublas(gemm)
    else:
        check_for_cublaslt(gemm, capability(facts))
    if gemm.dtype.startswith("fp8"):
        _check_alignment(gemm, _FP8_ALIGNMENT_BYTES)
    if gemm.dtype == "int8":
        _check_int8(gemm)


def _check_device(gemm: Gemm, facts: DeviceFacts) -> None:
    capability_of_device, minimum_capability = (
        capability(facts),
        _MIN_CAPABILITY.get(gemm.dtype, Capability(0, 0)),
    )
    if capability_of_device < minimum_capability:
        gpu_name = facts.fields.get("name")
        supported_types = [
            dtype
            for dtype in DATA_TYPES
            if capability_of_device >= _MIN_CAPABILITY.get(dtype, (0, 0))
        ]
        raise Unsupported(
            f"{gemm.dtype} needs compute capability {minimum_capability} or newer; "
            f"{gpu_name} has {capability_of_device}",
            hint=f"supported here: {', '.join(supported_types)}",
        )


def _check_size(gemm: Gemm) -> None:
    """Raise Unsupported for a GEMM that would take the CPU too long."""
    element_count = sum(
        matrix.rows * matrix.columns * matrix.batch for matrix in (gemm.a, gemm.b, gemm.d)
    )
    if element_count > _MAX_ELEMENTS:
        raise Unsupported(
            "the GEMM is too large for a simulated device, which computes on the CPU: A, B and D may have "
            f"at most {_MAX_ELEMENTS / 1e6:.1f} million elements together",
            hint=f"a shape of {MAX_SIMULATED_EDGE} would fit; larger GEMMs need a real GPU",
        )


def _check_int8(gemm: Gemm) -> None:
    """Raise Unsupported unless a GEMM meets the requirements of int8 (cuBLAS Library, "cublasLtMatmul")."""
    if gemm.epilogue != "none":
        raise Unsupported(
            f"int8 supports only epilogue none, but {gemm.epilogue} was requested",
            hint="use epilogue none",
        )
    _check_alignment(gemm, _INT8_ALIGNMENT_BYTES)


def _check_alignment(gemm: Gemm, alignment_bytes: int) -> None:
    for name, matrix in (("A", gemm.a), ("B", gemm.b), ("D", gemm.d)):
        for size_name, size_bytes in _column_bytes(matrix).items():
            if size_bytes % alignment_bytes:
                raise Unsupported(
                    f"{gemm.dtype} needs columns and leading dimensions of a multiple of {alignment_bytes} "
                    f"B; the {size_name} of {name} is {size_bytes} B",
                    hint=f"use multiples of {alignment_bytes} for m, n, k and padding",
                )


def _column_bytes(matrix: Matrix) -> dict[str, int]:
    """Return the bytes of a column, and the leading dimension in bytes, by name."""
    size_bytes = matrix.element.size_bytes
    return {
        "column size": matrix.rows * size_bytes,
        "leading dimension": matrix.leading * size_bytes,
    }
