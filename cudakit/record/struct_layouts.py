"""Compare the structs of the installed Sanitizer API with those that the recorder was compiled with.

The recorder reads callback data at fixed offsets. If a release of the API moved a field, the recorder would
read wrong data. Therefore the offsets are computed from the headers next to the library, by the rules of C on
64-bit Linux (System V ABI, AMD64 and AArch64), and compared before the program starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from cudakit.errors import EnvironmentUnusable
from cudakit.record.installed import INSTALL_LIBRARY, Library

# Byte offset of each field, and the size of the struct under SIZE.
Layout: TypeAlias = Mapping[str, int]

SIZE = "sizeof"
# Releases with known layouts, for libraries without headers.
_RELEASES_WITH_KNOWN_LAYOUTS = {(13, 4), (13, 5)}
_INSTALL_SUPPORTED = "pip install 'nvidia-cuda-sanitizer-api==13.5.*'"

_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_TOKEN = re.compile(r"\w+|[^\s\w]")
_ENUM = re.compile(r"\btypedef\s+enum\s*\w*\s*\{[^}]*\}\s*(\w+)\s*;")
_HANDLE = re.compile(r"\btypedef\s+struct\s+\w+\s*\*\s*(\w+)\s*;")
_STRUCT = re.compile(r"\btypedef\s+struct\s*\w*\s*\{")
_BRACE = re.compile(r"[{}]")
_STRUCT_NAME = re.compile(r"\s*(\w+)\s*;")

_POINTER_BYTES = 8
_ENUM_BYTES = 4
_TYPE_BYTES = {
    "char": 1, "int8_t": 1, "uint8_t": 1, "bool": 1,
    "int16_t": 2, "uint16_t": 2,
    "int": 4, "unsigned": 4, "int32_t": 4, "uint32_t": 4, "float": 4,
    "int64_t": 8, "uint64_t": 8, "size_t": 8, "uintptr_t": 8, "double": 8, "CUdeviceptr": 8,
}  # fmt: skip
# Types of cuda.h that are integers of 4 bytes. All other types that begin with CU are handles, which are
# pointers.
_CUDA_INTEGER_TYPES = {"CUdevice", "CUresult", "CUgraphNodeType", "CUlogLevel"}


@dataclass(slots=True)
class _Aggregate:
    """The layout of a struct or union, built member by member."""

    is_union: bool = False
    fields: dict[str, int] = field(default_factory=dict)
    end_offset: int = 0  # offset behind the last member
    alignment: int = 1  # largest alignment of a member

    @property
    def size(self) -> int:
        """The size in bytes, padded to the alignment."""
        return -(-self.end_offset // self.alignment) * self.alignment

    def reserve_space(self, size: int, alignment: int) -> int:
        """Allocate space for a member and return its offset."""
        offset = 0 if self.is_union else -(-self.end_offset // alignment) * alignment
        self.end_offset = max(self.end_offset, offset + size)
        self.alignment = max(self.alignment, alignment)
        return offset

    def add(self, name: str, size: int, alignment: int, *, element_count: int = 1) -> None:
        """Add a named member, which is an array if ``element_count`` is not 1."""
        self.fields[name] = self.reserve_space(size * element_count, alignment)

    def add_unnamed(self, member: _Aggregate) -> None:
        """Add an unnamed struct or union, whose members become fields of the outer struct."""
        offset = self.reserve_space(member.size, member.alignment)
        self.fields |= {name: offset + inner_offset for name, inner_offset in member.fields.items()}


class Header:
    """A C header with typedefs of structs whose members are numbers, pointers, enums and structs."""

    def __init__(self, header_text: str) -> None:
        header_text = _COMMENT.sub(" ", header_text)
        self._members_by_struct = dict(_struct_bodies(header_text))
        self._enums = frozenset(_ENUM.findall(header_text))
        self._handles = frozenset(_HANDLE.findall(header_text))

    def layout(self, name: str) -> Layout | None:
        """Compute the layout of a struct; None if the header does not define it.

        Members of an unnamed struct or union count as fields of the outer one. Raises ValueError for a
        declaration that cannot be parsed.
        """
        if name not in self._members_by_struct:
            return None
        struct = self._struct(name)
        return {**struct.fields, SIZE: struct.size}

    def _struct(self, name: str) -> _Aggregate:
        struct = _Aggregate()
        self._add_members(struct, _TOKEN.findall(self._members_by_struct[name]))
        return struct

    def _add_members(self, aggregate: _Aggregate, tokens: list[str]) -> None:
        """Add the declared members, up to a closing brace."""
        while tokens and tokens[0] != "}":
            if tokens[0] in ("struct", "union") and "{" in tokens[1:3]:
                inner_aggregate = _Aggregate(is_union=_take_until(tokens, "{")[0] == "union")
                self._add_members(inner_aggregate, tokens)
                match _take_until(tokens, ";"):
                    case ["}"]:
                        aggregate.add_unnamed(inner_aggregate)
                    case ["}", name]:
                        aggregate.add(name, inner_aggregate.size, inner_aggregate.alignment)
                    case words:
                        raise ValueError(f"cannot parse the declaration {' '.join(words)!r}")
            else:
                self._add_declaration(aggregate, _take_until(tokens, ";"))

    def _add_declaration(self, aggregate: _Aggregate, words: list[str]) -> None:
        """Add the members of one declaration without its semicolon: ``const TYPE *name, other[4]``."""
        words = [word for word in words if word not in ("const", "struct", "enum", "volatile")]
        type_name, declarators = words[0], words[1:]
        while declarators:
            match _take_until(declarators, ","):
                case ["*", *_, name]:
                    aggregate.add(name, _POINTER_BYTES, _POINTER_BYTES)
                case [name]:
                    aggregate.add(name, *self._size_and_alignment(type_name))
                case [name, "[", count, "]"] if count.isdecimal():
                    aggregate.add(
                        name, *self._size_and_alignment(type_name), element_count=int(count)
                    )
                case _:
                    raise ValueError(f"cannot parse the declaration {' '.join(words)!r}")

    def _size_and_alignment(self, type_name: str) -> tuple[int, int]:
        if type_name in self._members_by_struct:
            struct = self._struct(type_name)
            return struct.size, struct.alignment
        if type_name in self._enums or type_name in _CUDA_INTEGER_TYPES:
            return _ENUM_BYTES, _ENUM_BYTES
        if type_name in self._handles or (
            type_name.startswith("CU") and type_name not in _TYPE_BYTES
        ):
            return _POINTER_BYTES, _POINTER_BYTES
        if type_name not in _TYPE_BYTES:
            raise ValueError(f"unknown type {type_name}")
        return _TYPE_BYTES[type_name], _TYPE_BYTES[type_name]


def _struct_bodies(header_text: str) -> Iterator[tuple[str, str]]:
    """Yield the name of each struct and the text between its braces."""
    for struct_match in _STRUCT.finditer(header_text):
        depth = 1
        for brace in _BRACE.finditer(header_text, struct_match.end()):
            depth += 1 if brace[0] == "{" else -1
            if not depth:
                if name_match := _STRUCT_NAME.match(header_text, brace.end()):
                    yield name_match[1], header_text[struct_match.end() : brace.start()]
                break


def _take_until(tokens: list[str], end_token: str) -> list[str]:
    """Remove and return the tokens before the next ``end_token``; also remove ``end_token``."""
    index = tokens.index(end_token) if end_token in tokens else len(tokens)
    tokens_before_end = tokens[:index]
    del tokens[: index + 1]
    return tokens_before_end


def describe_difference(compiled_layouts: Mapping[str, Layout], header: Header) -> str:
    """Describe the first field whose offset the recorder and a header disagree on, or return "".

    Structs of the header may be larger, because the recorder receives pointers to them. Structs that are not
    part of the Sanitizer API are ignored.
    """
    for name in (name for name in compiled_layouts if name.startswith("Sanitizer_")):
        installed_layout = header.layout(name)
        if installed_layout is None:
            return f"{name} is missing"
        for field_name, offset in compiled_layouts[name].items():
            installed = installed_layout.get(field_name)
            if field_name == SIZE:
                if installed is not None and installed < offset:
                    return f"{name} has {installed} bytes; the recorder reads {offset}"
            elif installed is None:
                return f"{name}.{field_name} is missing; the recorder reads it at byte {offset}"
            elif installed != offset:
                place = f"{name}.{field_name} is at byte {installed}"
                return f"{place}; the recorder reads it at byte {offset}"
    return ""


def check_structures(compiled_layouts: Mapping[str, Layout], library: Library) -> None:
    """Raise EnvironmentUnusable if the recorder would misread callback data of the library."""
    headers = library.headers
    if not headers:
        if library.version[:2] in _RELEASES_WITH_KNOWN_LAYOUTS:
            return
        raise EnvironmentUnusable(
            f"{library} has no headers and is not a release with known struct layouts",
            hint=INSTALL_LIBRARY,
        )
    header = Header("".join(path.read_text(encoding="utf-8", errors="replace") for path in headers))
    try:
        layout_difference = describe_difference(compiled_layouts, header)
    except ValueError as error:
        layout_difference = str(error)
    if layout_difference:
        raise EnvironmentUnusable(
            f"{library} has struct layouts that this recorder does not support: {layout_difference}",
            hint=f"pip install --upgrade cudakit, or {_INSTALL_SUPPORTED}",
        )
