"""The simulated compiler: kernel names and parameter sizes of CUDA C++ source."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TypeAlias

from cudakit.errors import CudaError
from cudakit.gpu.driver_errors import Status, cuda_error

# Sizes of the parameters of each kernel in bytes, by kernel name; None if a parameter type is unknown.
Signatures: TypeAlias = Mapping[str, tuple[int, ...] | None]

_MAGIC = b"cudakit simulated image\n"
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_KERNEL = re.compile(
    r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\(([^)]*)\)'
)
_TYPEDEF = re.compile(r"\btypedef\s+([\w\s*]+?)\s*\b(\w+)\s*;")
_QUALIFIERS = frozenset({"const", "volatile", "__restrict__", "__grid_constant__", "signed"})
_POINTER_BYTES = 8

# Sizes of types in CUDA C++ on 64-bit Linux.
_TYPE_BYTES = {
    "bool": 1,
    "char": 1,
    "unsigned char": 1,
    "short": 2,
    "unsigned short": 2,
    "int": 4,
    "unsigned": 4,
    "unsigned int": 4,
    "long": 8,
    "unsigned long": 8,
    "long long": 8,
    "unsigned long long": 8,
    "float": 4,
    "double": 8,
    "size_t": 8,
    "int8_t": 1,
    "uint8_t": 1,
    "int16_t": 2,
    "uint16_t": 2,
    "int32_t": 4,
    "uint32_t": 4,
    "int64_t": 8,
    "uint64_t": 8,
    "__half": 2,
    "__nv_bfloat16": 2,
}


def image_of(source: str) -> bytes:
    """Return a simulated image of CUDA C++ source, with its ``extern "C"`` kernels and their parameter sizes.

    Raises a CudaError for text without functions or with unbalanced brackets; other errors are not detected.
    """
    text = _COMMENT.sub(" ", source)
    if not _looks_like_cuda(text):
        raise CudaError(
            6,
            "NVRTC_ERROR_COMPILATION",
            "the source does not compile: the simulated compiler found no function, or unbalanced brackets",
        )
    type_sizes = _type_sizes(text)
    kernels = {
        name: _parameter_sizes(parameters, type_sizes) for name, parameters in _KERNEL.findall(text)
    }
    return _MAGIC + json.dumps(kernels).encode()


def signatures_of(image: bytes) -> Signatures:
    """Return the signatures of an image. Raises CUDA_ERROR_INVALID_IMAGE for other images."""
    if not image.startswith(_MAGIC):
        raise cuda_error(
            Status.INVALID_IMAGE, detail="a simulated device only loads images that it compiled"
        )
    kernels = json.loads(image.removeprefix(_MAGIC))
    return {name: None if sizes is None else tuple(sizes) for name, sizes in kernels.items()}


def _looks_like_cuda(text: str) -> bool:
    has_balanced_brackets = all(
        text.count(opening_bracket) == text.count(closing_bracket)
        for opening_bracket, closing_bracket in ("()", "[]", "{}")
    )
    return has_balanced_brackets and (
        not text.strip() or any(token in text for token in ("{", ";"))
    )


def _type_sizes(text: str) -> dict[str, int]:
    type_sizes = dict(_TYPE_BYTES)
    for definition, name in _TYPEDEF.findall(text):
        size = _POINTER_BYTES if "*" in definition else type_sizes.get(_base_type(definition))
        if size is not None:
            type_sizes[name] = size
    return type_sizes


def _parameter_sizes(parameters_text: str, type_sizes: Mapping[str, int]) -> list[int] | None:
    declarations = [
        parameter.strip()
        for parameter in parameters_text.split(",")
        if parameter.strip() not in ("", "void")
    ]
    sizes = [_parameter_size(parameter, type_sizes) for parameter in declarations]
    known_sizes = [size for size in sizes if size is not None]
    return known_sizes if len(known_sizes) == len(sizes) else None


def _parameter_size(parameter: str, type_sizes: Mapping[str, int]) -> int | None:
    if "*" in parameter:
        return _POINTER_BYTES
    return type_sizes.get(
        _base_type(parameter), type_sizes.get(_base_type(parameter.rpartition(" ")[0]))
    )


def _base_type(declaration: str) -> str:
    type_words = [word for word in declaration.split() if word not in _QUALIFIERS]
    # The type "short int" is "short", and "signed" is "int".
    if len(type_words) > 1 and type_words[-1] == "int" and type_words[-2] != "unsigned":
        type_words.pop()
    return " ".join(type_words) or "int"
