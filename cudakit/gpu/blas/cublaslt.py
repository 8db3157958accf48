"""GEMM by cuBLASLt, which lists algorithms and runs a selected one, through the nvmath-python bindings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Any

import numpy as np

from cudakit.errors import Unsupported
from cudakit.gpu.api import LEGACY, Ptr, Stream
from cudakit.gpu.api.facts import Capability
from cudakit.gpu.api.gemm import Algorithm, Gemm, GemmSettings, Library, Operands, never_over
from cudakit.gpu.blas import (
    UNSUPPORTED_STATUSES,
    call_error,
    check_for_cublaslt,
    closed_error,
    no_algorithm,
)
from cudakit.gpu.blas.descriptors import (
    NO_REDUCTION,
    AttributeBuffer,
    Configurations,
    Problem,
    allowed_reductions,
)
from cudakit.gpu.vendor import CudaDevice, Nvmath
from cudakit.units import format_bytes

try:
    from cudakit.gpu._fast_call import StreamCall

    _HAS_EXTENSION = True
except ImportError:
    _HAS_EXTENSION = False

_ALGORITHM_HINT = "let the library choose, or tune again"

# Maximum number of algorithm ids to request: more than cuBLASLt has for any combination of types.
_MAX_IDS = 1000

# Size of the allocation for the scale factor 1.0.
_UNIT_SCALE_BYTES = 256


class CublasLt:
    """The library cuBLASLt on one device."""

    library: Library = "cublaslt"

    def __init__(self, cuda: CudaDevice, vendor: Nvmath, capability: Capability) -> None:
        self.cuda, self.vendor = cuda, vendor
        self._capability = capability
        lt = vendor.lt
        self.version = ".".join(str(lt.get_property(component)) for component in range(3))
        self.configurations = Configurations(lt)
        self._handle: int = self.call(lt.create, name="cublasLtCreate")
        self._unit_scale: Ptr | None = None

    @property
    def handle(self) -> int:
        """The cuBLASLt handle. Raises CUDA_ERROR_INVALID_HANDLE after ``close``."""
        if not self._handle:
            raise closed_error(self.library)
        return self._handle

    def call(self, function: Any, *args: object, name: str) -> Any:
        """Call the library with the device's context current. Raises Unsupported or CudaError."""
        try:
            return self.cuda.in_context(function, *args)
        except self.vendor.lt.cuBLASLtError as error:
            raise call_error(error.status, name) from error

    def prepare(
        self, gemm: Gemm, settings: GemmSettings, algorithm: Algorithm | None = None
    ) -> LtGemm:
        """Prepare a GEMM. Raises Unsupported for an algorithm that the library or the settings forbid."""
        with ExitStack() as resources:
            problem = resources.enter_context(closing(self._problem(gemm, settings)))
            if algorithm is None:
                structure, selected_algorithm = self._heuristic_results(problem, 1)[0]
            else:
                structure, selected_algorithm = self._checked_structure(problem, algorithm)
            is_user_choice = algorithm is not None
            plan = LtGemm(
                self, problem, structure, selected_algorithm, is_user_choice=is_user_choice
            )
            resources.pop_all()  # The prepared GEMM closes the descriptors.
            return plan

    def heuristics(self, gemm: Gemm, settings: GemmSettings, limit: int) -> Sequence[Algorithm]:
        """Return up to ``limit`` algorithms of cublasLtMatmulAlgoGetHeuristic, estimated fastest first."""
        with closing(self._problem(gemm, settings)) as problem:
            return [algorithm for _, algorithm in self._heuristic_results(problem, limit)]

    def algorithms(
        self, gemm: Gemm, settings: GemmSettings, is_over: Callable[[], bool] = never_over
    ) -> Iterator[Algorithm]:
        """Yield every configuration that cublasLtMatmulAlgoCheck accepts; algorithm ids take turns."""
        check_for_cublaslt(gemm, self._capability)
        return self._search(gemm, settings, is_over)

    def close(self) -> None:
        """Destroy the handle. Has no effect if called again, or after the device was closed."""
        if self._handle and not self.cuda.closed:
            self.cuda.in_context(self.vendor.lt.destroy, self._handle)
            if self._unit_scale is not None:
                self.cuda.free(self._unit_scale)
        self._handle = 0

    def _problem(self, gemm: Gemm, settings: GemmSettings) -> Problem:
        check_for_cublaslt(gemm, self._capability)
        if not self._handle:
            raise closed_error(self.library)
        if self._unit_scale is None:
            self._unit_scale = _upload_unit_scale(self.cuda)
        try:
            return Problem(self.vendor, gemm, settings, self._unit_scale)
        except self.vendor.lt.cuBLASLtError as error:
            raise call_error(error.status, "the description of the GEMM") from error

    def _heuristic_results(self, problem: Problem, limit: int) -> list[tuple[Any, Algorithm]]:
        """Return the heuristic results as structures and Algorithms. Raises Unsupported if there are none."""
        lt = self.vendor.lt
        results = np.zeros(limit, lt.matmul_heuristic_result_dtype)
        result_count = np.zeros(1, np.int32)
        try:
            self.cuda.in_context(
                lt.matmul_algo_get_heuristic,
                self.handle,
                problem.operation,
                *problem.layouts,
                problem.preference(),
                limit,
                results.ctypes.data,
                result_count.ctypes.data,
            )
        except lt.cuBLASLtError as error:
            if error.status not in UNSUPPORTED_STATUSES:
                raise call_error(error.status, "cublasLtMatmulAlgoGetHeuristic") from error
        usable_results = [result for result in results[: result_count[0]] if not result["state"]]
        if not usable_results:
            raise no_algorithm(problem.gemm, f"cuBLASLt {self.version}", self._capability)
        return [self._read_result(result) for result in usable_results]

    def _read_result(self, result: Any) -> tuple[Any, Algorithm]:
        structure = np.array([result["algo"]], self.vendor.lt.matmul_algo_dtype)
        configuration = self.configurations.read(structure.ctypes.data)
        return structure, replace(configuration, workspace_bytes=int(result["workspace_size"]))

    def _checked_structure(self, problem: Problem, algorithm: Algorithm) -> tuple[Any, Algorithm]:
        """Return the structure of an algorithm. Raises Unsupported if cublasLtMatmulAlgoCheck rejects it."""
        scheme = algorithm.reduction
        if scheme and scheme not in allowed_reductions(problem.gemm, problem.settings):
            raise Unsupported(
                f"algorithm {algorithm.id} uses reduction scheme {scheme}, which deterministic mode or "
                "disabled reduced precision does not allow",
                hint=_ALGORITHM_HINT,
            )
        algorithm_check = _AlgorithmCheck(self, problem, algorithm.id)
        if not (checked_algorithm := algorithm_check.check_algorithm(algorithm)):
            raise Unsupported(
                f"cuBLASLt {self.version} does not accept {algorithm} for this GEMM",
                hint=_ALGORITHM_HINT,
            )
        return algorithm_check.structure, checked_algorithm

    def _search(
        self, gemm: Gemm, settings: GemmSettings, is_over: Callable[[], bool]
    ) -> Iterator[Algorithm]:
        with closing(self._problem(gemm, settings)) as problem:
            ids = self.call(
                self.vendor.lt.matmul_algo_get_ids,
                self.handle,
                problem.compute_type,
                problem.scale_type,
                *problem.matrix_types,
                _MAX_IDS,
                name="cublasLtMatmulAlgoGetIds",
            )
            iterators = (self._configurations_of(problem, algorithm_id) for algorithm_id in ids)
            yield from round_robin(iterators, is_over)

    def _configurations_of(self, problem: Problem, algorithm_id: int) -> Iterator[Algorithm | None]:
        algorithm_check = _AlgorithmCheck(self, problem, algorithm_id)
        if not algorithm_check.is_initialized:
            return
        reduction_schemes = allowed_reductions(problem.gemm, problem.settings)
        algorithm_choices = self.call(
            choices,
            self.vendor.lt,
            algorithm_id,
            algorithm_check.address,
            reduction_schemes,
            self._capability,
            name="cublasLtMatmulAlgoCapGetAttribute",
        )
        yield from configurations(algorithm_choices, algorithm_check.check_algorithm)


