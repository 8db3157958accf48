"""Shapes of GEMMs: parsing of command-line text and files, and presets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from cudakit.errors import InputError
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
