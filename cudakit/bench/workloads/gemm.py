"""Benchmark of GEMMs: one matrix multiplication by one library."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial

from cudakit.arrays.fill import Fill
from cudakit.bench.case import Case
from cudakit.bench.l2_cache import l2_size_bytes, work_of_peak
from cudakit.bench.method import Method, Rule
from cudakit.bench.roofline import Work, matrix_kind
from cudakit.bench.spec import GemmSpec
from cudakit.bench.workload import Axis, Verification, worst_verification
from cudakit.bench.workloads.gemm_check import Checker
from cudakit.bench.workloads.gemm_operands import (
    OperandSet,
    OperandSets,
    fill_operands,
    make_operands,
    operand_bytes,
)
from cudakit.gpu.api import LEGACY, DeviceInfo, Gpu, Stream
from cudakit.gpu.api.facts import Field
from cudakit.gpu.api.gemm import (
    DATA_TYPES,
    MAX_SIMULATED_EDGE,
    Algorithm,
    Gemm,
    GemmPlan,
    GemmSettings,
    Library,
)
from cudakit.units import Unavailable

# The parameters of an algorithm besides its id, in the order of reports.
_ALGORITHM_PARAMETERS = (
    "tile",
    "stages",
    "split_k",
    "reduction",
    "swizzle",
    "custom",
    "inner",
    "cluster",
)

# Duration of a sample. In much shorter samples the device would idle, because launches by the host are slow.
_SAMPLE_S = 10e-3
# Minimum sampling time: a power limit needs this time to take effect.
_MIN_SAMPLING_S = 2.0
# Minimum duration of the energy measurement: five updates of an H200's counter, each read a few ms late.
_ENERGY_S = 0.5
_EDGE_STEP = 256  # A recommended GEMM shape is a multiple of this size.
_AXES = ("dtype", "m", "n", "k", "layout")


def gemm_cases(spec: GemmSpec, gpu: DeviceInfo) -> tuple[Case, ...]:
    """Return one case per GEMM of the Spec."""
    fields = gpu.facts().fields
    return tuple(_case(spec, gemm, fields, simulated=gpu.simulated) for gemm in spec.gemms)


def _case(spec: GemmSpec, gemm: Gemm, fields: Mapping[str, Field], *, simulated: bool) -> Case:
    kind = matrix_kind(gemm.dtype, fields)
    shape_settings = {"shape": spec.shapes[gemm]} if gemm in spec.shapes else {}
    default_workload = GemmWorkload(
        gemm, spec.settings, spec.library, spec.fill, spec.algorithms.get(gemm)
    )
    return Case(
        default_workload,
        _method(spec),
        work_of_peak(
            Work(gemm.operations, kind, gemm.bytes_moved),
            spec.cache,
            l2_bytes=l2_size_bytes(fields),
            footprint_bytes=operand_bytes(gemm),
        ),
        other_buffer_bytes=_needed_bytes(spec, gemm),
        describe_fitting=partial(_describe_fitting_gemm, spec, gemm, simulated),
        baselines=tuple(
            GemmWorkload(gemm, spec.settings, library, spec.fill) for library in spec.baselines
        ),
        operation="OP" if kind == "int8" else "FLOP",
        settings={**shape_settings, "library": spec.library},
    )


def _method(spec: GemmSpec) -> Method:
    method = spec.method(spec.mode, spec.cache, fill=spec.fill)
    if spec.rule.min_time_s == Rule().min_time_s:  # The user did not choose the time.
        min_s = max(spec.rule.min_time_s, min(_MIN_SAMPLING_S, spec.rule.timeout_s / 2))
        method = replace(method, rule=replace(spec.rule, min_time_s=min_s))
    energy_s = _ENERGY_S if spec.mode in ("batch", "graph") else 0.0
    return replace(method, sample_s=_SAMPLE_S, energy_s=energy_s)


def _needed_bytes(spec: GemmSpec, gemm: Gemm) -> int:
    """Return the device memory that the case needs: per library, one buffer set and one workspace."""
    library_count = 1 + len(spec.baselines)
    return library_count * (operand_bytes(gemm) + spec.settings.workspace_bytes)


def _describe_fitting_gemm(spec: GemmSpec, gemm: Gemm, simulated: bool, usable_bytes: int) -> str:
    """Describe the largest GEMM with m = n = k that fits in ``usable_bytes``, rounded down.

    A simulated device also limits the elements of the matrices.
    """
    fitting_edge, failing_edge = 0, max(gemm.m, gemm.n, gemm.k)
    while failing_edge - fitting_edge > 1:
        tested_edge = (fitting_edge + failing_edge) // 2
        is_fitting = (
            _needed_bytes(spec, replace(gemm, m=tested_edge, n=tested_edge, k=tested_edge))
            <= usable_bytes
        )
        fitting_edge, failing_edge = (
            (tested_edge, failing_edge) if is_fitting else (fitting_edge, tested_edge)
        )
    if simulated:
        fitting_edge = min(fitting_edge, math.isqrt(MAX_SIMULATED_EDGE**2 // gemm.batch))
    if not fitting_edge:
        return "a smaller --batch or --workspace"
    batch_text = f" with a batch of {gemm.batch}" if gemm.batch > 1 else ""
    return f"a shape of {fitting_edge // _EDGE_STEP * _EDGE_STEP or fitting_edge}{batch_text}"


@dataclass(frozen=True, slots=True)
class GemmWorkload:
    """A GEMM by one library, with the library's default algorithm or a given one.

    Two workloads with the same GEMM and seed have equal data in separate buffers.
    """

    gemm: Gemm
    settings: GemmSettings
    library: Library
    fill: str
    algorithm: Algorithm | None = None
    name: str = "gemm"

    @property
    def axes(self) -> Mapping[str, Axis]:
        return gemm_axes(self.gemm)

    def prepare(self, gpu: Gpu, seed: int) -> PreparedGemm:
        """Prepare the GEMM. Raises Unsupported, before any allocation, if the library does not support it."""
        return PreparedGemm(gpu, self, seed)


def gemm_axes(gemm: Gemm) -> dict[str, Axis]:
    """Return the axes of a GEMM, without optional axes that have their default value."""
    data_type = DATA_TYPES[gemm.dtype]
    axes: dict[str, Axis] = {name: getattr(gemm, name) for name in _AXES}
    default_values = {
        "batch": 1,
        "padding": 0,
        "epilogue": "none",
        "output": data_type.outputs[0].name,
        "accumulate": data_type.accumulators[0],
    }
    return axes | {
        name: getattr(gemm, name)
        for name, value in default_values.items()
        if getattr(gemm, name) != value
    }


class PreparedGemm:
    """A GEMM that is ready to run, its operands, and the check of its results."""

    def __init__(self, gpu: Gpu, workload: GemmWorkload, seed: int) -> None:
        self._gpu, self._workload, self._seed = gpu, workload, seed
        self._operands: list[OperandSets] = []
        self._sets: list[OperandSet] = []
        gemm, settings = workload.gemm, workload.settings
        self.footprint_bytes = operand_bytes(gemm)
        self.bytes_moved, self.operations = gemm.bytes_moved, gemm.operations
        with ExitStack() as cleanup:
            blas = cleanup.enter_context(closing(gpu.blas(workload.library)))
            self._plan = cleanup.enter_context(
                closing(blas.prepare(gemm, settings, workload.algorithm))
            )
            self._version = blas.version
            self._checker = cleanup.enter_context(
                closing(Checker(gpu, gemm, settings, fill=workload.fill, seed=seed))
            )
            self._cleanup = cleanup
            self.rotate(1)
            self._run_once()
            self._cleanup = cleanup.pop_all()

    @property
    def algorithm(self) -> Algorithm | Unavailable:
        """The algorithm that the library uses, or Unavailable if the library does not report it."""
        return self._plan.algorithm

    @property
    def settings(self) -> Mapping[str, Axis]:
        """Library, workspace and algorithm, which the result records."""
        reported_algorithm = self.algorithm
        algorithm = (
            reported_algorithm.reason
            if isinstance(reported_algorithm, Unavailable)
            else describe_algorithm(reported_algorithm)
        )
        return {
            "library": self._workload.library,
            "version": self._version,
            "workspace_bytes": self._workload.settings.workspace_bytes,
            "asked": describe_settings(self._workload.settings, self._workload.gemm.dtype),
            **self._plan.settings,
            "algorithm": algorithm,
            **(
                {"algorithm_source": "algorithm of --tuned"}
                if self._workload.algorithm is not None
                else {}
            ),
        }

    def rotate(self, set_count: int) -> None:
        gpu, workload, missing_sets = self._gpu, self._workload, set_count - len(self._sets)
        if missing_sets <= 0:
            return
        operands = make_operands(gpu, workload.gemm, missing_sets, self._cleanup)
        with closing(Fill(gpu)) as fill:
            fill_operands(
                fill, operands, workload.fill, seed=self._seed, set_index=len(self._operands)
            )
            self._checker.poison(operands)
            gpu.sync()
        self._operands.append(operands)
        self._sets.extend(operands[set_index] for set_index in range(len(operands)))

    def enqueue(self, stream: Stream, set_index: int) -> None:
        self.enqueue_by(self._plan, stream, set_index)

    def enqueue_by(self, plan: GemmPlan, stream: Stream, index: int) -> None:
        """Enqueue a plan of the same GEMM, for example with another algorithm, on a buffer set."""
        plan.enqueue(self._sets[index % len(self._sets)], stream)

    def verify(self) -> Verification:
        verification = worst_verification(map(self._checker.check, self._operands))
        for operands in self._operands:
            self._checker.poison(operands)
        self._gpu.sync()
        return verification

    def close(self) -> None:
        self._cleanup.close()

    def _run_once(self) -> None:
        """Execute the GEMM once: only then some libraries load the kernels, or report an unsupported GEMM."""
        self.enqueue(LEGACY, 0)
        self._gpu.sync()
        self._checker.poison(self._operands[0])
        self._gpu.sync()


def describe_settings(settings: GemmSettings, dtype: str) -> str:
    """Describe the settings that differ from their default and have an effect on a GEMM of ``dtype``."""
    changed_settings = {
        "deterministic": settings.deterministic,
        "no reduced precision": not settings.reduced_precision,
        "fast accumulation": settings.fast_accumulate and dtype.startswith("fp8"),
    }
    return ", ".join(text for text, is_set in changed_settings.items() if is_set)


def describe_algorithm(algorithm: Algorithm) -> str:
    """Describe an algorithm by its parameters that are not 0: ``id 66, tile 20, stages 35``."""
    parameters = ((name, getattr(algorithm, name)) for name in _ALGORITHM_PARAMETERS)
    parameter_texts = (f"{name.replace('_', '-')} {value}" for name, value in parameters if value)
    return ", ".join((f"id {algorithm.id}", *parameter_texts))
