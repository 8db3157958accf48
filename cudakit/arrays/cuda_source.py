"""Kernels in CUDA C++ source: their parameters, and the types of template parameters.

A template kernel becomes a plain function for each set of types: its template parameters become typedefs, so
that the kernel has an unmangled name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cudakit.arrays.expressions.dtypes import DTYPES
from cudakit.errors import UsageError

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_KERNEL = re.compile(
    r"(?P<template>template\s*<(?P<types>[^<>]*)>\s*)?"
    r'(?P<linkage>extern\s+"C"\s+)?'
    r"__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?"
    r"(?P<name>\w+)\s*\((?P<parameters>[^)]*)\)"
)
_TEMPLATE_TYPE = re.compile(r"\s*(?:typename|class)\s+(\w+)\s*")
_QUALIFIERS = frozenset({"const", "volatile", "__restrict__", "__grid_constant__", "restrict"})

# Dtypes of the scalar types of CUDA C++ on 64-bit Linux, by the words of the type in alphabetical order,
# without a redundant "int".
_SCALARS = {
    "bool": "bool",
    "char": "int8",
    "char signed": "int8",
    "char unsigned": "uint8",
    "short": "int16",
    "short unsigned": "uint16",
    "int": "int32",
    "signed": "int32",
    "unsigned": "uint32",
    "long": "int64",
    "long long": "int64",
    "long unsigned": "uint64",
    "long long unsigned": "uint64",
    "float": "float32",
    "double": "float64",
    "size_t": "uint64",
    "ptrdiff_t": "int64",
    **{f"{name}_t": name for name in DTYPES if "int" in name},
}
# Types of CUDA C++ for template parameters; 16-bit floats would need headers of the CUDA toolkit.
TEMPLATE_TYPES = {
    name: dtype.storage_type
    for name, dtype in DTYPES.items()
    if dtype.storage_type not in ("half", "bfloat") and not name.startswith("complex")
}


@dataclass(frozen=True, slots=True)
class KernelParameter:
    """A parameter of a kernel in its source."""

    name: str
    type_name: str  # type without qualifiers; of a pointer, the type of its elements
    is_pointer: bool
    is_const: bool  # whether the elements of a pointer are constant

    @property
    def dtype(self) -> str | None:
        """The dtype of the number or of the elements; None for other types."""
        words = sorted(word for word in self.type_name.split() if word != "int")
        return _SCALARS.get(" ".join(words) or "int")


@dataclass(frozen=True, slots=True)
class KernelSource:
    """One kernel of a source."""

    text: str
    name: str
    parameters: tuple[KernelParameter, ...]
    template_types: tuple[str, ...]  # names of the template parameters

    def with_types(self, types: Mapping[str, str]) -> str:
        """Return the source for dtypes of the template parameters; the lines keep their numbers."""

        def declare_plain_kernel(match: re.Match[str]) -> str:
            header, linkage = match["template"] or "", match["linkage"] or ""
            declarator = match[0][len(header) + len(linkage) :]
            newlines = "\n" * (header.count("\n") + linkage.count("\n"))
            if match["name"] != self.name:
                return match[0] if header else f'{newlines}extern "C" {declarator}'
            typedefs = "".join(
                f"typedef {TEMPLATE_TYPES[types[name]]} {name}; " for name in self.template_types
            )
            return f'{newlines}{typedefs}extern "C" {declarator}'

        return _KERNEL.sub(declare_plain_kernel, self.text)


def kernel_source(text: str, name: str | None = None) -> KernelSource:
    """Return a kernel of a source; ``name`` may be left out if the source has one kernel.

    Raises UsageError if the source does not have the kernel, or a template parameter is not a type.
    """
    kernels = {
        match["name"]: match for match in _KERNEL.finditer(_COMMENT.sub(_blank_comment, text))
    }
    if name is None and len(kernels) != 1:
        raise UsageError(
            f"the source has {len(kernels)} kernels{': ' if kernels else ''}{', '.join(kernels)}",
            hint="give the name of one kernel" if kernels else 'write "__global__ void name(...)"',
        )
    selected_name = name or next(iter(kernels))
    match = kernels.get(selected_name)
    if match is None:
        raise UsageError(
            f"the source has no kernel {selected_name}; its kernels are: {', '.join(kernels)}"
        )
    parameters = [parameter.strip() for parameter in match["parameters"].split(",")]
    return KernelSource(
        _COMMENT.sub(_blank_comment, text),
        selected_name,
        tuple(_parse_parameter(text) for text in parameters if text not in ("", "void")),
        tuple(
            _parse_template_type(text) for text in (match["types"] or "").split(",") if text.strip()
        ),
    )


def _blank_comment(match: re.Match[str]) -> str:
    """Return the line breaks of a comment without its text, because brackets in the text would be misread."""
    return "\n" * match[0].count("\n") or " "


def _parse_parameter(declaration: str) -> KernelParameter:
    is_pointer = "*" in declaration
    type_text, _, name = declaration.rpartition("*") if is_pointer else ("", "", declaration)
    words = [word for word in name.split() if word not in _QUALIFIERS]
    if not is_pointer:
        type_text = " ".join(words[:-1]) if len(words) > 1 else name
    type_words = [word for word in type_text.replace("*", " ").split() if word not in _QUALIFIERS]
    return KernelParameter(
        words[-1] if words else "",
        " ".join(type_words),
        is_pointer,
        "const" in type_text.split(),
    )


def _parse_template_type(declaration: str) -> str:
    match = _TEMPLATE_TYPE.fullmatch(declaration)
    if match is None:
        raise UsageError(
            f"the template parameter {declaration.strip()!r} is not a type",
            hint="use typename parameters, and #define constants",
        )
    return match[1]


def convert_number(value: complex | np.generic, parameter: KernelParameter) -> np.generic:
    """Return a number in the type of a parameter. Raises UsageError if it does not fit."""
    if isinstance(value, np.generic):
        dtype = parameter.dtype
        if dtype is not None and value.dtype.name != dtype:
            raise UsageError(f"{parameter.name} is a {dtype}, and the argument is a {value.dtype}")
        return value
    if parameter.dtype is None:
        raise UsageError(
            f"the type {parameter.type_name} of {parameter.name} is unknown",
            hint="pass a numpy scalar of the same size, such as numpy.float32(1)",
        )
    target_dtype = np.dtype(parameter.dtype)
    is_exact = (
        target_dtype.kind == "f" if isinstance(value, float) else not isinstance(value, complex)
    )
    if is_exact and target_dtype.kind in "iu":
        integer_limits = np.iinfo(target_dtype)
        is_exact = integer_limits.min <= int(value.real) <= integer_limits.max
    if not is_exact:
        raise UsageError(f"{value} does not fit into {parameter.name}, which is a {target_dtype}")
    number: np.generic = target_dtype.type(value)
    return number
