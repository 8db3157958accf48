"""Simulated cuBLAS and cuBLASLt: GEMM in numpy, durations in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import takewhile
from math import ceil
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cudakit.errors import Unsupported
from cudakit.gpu.api import Ptr, Stream
from cudakit.gpu.api.arrays import (
    BF16,
    ELEMENTS,
    FP16,
    FP32,
    FP64,
    INT32,
    Bits,
    Element,
    Floats,
    Launch,
    decode,
    encode,
)
from cudakit.gpu.api.facts import Capability, DeviceFacts
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
from cudakit.gpu.blas import (
    CHOOSES_ITSELF,
    USE_CUBLASLT,
    check_for_cublas,
    check_for_cublaslt,
    closed_error,
)
from cudakit.gpu.driver_errors import Status, cuda_error
from cudakit.gpu.sim.context import capability
from cudakit.gpu.sim.kernels import SimKernels
from cudakit.gpu.sim.memory import SimMemory
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
        is_user_choice = algorithm is not None
        if algorithm is None:
            algorithm = self._algorithms_fastest_first(gemm, settings)[0]
        else:
            algorithm = self._select_algorithm(gemm, settings, algorithm)
        plan = SimGemm(self._memory, self._kernels, self._result_cache, gemm, algorithm)
        if self.library == "cublas":
            plan.algorithm = Unavailable(_ALGORITHM_NOT_REPORTED)
        not_simulated = "not simulated: every sum is rounded once"
        plan.settings = {
            "chosen_by": "the user" if is_user_choice else "the simulator's heuristics",
            "workspace": f"{format_bytes(algorithm.workspace_bytes)} used, "
            f"{format_bytes(settings.workspace_bytes)} at most",
            "deterministic": "yes" if settings.deterministic else "no",
            "reduced_precision": not_simulated,
            "fast_accumulate": not_simulated,
        }
        return plan

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
        allowed_algorithms = self._allowed_algorithms(gemm, settings)
        return sort_by_estimate(gemm, allowed_algorithms, self._context.facts)

    def _select_algorithm(
        self, gemm: Gemm, settings: GemmSettings, requested: Algorithm
    ) -> Algorithm:
        """Return the algorithm that differs from the requested one at most in its workspace size."""
        self._check_can_select()
        for candidate in algorithms(gemm):
            if replace(candidate, workspace_bytes=requested.workspace_bytes) == requested:
                if reason := rejection_reason(candidate, settings):
                    raise Unsupported(f"algorithm {candidate.id} {reason}", hint=_ALGORITHM_HINT)
                return candidate
        raise Unsupported(f"no such algorithm for this GEMM: {requested}", hint=_ALGORITHM_HINT)

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
    ) -> None:
        self.algorithm: Algorithm | Unavailable = algorithm
        self.settings: Mapping[str, str] = {}
        self._memory, self._kernels = memory, kernels
        self._gemm = gemm
        self._name = f"sim_gemm_{gemm.dtype}_{gemm.layout}"
        self._result_cache = cache
        blocks = ceil(gemm.m / _TILE_EDGE) * ceil(gemm.n / _TILE_EDGE) * gemm.batch
        self._grid = (blocks * algorithm.split_k, 1, 1)
        # The launch adds the time of the memory accesses.
        self._busy_ns = excess_over_memory_ns(
            gemm, algorithm, memory.context.facts, memory.context.costs.memory_bytes_per_s
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


def _check_supported(gemm: Gemm, library: Library, facts: DeviceFacts) -> None:
    """Raise Unsupported if the library cannot compute a GEMM on this device."""
    device, minimum = capability(facts), _MIN_CAPABILITY.get(gemm.dtype, Capability(0, 0))
    if device < minimum:
        supported = [dtype for dtype in DATA_TYPES if device >= _MIN_CAPABILITY.get(dtype, (0, 0))]
        raise Unsupported(
            f"{gemm.dtype} needs compute capability {minimum} or newer; "
            f"{facts.fields.get('name')} has {device}",
            hint=f"supported here: {', '.join(supported)}",
        )
    element_count = sum(
        matrix.rows * matrix.columns * matrix.batch for matrix in (gemm.a, gemm.b, gemm.d)
    )
    if element_count > _MAX_ELEMENTS:
        raise Unsupported(
            "the GEMM is too large for a simulated device, which computes on the CPU: A, B and D may have "
            f"at most {_MAX_ELEMENTS / 1e6:.1f} million elements together",
            hint=f"a shape of {MAX_SIMULATED_EDGE} would fit; larger GEMMs need a real GPU",
        )
    if library == "cublas":
        check_for_cublas(gemm)
    else:
        check_for_cublaslt(gemm, device)
    if gemm.dtype.startswith("fp8"):
        _check_alignment(gemm, _FP8_ALIGNMENT_BYTES)
    if gemm.dtype == "int8":
        if gemm.epilogue != "none":
            raise Unsupported(
                f"int8 supports only epilogue none, but {gemm.epilogue} was requested",
                hint="use epilogue none",
            )
        _check_alignment(gemm, _INT8_ALIGNMENT_BYTES)


def _check_alignment(gemm: Gemm, alignment_bytes: int) -> None:
    for name, matrix in (("A", gemm.a), ("B", gemm.b), ("D", gemm.d)):
        element_bytes = matrix.element.size_bytes
        for size_name, size_bytes in (
            ("column size", matrix.rows * element_bytes),
            ("leading dimension", matrix.leading * element_bytes),
        ):
            if size_bytes % alignment_bytes:
                raise Unsupported(
                    f"{gemm.dtype} needs columns and leading dimensions of a multiple of {alignment_bytes} "
                    f"B; the {size_name} of {name} is {size_bytes} B",
                    hint=f"use multiples of {alignment_bytes} for m, n, k and padding",
                )


# --- GEMM algorithms of the simulated library ------------------------------------------------------
#
# A GEMM takes a start-up time and the time of its operations at a share of the peak, or that of its memory
# accesses if it is longer.

# Values of cublasLtReductionScheme_t: partial sums are added to D in order of arrival, or in the workspace.
_REDUCTION_IN_PLACE, _REDUCTION_IN_WORKSPACE = 1, 2
_MIN_SPLIT_K = 32  # elements of k of each part
_TILE_EDGE = 128  # rows and columns of D that a thread block computes
# The library estimates durations with this multiple of the start-up time, so that its first choice is not
# always the fastest.
_ASSUMED_START_FACTOR = 8
# Overhead of a GEMM that is bound by memory, relative to a copy.
_MEMORY_OVERHEAD = 1 / 8
# Number and clock of SMs for devices whose facts lack them.
_MULTIPROCESSORS = 16
_CLOCK_KHZ = 1_000_000
# Operations per cycle and SM: those of the tensor cores for fp16, and of the SM for fp32 and fp64. Where the
# generations differ, the lowest, so that no simulated GEMM exceeds the peak of its device.
_TENSOR_OPERATIONS = {(8, 0): 2048, (9, 0): 4096}
_DEFAULT_TENSOR_OPERATIONS = 512
_RELATIVE_TO_FP16 = {"tf32": 0.5, "int8": 2.0, "fp8_e4m3": 2.0, "fp8_e5m2": 2.0}
_OPERATIONS = {"fp32": 128, "fp64": 4}


class _Speed(NamedTuple):
    """The speed of an algorithm."""

    peak_share: float  # its rate without the start-up time, relative to the peak of the device
    start_s: float


_SPEEDS: Mapping[Algorithm, _Speed] = MappingProxyType(
    {
        Algorithm(id=0, tile=10): _Speed(0.3, 0.0),
        Algorithm(id=1, tile=15): _Speed(0.45, 0.5e-6),
        Algorithm(id=1, tile=20): _Speed(0.64, 1.0e-6),
        Algorithm(id=2, tile=24, stages=4): _Speed(0.78, 1.6e-6),
        Algorithm(id=3, tile=20, split_k=2, reduction=_REDUCTION_IN_WORKSPACE): _Speed(0.6, 1.2e-6),
        Algorithm(id=3, tile=20, split_k=8, reduction=_REDUCTION_IN_WORKSPACE): _Speed(0.5, 1.4e-6),
        Algorithm(id=4, tile=15, split_k=8, reduction=_REDUCTION_IN_PLACE): _Speed(0.4, 0.8e-6),
    }
)


def algorithms(gemm: Gemm) -> tuple[Algorithm, ...]:
    """Return the algorithms that can compute a GEMM, with their workspace sizes."""
    sum_bytes = gemm.m * gemm.n * gemm.batch * ELEMENTS[gemm.accumulate].size_bytes
    return tuple(
        replace(algorithm, workspace_bytes=algorithm.split_k * sum_bytes)
        if algorithm.reduction == _REDUCTION_IN_WORKSPACE
        else algorithm
        for algorithm in _SPEEDS
        if algorithm.split_k == 1 or gemm.k >= algorithm.split_k * _MIN_SPLIT_K
    )


def rejection_reason(algorithm: Algorithm, settings: GemmSettings) -> str:
    """Return the reason why settings exclude an algorithm, or ""."""
    if algorithm.workspace_bytes > settings.workspace_bytes:
        required_bytes, limit = algorithm.workspace_bytes, settings.workspace_bytes
        return (
            f"needs {format_bytes(required_bytes)} of workspace, {format_bytes(limit)} is allowed"
        )
    if settings.deterministic and algorithm.reduction == _REDUCTION_IN_PLACE:
        return "is not deterministic: the order of its additions varies"
    return ""


def sort_by_estimate(
    gemm: Gemm, candidates: Iterable[Algorithm], facts: DeviceFacts
) -> tuple[Algorithm, ...]:
    """Sort by estimated duration; the first algorithm may not be the fastest."""
    return tuple(
        sorted(
            candidates,
            key=lambda algorithm: _arithmetic_s(gemm, algorithm, facts, _ASSUMED_START_FACTOR),
        )
    )


def excess_over_memory_ns(
    gemm: Gemm, algorithm: Algorithm, facts: DeviceFacts, memory_bytes_per_s: int
) -> int:
    """Return by how much a GEMM takes longer than its memory accesses, which overlap with arithmetic."""
    memory_s = gemm.bytes_moved / memory_bytes_per_s
    excess_s = _arithmetic_s(gemm, algorithm, facts) - memory_s
    return int(1e9 * max(excess_s, _MEMORY_OVERHEAD * memory_s))


def _arithmetic_s(
    gemm: Gemm, algorithm: Algorithm, facts: DeviceFacts, start_factor: int = 1
) -> float:

    def positive(name: str, default: int) -> int:
        value = facts.fields.get(name)
        return value if isinstance(value, int) and value > 0 else default

    tensor = _TENSOR_OPERATIONS.get(capability(facts), _DEFAULT_TENSOR_OPERATIONS)
    per_cycle = _OPERATIONS.get(gemm.dtype) or tensor * _RELATIVE_TO_FP16.get(gemm.dtype, 1.0)
    clock_hz = 1e3 * positive("clock_rate_khz", _CLOCK_KHZ)
    peak = positive("multiprocessor_count", _MULTIPROCESSORS) * clock_hz * per_cycle
    speed = _SPEEDS[replace(algorithm, workspace_bytes=0)]
    return start_factor * speed.start_s + gemm.operations / (peak * speed.peak_share)


# --- GEMM in numpy, with the rounding of each data type --------------------------------------------
#
# Sums are computed in fp64, rounded once to the accumulator type, and after the epilogue once to the output
# type. A real device rounds more often and in an unspecified order, so its results differ in the last bits.
# Sums of int8 are exact and wrap around in int32.

_FP32_MANTISSA_BITS = 23
# The number of bits of a TF32 mantissa (A100 white paper, "TensorFloat-32").
_TF32_MANTISSA_BITS = 10
_BF16_MANTISSA_BITS = 7
# The NaN of both fp8 formats ("FP8 Formats for Deep Learning", arXiv 2209.05433, table 1).
_FP8_NAN = 0x7F
# Limit of the host memory for cached results. The last result is kept even if it is larger.
_CACHE_BYTES = 256 << 20


def multiply(gemm: Gemm, a: Bits, b: Bits, bias: Bits | None = None) -> Bits:
    """Return the bits of D, given those of A and B.

    Each row of an array is one column of a matrix, without padding; the matrices of a batch follow one
    another. ``bias`` has m elements.
    """
    with np.errstate(all="ignore"):  # overflow and NaN are results, as on a device
        # The transposed products op(B)ᵀ op(A)ᵀ, because the factors are stored transposed.
        right, left = _decode_factors(gemm, a, gemm.a), _decode_factors(gemm, b, gemm.b)
        sums = np.matmul(
            left if gemm.layout[1] == "n" else left.swapaxes(1, 2),
            right if gemm.layout[0] == "n" else right.swapaxes(1, 2),
        )
        values = decode(round_to(sums, ELEMENTS[gemm.accumulate]), ELEMENTS[gemm.accumulate])
        if bias is not None:
            values = values + decode(bias, gemm.bias)
        match gemm.epilogue.partition("-")[0]:
            case "relu":
                values = np.maximum(values, 0.0)
            case "gelu":
                # The tanh approximation, as in cuBLAS (cuBLAS Library, "cublasLtEpilogue_t").
                values = (
                    0.5
                    * values
                    * (1 + np.tanh(np.sqrt(2 / np.pi) * (values + 0.044715 * values**3)))
                )
        return round_to(values, gemm.d.element).reshape(-1, gemm.m)


def round_to(values: Floats, element: Element) -> Bits:
    """Round values to an element type, ties to even; return the bits.

    Overflow gives infinity, or the largest finite value in fp8; int32 wraps around.
    """
    if element is FP64:
        return values
    if element is INT32:
        return values.astype(np.int64).astype(np.int32)
    if element is FP16:
        return values.astype(np.float16).view(np.uint16)
    fp32_values = values.astype(np.float32)
    if element is FP32:
        return fp32_values
    if element is BF16:
        return (_round_mantissa(fp32_values, _BF16_MANTISSA_BITS) >> np.uint32(16)).astype(
            np.uint16
        )
    bits = encode(np.nan_to_num(fp32_values), element)
    bits[np.isnan(fp32_values)] = _FP8_NAN
    return bits


def _decode_factors(gemm: Gemm, columns: Bits, matrix: Matrix) -> Floats:
    """Decode the matrices of a batch in their stored, transposed form; round tf32 like tensor cores."""
    if gemm.dtype == "tf32":
        columns = _round_mantissa(columns, _TF32_MANTISSA_BITS).view(np.float32)
    return decode(columns, matrix.element).reshape(matrix.batch, matrix.columns, matrix.rows)


def _round_mantissa(fp32_values: npt.NDArray[Any], mantissa_bits: int) -> npt.NDArray[np.uint32]:
    """Round fp32 to fewer mantissa bits, ties to even; clear the remaining bits."""
    dropped_bits = np.uint32(_FP32_MANTISSA_BITS - mantissa_bits)
    bits = fp32_values.view(np.uint32)
    is_odd = (bits >> dropped_bits) & np.uint32(1)
    below_half = (np.uint32(1) << (dropped_bits - np.uint32(1))) - np.uint32(1)
    quiet_nan = bits | np.uint32(1 << (_FP32_MANTISSA_BITS - 1))
    rounded_bits = np.where(np.isnan(fp32_values), quiet_nan, bits + below_half + is_odd)
    return (rounded_bits >> dropped_bits) << dropped_bits


class ResultCache:
    """A cache of GEMM results by operand bits: a benchmark repeats the same GEMM hundreds of times."""

    def __init__(self, capacity_bytes: int = _CACHE_BYTES) -> None:
        self._capacity_bytes = capacity_bytes
        self._results: dict[tuple[Gemm, bytes], Bits] = {}

    def multiply(self, gemm: Gemm, a: Bits, b: Bits, bias: Bits | None = None) -> Bits:
        """Return the cached result of ``multiply``; callers must not modify it."""
        digest = sha256()
        for operand in (a, b) if bias is None else (a, b, bias):
            digest.update(np.ascontiguousarray(operand).data)
        key = (gemm, digest.digest())
        if key not in self._results:
            self._results[key] = multiply(gemm, a, b, bias)
            total_bytes = sum(result.nbytes for result in self._results.values())
            for oldest_key in [*self._results][:-1]:
                if total_bytes <= self._capacity_bytes:
                    break
                total_bytes -= self._results.pop(oldest_key).nbytes
        return self._results[key]
