"""GEMM: one matrix multiplication by a library."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial

from cudakit.core.bench.case import Case
from cudakit.core.bench.method import Method, Rule
from cudakit.core.bench.roofline import Work, matrix_kind
from cudakit.core.bench.spec import GemmSpec
from cudakit.core.bench.workload import Axis, Verification, worst
from cudakit.core.bench.workloads.gemm_check import Checker
from cudakit.core.bench.workloads.gemm_operands import (
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
    Algorithm,
    Gemm,
    GemmPlan,
    GemmSettings,
    Library,
)
from cudakit.kernels.fill import Fill
from cudakit.units import Unavailable

# The parameters of an algorithm besides its id, in the order of reports.
_NUMBERS = ("tile", "stages", "split_k", "reduction", "swizzle", "custom", "inner", "cluster")

# In much shorter samples the device would idle, because launches by the host are slow.
_SAMPLE_S = 10e-3
# A power limit needs this time to take effect.
_MIN_S = 2.0
# Five updates of the energy counter of an H200, each of which is read a few milliseconds late.
_ENERGY_S = 0.5
_EDGE = 256
_AXES = ("dtype", "m", "n", "k", "layout")


def gemm_cases(spec: GemmSpec, gpu: DeviceInfo) -> tuple[Case, ...]:
    """Return a case per GEMM."""
    fields = gpu.facts().fields
    return tuple(_case(spec, gemm, fields) for gemm in spec.gemms)


def _case(spec: GemmSpec, gemm: Gemm, fields: Mapping[str, Field]) -> Case:
    kind = matrix_kind(gemm.dtype, fields)
    shape = {"shape": spec.shapes[gemm]} if gemm in spec.shapes else {}
    default = GemmWorkload(gemm, spec.settings, spec.library, spec.fill, spec.algorithms.get(gemm))
    return Case(
        default,
        _method(spec),
        Work(gemm.operations, kind, gemm.bytes_moved),
        more_bytes=_needed_bytes(spec, gemm),
        fitting=partial(_fitting, spec, gemm),
        baselines=tuple(
            GemmWorkload(gemm, spec.settings, library, spec.fill) for library in spec.baselines
        ),
        operation="OP" if kind == "int8" else "FLOP",
        settings={**shape, "library": spec.library},
    )


def _method(spec: GemmSpec) -> Method:
    method = spec.method(spec.mode, spec.cache, fill=spec.fill)
    if spec.rule.min_time_s == Rule().min_time_s:  # the default
        min_s = max(spec.rule.min_time_s, min(_MIN_S, spec.rule.timeout_s / 2))
        method = replace(method, rule=replace(spec.rule, min_time_s=min_s))
    energy_s = _ENERGY_S if spec.mode in ("batch", "graph") else 0.0
    return replace(method, sample_s=_SAMPLE_S, energy_s=energy_s)


def _needed_bytes(spec: GemmSpec, gemm: Gemm) -> int:
    """Return the bytes of one buffer set and one workspace per library."""
    libraries = 1 + len(spec.baselines)
    return libraries * (operand_bytes(gemm) + spec.settings.workspace_bytes)


def _fitting(spec: GemmSpec, gemm: Gemm, usable_bytes: int) -> str:
    """Describe the largest square GEMM that fits, rounded down."""
    low, high = 0, max(gemm.m, gemm.n, gemm.k)
    while high - low > 1:
        edge = (low + high) // 2
        fits = _needed_bytes(spec, replace(gemm, m=edge, n=edge, k=edge)) <= usable_bytes
        low, high = (edge, high) if fits else (low, edge)
    if not low:
        return "a smaller --batch or --workspace"
    batch = f" with a batch of {gemm.batch}" if gemm.batch > 1 else ""
    return f"a shape of {low // _EDGE * _EDGE or low}{batch}"


@dataclass(frozen=True, slots=True)
class GemmWorkload:
    """A GEMM by one library, with its default or a given algorithm.

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
        """Raise Unsupported, before any allocation, for a GEMM that the library does not support."""
        return PreparedGemm(gpu, self, seed)


def gemm_axes(gemm: Gemm) -> dict[str, Axis]:
    """Return the axes of a GEMM, without those that have their default value."""
    kind = DATA_TYPES[gemm.dtype]
    axes: dict[str, Axis] = {name: getattr(gemm, name) for name in _AXES}
    usual = {
        "batch": 1,
        "padding": 0,
        "epilogue": "none",
        "output": kind.outputs[0].name,
        "accumulate": kind.accumulators[0],
    }
    return axes | {
        name: getattr(gemm, name) for name, value in usual.items() if getattr(gemm, name) != value
    }


class PreparedGemm:
    """A GEMM that is ready to run, its operands, and the check of its results."""

    def __init__(self, gpu: Gpu, workload: GemmWorkload, seed: int) -> None:
        self._gpu, self._workload, self._seed = gpu, workload, seed
        self._made: list[OperandSets] = []
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
        """The algorithm, if the library reports it."""
        return self._plan.algorithm

    @property
    def settings(self) -> Mapping[str, Axis]:
        """Library, workspace and algorithm, which the result records."""
        chosen = self.algorithm
        algorithm = chosen.reason if isinstance(chosen, Unavailable) else describe_algorithm(chosen)
        return {
            "library": self._workload.library,
            "version": self._version,
            "workspace_bytes": self._workload.settings.workspace_bytes,
            "asked": describe_settings(self._workload.settings),
            **self._plan.settings,
            "algorithm": algorithm,
        }

    def rotate(self, sets: int) -> None:
        gpu, workload, missing = self._gpu, self._workload, sets - len(self._sets)
        if missing <= 0:
            return
        operands = make_operands(gpu, workload.gemm, missing, self._cleanup)
        with closing(Fill(gpu)) as fill:
            fill_operands(fill, operands, workload.fill, seed=self._seed, number=len(self._made))
            self._checker.poison(operands)
            gpu.sync()
        self._made.append(operands)
        self._sets.extend(operands[number] for number in range(len(operands)))

    def enqueue(self, stream: Stream, index: int) -> None:
        self.enqueue_by(self._plan, stream, index)

    def enqueue_by(self, plan: GemmPlan, stream: Stream, index: int) -> None:
        """Enqueue another plan of the same GEMM on a buffer set."""
        plan.enqueue(self._sets[index % len(self._sets)], stream)

    def verify(self) -> Verification:
        verification = worst(map(self._checker.check, self._made))
        for made in self._made:
            self._checker.poison(made)
        self._gpu.sync()
        return verification

    def close(self) -> None:
        self._cleanup.close()

    def _run_once(self) -> None:
        """Compute once: some libraries only then report that a GEMM is unsupported, or load its kernels."""
        self.enqueue(LEGACY, 0)
        self._gpu.sync()
        self._checker.poison(self._made[0])
        self._gpu.sync()


def describe_settings(settings: GemmSettings) -> str:
    """Describe the settings that differ from their default."""
    changed = {
        "deterministic": settings.deterministic,
        "no reduced precision": not settings.reduced_precision,
        "fast accumulation": settings.fast_accumulate,
    }
    return ", ".join(text for text, is_set in changed.items() if is_set)


def describe_algorithm(algorithm: Algorithm) -> str:
    """Describe an algorithm by its parameters that are not 0: ``id 66, tile 20, stages 35``."""
    numbers = ((name, getattr(algorithm, name)) for name in _NUMBERS)
    words = (f"{name.replace('_', '-')} {value}" for name, value in numbers if value)
    return ", ".join((f"id {algorithm.id}", *words))
