"""Benchmark of GEMMs: one matrix multiplication by one library."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, fields, replace
from itertools import chain, product
from pathlib import Path
from typing import Any, ClassVar

from cudakit.arrays.fill import Fill
from cudakit.bench.case import (
    Cache,
    Case,
    Method,
    Mode,
    Rule,
    Verification,
    worst_verification,
)
from cudakit.bench.gemm_check import (
    Checker,
    OperandSet,
    OperandSets,
    fill_operands,
    make_operands,
    operand_bytes,
)
from cudakit.bench.labels import Axis
from cudakit.bench.roofline import Work, matrix_kind
from cudakit.bench.spec import (
    Option,
    Spec,
    cache_option,
    check_method,
    check_names,
    check_range,
    mode_option,
    option,
    options_of,
)
from cudakit.bench.timer import l2_size_bytes, work_of_peak
from cudakit.errors import InputError, UsageError
from cudakit.gpu.api import LEGACY, DeviceInfo, Gpu, Stream
from cudakit.gpu.api.facts import Field
from cudakit.gpu.api.gemm import (
    DATA_TYPES,
    EPILOGUES,
    LAYOUTS,
    LIBRARIES,
    MAX_SIMULATED_EDGE,
    Algorithm,
    Gemm,
    GemmPlan,
    GemmSettings,
    Library,
)
from cudakit.input_files import ExpectedFile, read_text, wrong_file_error
from cudakit.units import Unavailable

# Kinds of matrix data; "int" stands for small integers, whose sums are exact.
FILLS = ("uniform", "normal", "int", "zeros", "ones")
_TYPES = (*DATA_TYPES, "all")
PRESETS = ("cubes", "llm", "llama3-8b", "llama3-70b", "llama3-405b", "gpt3-175b")
_MAX_GEMMS = 10_000  # More GEMMs would take a day.
# Duration of a sample. In much shorter samples the device would idle, because launches by the host are slow.
_SAMPLE_S = 10e-3
# Minimum sampling time: a power limit needs this time to take effect.
_MIN_SAMPLING_S = 2.0
# Minimum duration of the energy measurement: five updates of an H200's counter, each read a few ms late.
_ENERGY_S = 0.5
_EDGE_STEP = 256  # A recommended GEMM shape is a multiple of this size.
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
        return options_of(_GemmOptions)

    @classmethod
    def from_options(cls, options: Mapping[str, Any], *, simulated: bool) -> GemmSpec:
        names = {field.name for field in fields(_GemmOptions)}
        passed = _GemmOptions(**{name: options[name] for name in names & options.keys()})
        gemms, settings = passed.gemms(simulated=simulated), passed.settings()
        if settings.fast_accumulate and not any(gemm.dtype.startswith("fp8") for gemm in gemms):
            raise UsageError(
                "--fast-accumulate needs a data type of fp8",
                hint="see cudakit bench gemm --help",
            )
        own = {field.name for field in fields(cls)}
        return cls.with_rule(
            # Simulated memory has no cache, and filling many buffer sets on the CPU would be slow.
            ({"cache": "hot"} if simulated else {})
            | {name: options[name] for name in options if name in own or name not in names}
            | {
                "gemms": tuple(gemms),
                "shapes": {gemm: shape for gemm, shape in gemms.items() if shape},
                "settings": settings,
                "baselines": tuple(dict.fromkeys(chain.from_iterable(passed.baselines))),
            }
        )

    def cases(self, gpu: DeviceInfo) -> tuple[Case, ...]:
        """Return one case per GEMM."""
        facts, method = gpu.facts().fields, self._method()
        return tuple(self._case(gemm, method, facts, gpu.simulated) for gemm in self.gemms)

    def _method(self) -> Method:
        method = self.method(self.mode, self.cache, fill=self.fill)
        rule = self.rule
        if rule.min_time_s == Rule().min_time_s:  # The user did not choose the time.
            min_s = max(rule.min_time_s, min(_MIN_SAMPLING_S, rule.timeout_s / 2))
            rule = replace(rule, min_time_s=min_s)
        energy_s = _ENERGY_S if self.mode in ("batch", "graph") else 0.0
        return replace(method, rule=rule, sample_s=_SAMPLE_S, energy_s=energy_s)

    def _case(
        self, gemm: Gemm, method: Method, facts: Mapping[str, Field], simulated: bool
    ) -> Case:
        kind = matrix_kind(gemm.dtype, facts)
        work = work_of_peak(
            Work(gemm.operations, kind, gemm.bytes_moved),
            self.cache,
            l2_bytes=l2_size_bytes(facts),
            footprint_bytes=operand_bytes(gemm),
        )
        settings, fill = self.settings, self.fill
        shape = {"shape": self.shapes[gemm]} if gemm in self.shapes else {}
        return Case(
            GemmWorkload(gemm, settings, self.library, fill, self.algorithms.get(gemm)),
            method,
            work,
            other_buffer_bytes=self._needed_bytes(gemm),
            describe_fitting=lambda usable_bytes: self._describe_fitting(
                gemm, usable_bytes, simulated=simulated
            ),
            baselines=tuple(GemmWorkload(gemm, settings, it, fill) for it in self.baselines),
            operation="OP" if kind == "int8" else "FLOP",
            settings={**shape, "library": self.library},
        )

    def _needed_bytes(self, gemm: Gemm) -> int:
        """Return the device memory that the case needs: per library, one buffer set and one workspace."""
        library_count = 1 + len(self.baselines)
        return library_count * (operand_bytes(gemm) + self.settings.workspace_bytes)

    def _describe_fitting(self, gemm: Gemm, usable_bytes: int, *, simulated: bool) -> str:
        """Describe the largest GEMM with m = n = k that fits in ``usable_bytes``, rounded down.

        A simulated device also limits the elements of the matrices.
        """
        fitting, failing = 0, max(gemm.m, gemm.n, gemm.k)
        while failing - fitting > 1:
            edge = (fitting + failing) // 2
            if self._needed_bytes(replace(gemm, m=edge, n=edge, k=edge)) <= usable_bytes:
                fitting = edge
            else:
                failing = edge
        if simulated:
            fitting = min(fitting, math.isqrt(MAX_SIMULATED_EDGE**2 // gemm.batch))
        if not fitting:
            return "a smaller --batch or --workspace"
        batch_text = f" with a batch of {gemm.batch}" if gemm.batch > 1 else ""
        return f"a shape of {fitting // _EDGE_STEP * _EDGE_STEP or fitting}{batch_text}"


def _of_gemm(name: str, text: str, **attributes: Any) -> Any:
    return option(name, text, group="GEMM", **attributes)


def _of_library(name: str, text: str, **attributes: Any) -> Any:
    return option(name, text, group="Library", **attributes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _GemmOptions:
    """The options of the command as the user passed them; None or () for others."""

    sides: tuple[str, ...] = ()  # The arguments SHAPE.
    files: tuple[str, ...] = _of_gemm(
        "--shapes",
        "Read shapes from FILE, one per line: m n k, and optionally a batch count; or CSV with a header. "
        "Repeatable.",
        default=(),
        kind="file",
        is_repeatable=True,
    )
    presets: tuple[str, ...] = _of_gemm(
        "--preset",
        "Shapes: cubes (M = N = K, 512 to 16384); the layers of llama3-8b, llama3-70b, llama3-405b or "
        "gpt3-175b for 16 and 4096 tokens; llm (both llama3-8b and llama3-70b). Repeatable.",
        default=(),
        kind="name",
        choices=PRESETS,
        is_repeatable=True,
    )
    dtypes: tuple[str, ...] = _of_gemm(
        "--dtype",
        "Data types: fp64, fp32, tf32, fp16, bf16, fp8_e4m3, fp8_e5m2, int8 or all.  [default: bf16]",
        default=("bf16",),
        choices=_TYPES,
    )
    layouts: tuple[str | None, ...] = _of_gemm(
        "--layout",
        "Whether A and B are transposed in memory: nn, nt, tn or tt (n: no, t: transposed).  "
        "[default: tn]",
        default=(None,),
        choices=LAYOUTS,
    )
    epilogues: tuple[str | None, ...] = _of_gemm(
        "--epilogue",
        "Fused epilogue: none, bias, relu, gelu, relu-bias or gelu-bias.  [default: none]",
        default=(None,),
        choices=EPILOGUES,
    )
    output_type: str | None = _of_gemm(
        "--output-type",
        "Data type of the output matrix.  [default: depends on --dtype]",
        kind="name",
        choices=_TYPES,
    )
    accumulate: str | None = _of_gemm(
        "--accumulate",
        "Data type of the accumulator.  [default: depends on --dtype]",
        kind="name",
        choices=_TYPES,
    )
    batch: int = _of_gemm(
        "--batch",
        "Batch count of a strided-batched GEMM.  [default: 1]",
        default=1,
        kind="int",
    )
    padding: int | None = _of_gemm(
        "--padding",
        "Padding elements between the columns of every matrix.  [default: 0]",
        kind="int",
    )
    library: Library | None = option(
        "--library",
        "Library to measure: cublaslt or cublas.  [default: cublaslt]",
        group="Library",
        kind="choice",
        metavar="NAME",
        choices=("cublaslt", "cublas"),
    )
    baselines: tuple[tuple[Library, ...], ...] = _of_library(
        "--vs",
        "Baselines: torch, cupy, cublas or cublaslt. Samples of all libraries are interleaved. Repeatable.",
        default=(),
        choices=LIBRARIES,
        is_repeatable=True,
    )
    workspace_bytes: int | None = _of_library(
        "--workspace",
        "Maximum workspace of an algorithm.  [default: 32MiB]",
        kind="bytes",
    )
    deterministic: bool = _of_library(
        "--deterministic",
        "Use only algorithms with bitwise reproducible results.",
        default=False,
        kind="flag",
    )
    no_reduced_precision: bool = _of_library(
        "--no-reduced-precision",
        "Forbid split-k reductions in fp16 or bf16.",
        default=False,
        kind="flag",
    )
    fast_accumulate: bool = _of_library(
        "--fast-accumulate", "Use fp8 fast accumulation.", default=False, kind="flag"
    )
    fill: str | None = option(
        "--fill",
        "Values of the operands: uniform in (-1, 1), normal, int (small integers), zeros or ones. Zeros "
        "and ones draw less power than real data and run faster.  [default: uniform]",
        kind="choice",
        metavar="DATA",
        choices=FILLS,
        group="Method",
    )
    mode: Mode | None = mode_option("batch", group="Method")
    cache: Cache | None = cache_option("rotate; with --gpu sim hot", group="Method")

    def gemms(self, *, simulated: bool) -> dict[Gemm, str]:
        """Return a GEMM per combination of shape, data type, layout and epilogue, with the name of its shape.

        Raises InputError for invalid values, and UsageError for too many GEMMs.
        """
        shapes = (
            *map(parse_shape, self.sides),
            *(shape for path in self.files for shape in read_shapes(Path(path))),
            *(shape for name in self.presets for shape in preset(name)),
        ) or default_shapes(simulated=simulated)
        dtypes = tuple(DATA_TYPES) if self.dtypes == ("all",) else self.dtypes
        combinations = tuple(product(dtypes, self.layouts, self.epilogues))
        gemm_count = len(shapes) * len(combinations)
        if gemm_count > _MAX_GEMMS:
            raise UsageError(
                f"{gemm_count:,} cases are too many: at most {_MAX_GEMMS:,} can be measured in one run",
                hint="use fewer shapes, data types, layouts or epilogues",
            )
        names: dict[Gemm, str] = {}
        for dtype, layout, epilogue in combinations:
            types: dict[str, Any] = {
                "layout": layout,
                "epilogue": epilogue,
                "padding": self.padding,
                "output": self.output_type,
                "accumulate": self.accumulate,
            }
            types = {name: value for name, value in types.items() if value is not None}
            for shape in shapes:
                batch = self.batch if shape.batch is None else shape.batch
                gemm = Gemm(dtype=dtype, m=shape.m, n=shape.n, k=shape.k, batch=batch, **types)
                names.setdefault(gemm, shape.name)
        return names

    def settings(self) -> GemmSettings:
        """Return the settings of the library."""
        settings = GemmSettings(
            deterministic=self.deterministic,
            reduced_precision=not self.no_reduced_precision,
            fast_accumulate=self.fast_accumulate,
        )
        if self.workspace_bytes is None:
            return settings
        return replace(settings, workspace_bytes=self.workspace_bytes)


# --- shapes from text, files and presets --------------------------------------------------------------

_HINT = "write 4096, or MxNxK such as 4096x1024x8192"
_SHAPES_FILE = ExpectedFile("a file of shapes", "write one shape per line: m n k")
# Matches a size with up to 18 digits; no size with more digits fits in memory.
_INTEGER = re.compile(r"[0-9]{1,18}")
_SEPARATOR = re.compile("[,;]")
_MAX_QUOTED = 60  # Maximum number of characters of a line that an error message quotes.
_COLUMNS = ("m", "n", "k", "batch")
_REQUIRED_COLUMNS = _COLUMNS[:3]

_CUBE_EDGES = tuple(512 << i for i in range(6))  # Values of m = n = k of the preset "cubes".
# Default values of m = n = k. Simulated devices compute on the CPU, so their default is smaller.
_DEFAULT_EDGES = (1024, 4096, 8192)
_DEFAULT_SIMULATED_EDGES = (256, 384, 512)
# Numbers of tokens: 16 sequences that are decoded together, and a prompt of 4096 tokens.
_TOKEN_COUNTS = (16, 4096)


@dataclass(frozen=True, slots=True)
class Shape:
    """The dimensions of a GEMM; ``batch`` is None if not given, ``name`` is the layer of a preset."""

    m: int
    n: int
    k: int
    batch: int | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class _Model:
    """The sizes that determine the weight matrices of a transformer block."""

    hidden_size: int
    intermediate_size: int  # Width of the multilayer perceptron.
    head_count: int  # Number of attention heads.
    key_head_count: int  # Number of key-value heads.
    is_gated: bool = True  # Whether the perceptron has a gate matrix.

    def layers(self) -> Mapping[str, tuple[int, int]]:
        """Return the number of output and input features of each matrix."""
        head_size = self.hidden_size // self.head_count
        up_name = "gate and up" if self.is_gated else "up"
        return {
            "qkv": ((self.head_count + 2 * self.key_head_count) * head_size, self.hidden_size),
            "attention output": (self.hidden_size, self.hidden_size),
            up_name: (self.intermediate_size * (2 if self.is_gated else 1), self.hidden_size),
            "down": (self.hidden_size, self.intermediate_size),
        }


# "The Llama 3 Herd of Models", arXiv 2407.21783, table 3; "Language Models are Few-Shot Learners",
# arXiv 2005.14165, table 2.1, where the perceptron is four times as wide as the model.
_MODELS: Mapping[str, _Model] = {
    "llama3-8b": _Model(4096, 14336, 32, 8),
    "llama3-70b": _Model(8192, 28672, 64, 8),
    "llama3-405b": _Model(16384, 53248, 128, 8),
    "gpt3-175b": _Model(12288, 4 * 12288, 96, 96, is_gated=False),
}
_LLM_MODELS = ("llama3-8b", "llama3-70b")


def parse_shape(text: str) -> Shape:
    """Parse ``4096``, for m = n = k, or ``4096x1024x8192``, m by n by k. Raises InputError for other text."""
    size_texts = text.strip().lower().split("x")
    if len(size_texts) not in (1, 3) or not all(map(_INTEGER.fullmatch, size_texts)):
        raise InputError(f"{_quote(text)} is not a shape", hint=_HINT)
    return _shape([int(size) for size in (size_texts * 3)[:3]], f"the shape {_quote(text)}")


def preset(name: str) -> tuple[Shape, ...]:
    """Return the shapes of a preset: for a model, the GEMMs of its layers with 16 and 4096 tokens.

    m is the number of output features, n of tokens and k of input features. With layout tn, weights are
    stored as in frameworks. Raises InputError for an unknown name.
    """
    if name == "cubes":
        return tuple(Shape(edge, edge, edge) for edge in _CUBE_EDGES)
    if name == "llm":
        return tuple(shape for model in _LLM_MODELS for shape in _layers(model))
    if name not in _MODELS:
        raise InputError(f"unknown preset {name!r}", hint=f"choose from {', '.join(PRESETS)}")
    return tuple(_layers(name))


def _layers(model: str) -> Iterator[Shape]:
    for token_count in _TOKEN_COUNTS:
        for layer, (outputs, inputs) in _MODELS[model].layers().items():
            name = f"{model} {layer}, {token_count} tokens"
            yield Shape(outputs, token_count, inputs, name=name)


def default_shapes(*, simulated: bool) -> tuple[Shape, ...]:
    """Return the shapes that are measured if the user names none."""
    edges = _DEFAULT_SIMULATED_EDGES if simulated else _DEFAULT_EDGES
    return tuple(Shape(edge, edge, edge) for edge in edges)


def read_shapes(path: Path) -> tuple[Shape, ...]:
    """Read a file with one shape per line: ``m n k`` or ``m,n,k``, with an optional batch.

    The first line may name the columns. Text after ``#`` is a comment. Raises InputError for a file that
    cannot be read, or for an invalid line, whose number the error contains.
    """
    text = read_text(path, _SHAPES_FILE)
    if text.lstrip().startswith(("{", "[")):
        raise wrong_file_error(path, text.encode(), _SHAPES_FILE, reason="it is JSON")
    columns: Sequence[str] = _COLUMNS
    shapes: list[Shape] = []
    is_first = True
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        words = re.split(r"\s*[,;]\s*" if _SEPARATOR.search(line) else r"\s+", line)
        position = f"{path}:{number}: {_quote(line)}"
        if is_first and not any(map(_INTEGER.fullmatch, words)):
            columns = tuple(word.lower() for word in words)
            if missing := [name for name in _REQUIRED_COLUMNS if columns.count(name) != 1]:
                raise InputError(
                    f"{position} is not a shape, and as a header it lacks {', '.join(missing)}",
                    hint="write a shape as m n k, or a header such as m,n,k,batch",
                )
        else:
            shapes.append(_read_row(position, words, columns))
        is_first = False
    if not shapes:
        raise InputError(f"{path} contains no shapes", hint=_SHAPES_FILE.hint)
    return tuple(shapes)


def _read_row(position: str, words: Sequence[str], columns: Sequence[str]) -> Shape:
    row = dict(zip(columns, words, strict=False))
    is_complete = len(words) == len(columns) or (
        columns is _COLUMNS and len(words) == len(_REQUIRED_COLUMNS)
    )
    sizes = [row[name] for name in _COLUMNS if name in row]
    if not is_complete or not all(map(_INTEGER.fullmatch, sizes)):
        raise InputError(f"{position} is not a shape", hint="write m n k, or m n k batch")
    return _shape([int(size) for size in sizes], position)


def _quote(text: str) -> str:
    return repr(text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}...")


def _shape(sizes: Sequence[int], description: str) -> Shape:
    if min(sizes) < 1:
        raise InputError(f"{description} has a dimension of 0", hint="use dimensions of at least 1")
    m, n, k, *batch = sizes
    return Shape(m, n, k, batch[0] if batch else None)


# --- the workload -------------------------------------------------------------------------------------


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
    axes: dict[str, Axis] = {it: getattr(gemm, it) for it in ("dtype", "m", "n", "k", "layout")}
    defaults = {
        "batch": 1,
        "padding": 0,
        "epilogue": "none",
        "output": data_type.outputs[0].name,
        "accumulate": data_type.accumulators[0],
    }
    values = {name: getattr(gemm, name) for name in defaults}
    return axes | {name: value for name, value in values.items() if value != defaults[name]}


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
            # Only after an execution some libraries have loaded the kernels, or report an unsupported GEMM.
            self.enqueue(LEGACY, 0)
            gpu.sync()
            self._checker.poison(self._operands[0])
            gpu.sync()
            self._cleanup = cleanup.pop_all()

    @property
    def algorithm(self) -> Algorithm | Unavailable:
        """The algorithm that the library uses, or Unavailable if the library does not report it."""
        return self._plan.algorithm

    @property
    def settings(self) -> Mapping[str, Axis]:
        """Library, workspace and algorithm, which the result records."""
        workload, algorithm = self._workload, self.algorithm
        text = (
            algorithm.reason
            if isinstance(algorithm, Unavailable)
            else describe_algorithm(algorithm)
        )
        is_tuned = workload.algorithm is not None
        return {
            "library": workload.library,
            "version": self._version,
            "workspace_bytes": workload.settings.workspace_bytes,
            "asked": describe_settings(workload.settings, workload.gemm.dtype),
            **self._plan.settings,
            "algorithm": text,
            **({"algorithm_source": "algorithm of --tuned"} if is_tuned else {}),
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


def describe_settings(settings: GemmSettings, dtype: str) -> str:
    """Describe the settings that differ from their default and have an effect on a GEMM of ``dtype``."""
    changed = {
        "deterministic": settings.deterministic,
        "no reduced precision": not settings.reduced_precision,
        "fast accumulation": settings.fast_accumulate and dtype.startswith("fp8"),
    }
    return ", ".join(text for text, is_set in changed.items() if is_set)


def describe_algorithm(algorithm: Algorithm) -> str:
    """Describe an algorithm by its parameters that are not 0: ``id 66, tile 20, stages 35``."""
    values = {name: getattr(algorithm, name) for name in _ALGORITHM_PARAMETERS}
    texts = (f"{name.replace('_', '-')} {value}" for name, value in values.items() if value)
    return ", ".join((f"id {algorithm.id}", *texts))