class LtGemm:
    """A prepared call of cublasLtMatmul."""

    def __init__(
        self,
        blas: CublasLt,
        problem: Problem,
        structure: Any,
        algorithm: Algorithm,
        *,
        is_user_choice: bool,
    ) -> None:
        self.algorithm = algorithm
        self.settings: Mapping[str, str] = MappingProxyType(
            _describe_settings(problem, algorithm, is_user_choice=is_user_choice)
        )
        self._blas, self._problem = blas, problem
        self._matmul = blas.vendor.lt.matmul
        self._structure = structure  # An attribute, because calls pass the structure's address.
        self._algorithm_address: int = structure.ctypes.data
        self._workspace_bytes = algorithm.workspace_bytes
        self._workspace = (
            blas.cuda.malloc(self._workspace_bytes) if self._workspace_bytes else Ptr(0)
        )
        self._is_closed = False

    def enqueue(self, operands: Operands, stream: Stream) -> None:
        """Enqueue one GEMM. Raises CudaError; CUDA_ERROR_INVALID_HANDLE after ``close``.

        Operands must be aligned to 256 bytes, as cuMemAlloc guarantees.
        """
        if self._is_closed:
            raise closed_error("the cuBLASLt GEMM")
        if self._problem.gemm.has_bias:
            self._problem.set_bias(operands.bias)
        self._blas.call(
            self._matmul,
            *self._arguments(operands),
            self._blas.cuda.stream_address(stream),
            name="cublasLtMatmul",
        )

    def bind(self, operands: Operands) -> Callable[[Stream], None]:
        """Return a function that enqueues the GEMM with these operands, without Python code if possible."""
        cuda, address = self._blas.cuda, self._blas.vendor.matmul_address
        if address is None or not _HAS_EXTENSION or self._problem.gemm.has_bias:
            return partial(self.enqueue, operands)
        call = StreamCall(address, self._arguments(operands))

        def enqueue_bound(stream: Stream) -> None:
            if self._is_closed:
                raise closed_error("the cuBLASLt GEMM")
            if status := cuda.in_context(call, cuda.stream_address(stream)):
                raise call_error(status, "cublasLtMatmul")

        return enqueue_bound

    def _arguments(self, operands: Operands) -> tuple[int, ...]:
        """Return the arguments of cublasLtMatmul before the stream."""
        problem = self._problem
        return (
            self._blas.handle,
            problem.operation,
            problem.alpha,
            operands.a,
            problem.a,
            operands.b,
            problem.b,
            problem.beta,
            operands.d if problem.reads_c else 0,
            problem.c,
            operands.d,
            problem.d,
            self._algorithm_address,
            self._workspace,
            self._workspace_bytes,
        )

    def close(self) -> None:
        """Free the workspace. Has no effect if called again, or after the device was closed."""
        if self._is_closed:
            return
        self._is_closed = True
        self._problem.close()
        if self._workspace and not self._blas.cuda.closed:
            self._blas.cuda.free(self._workspace)


