"""Benchmark of GEMMs: one matrix multiplication by one library."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import chain
from typing import Any, ClassVar

from cudakit.arrays.fill import Fill
from cudakit.bench.case import Cache, Case, Method, Mode, Rule, Verification, worst_verification
from cudakit.bench.gemm_check import (
    Checker,
    OperandSet,
    OperandSets,
    fill_operands,
    make_operands,
    operand_bytes,
)
from cudakit.bench.gemm_shapes import FILLS, GemmOptions
from cudakit.bench.labels import Axis
from cudakit.bench.roofline import Work, matrix_kind
from cudakit.bench.spec import Option, Spec, check_method, check_names, check_range, options_of
from cudakit.bench.timer import l2_size_bytes, work_of_peak
from cudakit.errors import InputError, UsageError
from cudakit.gpu.api import LEGACY, DeviceInfo, Gpu, Stream
from cudakit.gpu.api.facts import Field
from cudakit.gpu.api.gemm import (
    DATA_TYPES,
    LIBRARIES,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmSpec(Spec):
    """Measure GEMMs of a library against the theoretical peak of the GPU.

    A SHAPE is MxNxK, such as 4096x1024x8192, or one number for M = N = K. The default is 1024, 4096 and 8192.
    With --gpu sim, the default is 256, 384 and 512, and the largest shape about 2048. Matrices are
    column-major, as in BLAS. Results are verified in float64; no time is reported for wrong results and
    unsupported cases.

    \b
    cudakit bench gemm
    cudakit bench gemm 8192 --dtype bf16,fp8_e4m3 --vs torch -o gemm.html
    cudakit bench gemm --preset llama3-70b --epilogue bias
    cudakit bench gemm --shapes shapes.csv --layout tn,nn --json
    cudakit bench gemm --preset llama3-8b --tune -o tuned.json
    """

    bench: ClassVar[str] = "gemm"

    # When GEMMs start on an idle device, clocks take longer to settle than with other work.
    warmup_s: float = 1.0
    gemms: tuple[Gemm, ...]
    settings: GemmSettings = field(default_factory=GemmSettings)
    # ``library`` is measured; samples of ``baselines`` are interleaved with its samples, on equal data.
    # A GEMM that a library lacks has a result without a time. If no GEMM is supported, the run fails.
    library: Library = "cublaslt"
    baselines: tuple[Library, ...] = ()
    fill: str = "uniform"
    mode: Mode = "batch"
    cache: Cache = "rotate"
    # Algorithms to use instead of the library's default algorithms.
    algorithms: Mapping[Gemm, Algorithm] = field(default_factory=dict)
    # Names of GEMMs for the report: "llama3-8b qkv".
    shapes: Mapping[Gemm, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        Spec.__post_init__(self)
        if not self.gemms:
            raise InputError("no shape was given", hint="for example: cudakit bench gemm 4096")
        libraries = (self.library, *self.baselines)
        check_names("library", libraries, LIBRARIES)
        if repeated_names := [name for name in self.baselines if libraries.count(name) > 1]:
            raise InputError(f"{repeated_names[0]} cannot be compared with itself")
        check_names("fill", (self.fill,), FILLS)
        check_range("--workspace", self.settings.workspace_bytes, 0, math.inf)
        check_method(self.mode, self.cache)
        if self.algorithms and self.library != "cublaslt":
            raise InputError(
                f"tuned algorithms are of cublaslt and cannot be used with --library {self.library}",
                hint="remove --library",
            )

    @classmethod
    def options(cls) -> Iterator[tuple[str, Option]]:
        return options_of(GemmOptions)

    @classmethod
    def from_options(cls, options: Mapping[str, Any], *, simulated: bool) -> GemmSpec:
        names = {field.name for field in fields(GemmOptions)}
        request = GemmOptions(**{name: options[name] for name in names & options.keys()})
        gemms, settings = request.gemms(simulated=simulated), request.settings()
        if settings.fast_accumulate and not any(gemm.dtype.startswith("fp8") for gemm in gemms):
            raise UsageError(
                "--fast-accumulate needs a data type of fp8",
                hint="see cudakit bench gemm --help",
            )
        # Simulated memory has no cache, and filling many buffer sets on the CPU would be slow.
        spec_options: dict[str, Any] = {"cache": "hot"} if simulated else {}
        spec_names = {field.name for field in fields(cls)}
        return cls.with_rule(
            spec_options
            | {name: options[name] for name in options if name in spec_names or name not in names}
            | {
                "gemms": tuple(gemms),
                "shapes": {gemm: shape for gemm, shape in gemms.items() if shape},
                "settings": settings,
                "baselines": tuple(dict.fromkeys(chain.from_iterable(request.baselines))),
            }
        )

    def cases(self, gpu: DeviceInfo) -> tuple[Case, ...]:
        """Return one case per GEMM."""
        facts = gpu.facts().fields
        return tuple(_case(self, gemm, facts, simulated=gpu.simulated) for gemm in self.gemms)


def _case(spec: GemmSpec, gemm: Gemm, fields: Mapping[str, Field], *, simulated: bool) -> Case:
    kind = matrix_kind(gemm.dtype, fields)
    shape_settings = {"shape": spec.shapes[gemm]} if gemm in spec.shapes else {}
    work = work_of_peak(
        Work(gemm.operations, kind, gemm.bytes_moved),
        spec.cache,
        l2_bytes=l2_size_bytes(fields),
        footprint_bytes=operand_bytes(gemm),
    )
    return Case(
        GemmWorkload(gemm, spec.settings, spec.library, spec.fill, spec.algorithms.get(gemm)),
        _method(spec),
        work,
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
