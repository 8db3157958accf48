"""The options of ``cudakit bench gemm``: shapes from text, files and presets, and their GEMMs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cudakit.bench.case import Cache, Mode
from cudakit.bench.spec import cache_option, mode_option, option
from cudakit.errors import InputError, UsageError
from cudakit.gpu.api.gemm import (
    DATA_TYPES,
    EPILOGUES,
    LAYOUTS,
    LIBRARIES,
    Gemm,
    GemmSettings,
    Library,
)
from cudakit.input_files import ExpectedFile, read_text, wrong_file_error

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
_MODELS: Mapping[str, _Model] = MappingProxyType(
    {
        "llama3-8b": _Model(4096, 14336, 32, 8),
        "llama3-70b": _Model(8192, 28672, 64, 8),
        "llama3-405b": _Model(16384, 53248, 128, 8),
        "gpt3-175b": _Model(12288, 4 * 12288, 96, 96, is_gated=False),
    }
)
_LLM_MODELS = ("llama3-8b", "llama3-70b")
PRESETS = ("cubes", "llm", *_MODELS)


# Kinds of matrix data; "int" stands for small integers, whose sums are exact.
FILLS = ("uniform", "normal", "int", "zeros", "ones")
_TYPES = (*DATA_TYPES, "all")
_MAX_GEMMS = 10_000  # More GEMMs would take a day.


def _of_gemm(name: str, text: str, **attributes: Any) -> Any:
    return option(name, text, group="GEMM", **attributes)


def _of_library(name: str, text: str, **attributes: Any) -> Any:
    return option(name, text, group="Library", **attributes)


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmOptions:
    """The options of the command as the user passed them; None or () for others."""

    sides: tuple[str, ...] = ()  # The arguments SHAPE.
    files: tuple[str, ...] = _of_gemm(
        "--shapes",
        "Read shapes from FILE, one per line: m n k, and optionally a batch count; or CSV with a header. "
        "Repeatable.",
        default=(),
        kind="file",
        metavar="FILE",
        is_repeatable=True,
    )
    presets: tuple[str, ...] = _of_gemm(
        "--preset",
        "Shapes: cubes (M = N = K, 512 to 16384); the layers of llama3-8b, llama3-70b, llama3-405b or "
        "gpt3-175b for 16 and 4096 tokens; llm (both llama3-8b and llama3-70b). Repeatable.",
        default=(),
        kind="name",
        metavar="NAME",
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
        metavar="NAME",
        choices=_TYPES,
    )
    accumulate: str | None = _of_gemm(
        "--accumulate",
        "Data type of the accumulator.  [default: depends on --dtype]",
        kind="name",
        metavar="NAME",
        choices=_TYPES,
    )
    batch: int = _of_gemm(
        "--batch",
        "Batch count of a strided-batched GEMM.  [default: 1]",
        default=1,
        kind="int",
        metavar="N",
    )
    padding: int | None = _of_gemm(
        "--padding",
        "Padding elements between the columns of every matrix.  [default: 0]",
        kind="int",
        metavar="N",
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
        metavar="SIZE",
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
        common = {
            "padding": self.padding,
            "output": self.output_type,
            "accumulate": self.accumulate,
        }
        name_by_gemm: dict[Gemm, str] = {}
        for dtype, layout, epilogue in combinations:
            types: dict[str, Any] = {"layout": layout, "epilogue": epilogue, **common}
            passed = {name: value for name, value in types.items() if value is not None}
            for shape in shapes:
                batch = self.batch if shape.batch is None else shape.batch
                gemm = Gemm(dtype=dtype, m=shape.m, n=shape.n, k=shape.k, batch=batch, **passed)
                name_by_gemm.setdefault(gemm, shape.name)
        return name_by_gemm

    def settings(self) -> GemmSettings:
        """Return the settings of the library."""
        workspace = (
            {} if self.workspace_bytes is None else {"workspace_bytes": self.workspace_bytes}
        )
        return GemmSettings(
            deterministic=self.deterministic,
            reduced_precision=not self.no_reduced_precision,
            fast_accumulate=self.fast_accumulate,
            **workspace,
        )


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


def default_shapes(*, simulated: bool) -> tuple[Shape, ...]:
    """Return the shapes that are measured if the user names none."""
    return tuple(
        Shape(edge, edge, edge)
        for edge in (_DEFAULT_SIMULATED_EDGES if simulated else _DEFAULT_EDGES)
    )


def read_shapes(path: Path) -> tuple[Shape, ...]:
    """Read a file with one shape per line: ``m n k`` or ``m,n,k``, with an optional batch.

    The first line may name the columns. Text after ``#`` is a comment. Raises InputError for a file that
    cannot be read, or for an invalid line, whose number the error contains.
    """
    text = read_text(path, _SHAPES_FILE)
    if text.lstrip().startswith(("{", "[")):
        raise wrong_file_error(path, text.encode(), _SHAPES_FILE, reason="it is JSON")
    rows = list(_rows(text))
    columns: Sequence[str] = _COLUMNS
    if rows and not any(map(_INTEGER.fullmatch, rows[0][2])):
        columns = _header(path, *rows.pop(0))
    if not rows:
        raise InputError(f"{path} contains no shapes", hint=_SHAPES_FILE.hint)
    return tuple(_read_row(path, *row, columns) for row in rows)


def _layers(model: str) -> Iterator[Shape]:
    for token_count in _TOKEN_COUNTS:
        for layer, (output_features, input_features) in _MODELS[model].layers().items():
            yield Shape(
                output_features,
                token_count,
                input_features,
                name=f"{model} {layer}, {token_count} tokens",
            )


def _rows(text: str) -> Iterator[tuple[int, str, list[str]]]:
    """Yield the line number, the text and the words of each line that is not empty."""
    for line_number, line_text in enumerate(text.splitlines(), 1):
        words_text = line_text.partition("#")[0].strip()
        if words_text:
            yield (
                line_number,
                words_text,
                re.split(r"\s*[,;]\s*" if _SEPARATOR.search(words_text) else r"\s+", words_text),
            )


def _header(path: Path, line_number: int, text: str, words: Sequence[str]) -> tuple[str, ...]:
    column_names = tuple(word.lower() for word in words)
    if missing_columns := [name for name in _REQUIRED_COLUMNS if column_names.count(name) != 1]:
        raise InputError(
            f"{path}:{line_number}: {_quote(text)} is not a shape, and as a header it lacks "
            f"{', '.join(missing_columns)}",
            hint="write a shape as m n k, or a header such as m,n,k,batch",
        )
    return column_names


def _read_row(
    path: Path, line_number: int, text: str, words: Sequence[str], columns: Sequence[str]
) -> Shape:
    position = f"{path}:{line_number}: {_quote(text)}"
    row = dict(zip(columns, words, strict=False))
    has_all_columns = len(words) == len(columns) or (
        columns is _COLUMNS and len(words) == len(_REQUIRED_COLUMNS)
    )
    size_texts = [row[name] for name in _COLUMNS if name in row]
    if not has_all_columns or not all(map(_INTEGER.fullmatch, size_texts)):
        raise InputError(f"{position} is not a shape", hint="write m n k, or m n k batch")
    return _shape([int(size_text) for size_text in size_texts], position)


def _quote(text: str) -> str:
    return repr(text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}...")


def _shape(sizes: Sequence[int], description: str) -> Shape:
    if min(sizes) < 1:
        raise InputError(f"{description} has a dimension of 0", hint="use dimensions of at least 1")
    m, n, k, *batch = sizes
    return Shape(m, n, k, batch[0] if batch else None)