def _describe_settings(
    problem: Problem, algorithm: Algorithm, *, is_user_choice: bool
) -> dict[str, str]:
    gemm, settings = problem.gemm, problem.settings
    descriptions = {
        "chosen_by": "the user" if is_user_choice else "cuBLASLt heuristics",
        "compute_type": f"CUBLAS_{problem.names.compute_type}",
        "scale_type": problem.names.scale_type,
        "workspace": (
            f"{format_bytes(algorithm.workspace_bytes)} used, "
            f"{format_bytes(settings.workspace_bytes)} at most"
        ),
        "deterministic": "yes" if settings.deterministic else "no",
        "reduction_schemes": " ".join(map(str, allowed_reductions(gemm, settings))),
    }
    if gemm.dtype.startswith("fp8"):
        descriptions["scales"] = "1 for each factor"
        descriptions["fast_accumulate"] = "yes" if settings.fast_accumulate else "no"
    return descriptions


class _AlgorithmCheck:
    """Checks whether cuBLASLt supports configurations of one algorithm id for a GEMM."""

    def __init__(self, blas: CublasLt, problem: Problem, algorithm_id: int) -> None:
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
        self.is_initialized = self._initialize(algorithm_id)

    def check_algorithm(self, algorithm: Algorithm) -> Algorithm | None:
        """Return the algorithm with its workspace size, or None if cuBLASLt does not support it."""
        blas, lt = self._blas, self._blas.vendor.lt
        if not self.is_initialized:
            return None
        try:
            blas.configurations.write(self.address, algorithm)
            blas.cuda.in_context(lt.matmul_algo_check, blas.handle, *self._arguments)
        except lt.cuBLASLtError:
            return None
        required_bytes = int(self._result["workspace_size"][0])
        if self._result["state"][0] or required_bytes > self._problem.settings.workspace_bytes:
            return None
        return replace(algorithm, workspace_bytes=required_bytes)

    def _initialize(self, algorithm_id: int) -> bool:
        lt, problem = self._blas.vendor.lt, self._problem
        try:
            self._blas.cuda.in_context(
                lt.matmul_algo_init,
                self._blas.handle,
                problem.compute_type,
                problem.scale_type,
                *problem.matrix_types,
                algorithm_id,
                self.address,
            )
        except lt.cuBLASLtError:
            return False
        return True


def _upload_unit_scale(cuda: CudaDevice) -> Ptr:
    """Return the address of a new fp32 1.0 in device memory."""
    scale_bytes = np.float32(1).tobytes()
    address, pinned_ptr = cuda.malloc(_UNIT_SCALE_BYTES), cuda.host_malloc(len(scale_bytes))
    cuda.host_view(pinned_ptr, len(scale_bytes))[:] = scale_bytes
    cuda.copy(address, pinned_ptr, len(scale_bytes), LEGACY)
    cuda.sync_stream(LEGACY)
    cuda.host_free(pinned_ptr)
    return address


# --- all configurations of an algorithm ---------------------------------------------------------------------
#
# The capabilities of an algorithm (cuBLAS Library, "cublasLtMatmulAlgoCapAttributes_t") list the values of
# each parameter, but neither the valid combinations nor the supported cluster and inner shapes. The search
# checks these with cublasLtMatmulAlgoCheck.

# Split-k factors to try. The library accepts any factor, but larger ones are not faster.
SPLIT_K_FACTORS = (2, 3, 4, 5, 6, 8, 10, 12, 16)

# Thread block clusters exist since Hopper (CUDA C++ Programming Guide, "Thread Block Clusters").
_CLUSTERS_SINCE = (9, 0)

# Maximum number of custom options to try: some algorithms accept any value, but only the first few differ.
_MAX_CUSTOM_OPTIONS = 64

# Approximate number of tile and stage combinations with which each cluster and inner shape is tried.
_SAMPLE_COUNT = 16

# A function that returns an algorithm with its workspace size, or None if the library does not support it.
CheckAlgorithm = Callable[[Algorithm], "Algorithm | None"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The values of each parameter of an algorithm; the default value is first."""

    id: int
    tiles: Sequence[int] = (0,)
    stages: Sequence[int] = (0,)
    customs: Sequence[int] = (0,)
    swizzles: Sequence[int] = (0,)
    splits: Sequence[int] = ()
    reductions: Sequence[int] = ()
    clusters: Sequence[int] = (0,)
    inners: Sequence[int] = (0,)


def configurations(choices: Choices, check_algorithm: CheckAlgorithm) -> Iterator[Algorithm | None]:
    """Yield each supported configuration once, and None for each unsupported one.

    Combinations of tiles and stages come first, because they are found fast, and their speed differs most. A
    cluster or inner shape is tried only if a sample of tiles and stages supports it; if every value is
    supported, the parameter has no effect and is skipped. Swizzle and split-k are tried on configurations
    that are supported without them.
    """
    shapes = [
        Algorithm(id=choices.id, tile=tile, stages=stages)
        for tile, stages in product(choices.tiles, choices.stages)
    ]
    supported_shapes: list[Algorithm] = []
    for shape in shapes:
        if accepted_shape := check_algorithm(shape):
            supported_shapes.append(shape)
        yield accepted_shape
    sampled_shapes = _sample(supported_shapes or shapes)
    clusters = _effective_values("cluster", choices.clusters, sampled_shapes, check_algorithm)
    inners = _effective_values("inner", choices.inners, sampled_shapes, check_algorithm)
    for shape, custom, cluster, inner_shape in product(shapes, choices.customs, clusters, inners):
        candidate = replace(shape, custom=custom, cluster=cluster, inner=inner_shape)
        accepted_shape = check_algorithm(candidate)
        yield accepted_shape if candidate != shape else None
        if accepted_shape:
            yield from map(check_algorithm, _variants(candidate, choices))


def round_robin(
    iterators: Iterable[Iterator[Algorithm | None]], is_over: Callable[[], bool] = never_over
) -> Iterator[Algorithm]:
    """Yield an algorithm of each iterator in turn, so that a search that stops early covers all of them.

    If an iterator yields None, the next iterator follows.
    """
    active_iterators = list(iterators)
    while active_iterators:
        for iterator in [*active_iterators]:
            if is_over():
                return
            try:
                algorithm = next(iterator)
            except StopIteration:
                active_iterators.remove(iterator)
            else:
                if algorithm:
                    yield algorithm


def _sample(shapes: Sequence[Algorithm]) -> Sequence[Algorithm]:
    """Return an evenly spaced sample of shapes, because trying all takes seconds per algorithm."""
    return shapes[:: max(1, len(shapes) // _SAMPLE_COUNT)]


def _effective_values(
    field: str, values: Sequence[int], shapes: Sequence[Algorithm], check_algorithm: CheckAlgorithm
) -> Sequence[int]:
    """Return the supported values of a parameter; only the first value if the parameter has no effect."""
    if len(values) == 1:
        return values
    supported_values = [
        value
        for value in values
        if any(check_algorithm(replace(shape, **{field: value})) for shape in shapes)
    ]
    return (
        supported_values if supported_values and len(supported_values) < len(values) else values[:1]
    )


def _variants(candidate: Algorithm, choices: Choices) -> Iterator[Algorithm]:
    """Yield the configurations that differ from ``candidate`` only in swizzle and split-k."""
    unsplit_variant = [(1, NO_REDUCTION)]
    for swizzle, (split, reduction) in product(
        choices.swizzles, [*unsplit_variant, *product(choices.splits, choices.reductions)]
    ):
        variant = replace(candidate, swizzle=swizzle, split_k=split, reduction=reduction)
        if variant != candidate:
            yield variant


class Capabilities:
    """Reads the capabilities of an algorithm from its initialized structure."""

    def __init__(self, lt: Any, address: int) -> None:
        self._lt = lt
        self._address = address
        self._written_bytes = AttributeBuffer(0, np.uint64)

    def number(self, name: str) -> int:
        """Return the value of an attribute, such as ``SPLITK_SUPPORT``."""
        buffer = AttributeBuffer(*self._attribute(name))
        self._get_attribute(buffer.attribute, buffer.address, buffer.size_bytes)
        return buffer.number

    def numbers(self, name: str) -> tuple[int, ...]:
        """Return the values of an array attribute, such as ``TILE_IDS``."""
        attribute, dtype = self._attribute(name)
        self._get_attribute(attribute, 0, 0)
        values = np.zeros(self._written_bytes.number // np.dtype(dtype).itemsize, dtype)
        if values.size:
            self._get_attribute(attribute, values.ctypes.data, values.nbytes)
        return tuple(values.tolist())

    def _attribute(self, name: str) -> tuple[int, type[np.generic]]:
        attribute = self._lt.MatmulAlgoCapAttribute[name]
        return attribute, self._lt.get_matmul_algo_cap_attribute_dtype(attribute)

    def _get_attribute(self, attribute: int, address: int, size_bytes: int) -> None:
        self._lt.matmul_algo_cap_get_attribute(
            self._address, attribute, address, size_bytes, self._written_bytes.address
        )


def choices(
    lt: Any,
    algorithm_id: int,
    algorithm_address: int,
    allowed_schemes: Sequence[int],
    capability: tuple[int, int],
) -> Choices:
    """Return the parameter values of an algorithm, with reduction schemes from ``allowed_schemes`` only."""
    capabilities = Capabilities(lt, algorithm_address)
    scheme_mask = capabilities.number("REDUCTION_SCHEME_MASK")
    max_custom = min(capabilities.number("CUSTOM_OPTION_MAX"), _MAX_CUSTOM_OPTIONS)
    return Choices(
        id=algorithm_id,
        tiles=capabilities.numbers("TILE_IDS") or (0,),
        stages=capabilities.numbers("STAGES_IDS") or (0,),
        customs=range(max(max_custom, 0) + 1),
        swizzles=(0, 1) if capabilities.number("CTA_SWIZZLING_SUPPORT") else (0,),
        splits=SPLIT_K_FACTORS if capabilities.number("SPLITK_SUPPORT") else (),
        reductions=tuple(scheme for scheme in allowed_schemes if scheme & scheme_mask),
        clusters=_sorted_values(lt.ClusterShape) if capability >= _CLUSTERS_SINCE else (0,),
        inners=_sorted_values(lt.MatmulInnerShape),
    )


def _sorted_values(shapes: Any) -> tuple[int, ...]:
    return tuple(sorted({int(shape) for shape in shapes}))
