from __future__ import annotations

import ctypes
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudakit.errors import EnvironmentUnusable
from cudakit.record.installed import Library, SearchPaths, find_sanitizer_library
from cudakit.record.struct_layouts import SIZE, Header, check_structures, describe_difference

HEADER = """
#include <cuda.h>
/* typedef struct { int commented; } Sanitizer_Comment; */
typedef enum {
    RED = 0, // of a };
    GREEN = 1,
} Sanitizer_Colour;
typedef struct Sanitizer_Lane_st *Sanitizer_LaneHandle;

typedef struct {
    CUdevice device;  // 4 bytes, not a handle
    CUcontext context;
    const char *name, letter;
    uint8_t marks[5];
    Sanitizer_Colour colour;
    Sanitizer_LaneHandle lane;
} Sanitizer_Small;

typedef struct Sanitizer_Large_st
{
    uint32_t before;
    union {
        Sanitizer_Small small;
        uint64_t word;
        struct { uint32_t low; uint32_t high; } halves;
    };
    const void * const *pointers;
    uint32_t after;
} Sanitizer_Large;

typedef struct { uint32_t ok; long double odd; } Sanitizer_Odd;
typedef struct { int (*function)(void); } Sanitizer_Function;
typedef struct { int matrix[2][2]; } Sanitizer_Matrix;
"""

SMALL = {"device": 0, "context": 8, "name": 16, "letter": 24, "marks": 25, "colour": 32, "lane": 40}


def test_offsets_follow_c_rules() -> None:
    assert Header(HEADER).layout("Sanitizer_Small") == {**SMALL, SIZE: 48}


def test_members_of_unnamed_union_are_fields() -> None:
    assert Header(HEADER).layout("Sanitizer_Large") == {
        "before": 0,
        "small": 8,
        "word": 8,
        "halves": 8,
        "pointers": 56,
        "after": 64,
        SIZE: 72,
    }


def test_struct_in_comment_is_ignored() -> None:
    assert Header(HEADER).layout("Sanitizer_Comment") is None


@pytest.mark.parametrize("name", ["Sanitizer_Odd", "Sanitizer_Function", "Sanitizer_Matrix"])
def test_unknown_declaration_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match="cannot parse"):
        Header(HEADER).layout(name)


C_TYPES = {
    "char": ctypes.c_char,
    "uint8_t": ctypes.c_uint8,
    "int16_t": ctypes.c_int16,
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
    "size_t": ctypes.c_size_t,
    "double": ctypes.c_double,
    "CUstream": ctypes.c_void_p,
    "CUdevice": ctypes.c_int,
}
MEMBERS = st.lists(
    st.tuples(st.sampled_from(sorted(C_TYPES)), st.integers(0, 5)), min_size=1, max_size=12
)


@given(MEMBERS, MEMBERS, st.booleans())
def test_computed_layouts_match_the_compiler(
    outer: list[tuple[str, int]], inner: list[tuple[str, int]], is_union: bool
) -> None:
    word, base = ("union", ctypes.Union) if is_union else ("struct", ctypes.Structure)
    text = (
        f"typedef struct {{ {word} {{ {declaration(inner, 'i')} }} first; {declaration(outer, 'o')}"
        f" {word} {{ {declaration(inner, 'u')} }}; }} S;"
    )
    nested = type("Nested", (base,), {"_fields_": fields(inner, "i")})
    unnamed = type("Unnamed", (base,), {"_fields_": fields(inner, "u")})
    expected = type(
        "Expected",
        (ctypes.Structure,),
        {
            "_fields_": [("first", nested), *fields(outer, "o"), ("last", unnamed)],
            "_anonymous_": ["last"],
        },
    )

    layout = Header(text).layout("S")

    assert layout is not None
    assert layout[SIZE] == ctypes.sizeof(expected)
    for name in layout.keys() - {SIZE}:
        assert layout[name] == getattr(expected, name).offset


def declaration(members: list[tuple[str, int]], prefix: str) -> str:
    numbered = enumerate(members)
    return " ".join(
        f"{kind} {prefix}{index}{f'[{count}]' if count else ''};"
        for index, (kind, count) in numbered
    )


def fields(members: list[tuple[str, int]], prefix: str) -> list[tuple[str, object]]:
    return [
        (f"{prefix}{index}", C_TYPES[kind] * count if count else C_TYPES[kind])
        for index, (kind, count) in enumerate(members)
    ]


def test_equal_struct_layouts_are_accepted() -> None:
    compiled = {"Sanitizer_Small": {"context": 8, SIZE: 48}, "record": {"seq": 0}}

    assert describe_difference(compiled, Header(HEADER)) == ""


def test_struct_may_grow_at_its_end_but_not_shrink() -> None:
    assert describe_difference({"Sanitizer_Small": {"device": 0, SIZE: 40}}, Header(HEADER)) == ""
    assert describe_difference({"Sanitizer_Small": {SIZE: 56}}, Header(HEADER)) == (
        "Sanitizer_Small has 48 bytes; the recorder reads 56"
    )


@pytest.mark.parametrize("compiled", [32, 48])
def test_moved_field_is_named_with_both_offsets(compiled: int) -> None:
    assert describe_difference(
        {"Sanitizer_Small": {"device": 0, "lane": compiled}}, Header(HEADER)
    ) == (f"Sanitizer_Small.lane is at byte 40; the recorder reads it at byte {compiled}")


def test_missing_field_or_struct_is_named() -> None:
    assert describe_difference({"Sanitizer_Small": {"flags": 8}}, Header(HEADER)) == (
        "Sanitizer_Small.flags is missing; the recorder reads it at byte 8"
    )
    assert (
        describe_difference({"Sanitizer_Tiny": {"flags": 8}}, Header(HEADER))
        == "Sanitizer_Tiny is missing"
    )


def library(directory: Path, *version: int, header: str = "") -> Library:
    if header:
        (directory / "include").mkdir()
        (directory / "include" / "sanitizer_callbacks.h").write_text(header)
    return Library(directory / "libsanitizer-public.so", version)


def test_different_structs_are_refused_with_fitting_version(tmp_path: Path) -> None:
    newer = library(tmp_path, 14, 0, 1, header=HEADER)

    with pytest.raises(EnvironmentUnusable, match=r"14\.0\.1 .*: Sanitizer_Small\.lane") as refused:
        check_structures({"Sanitizer_Small": {"lane": 0}}, newer)

    assert "pip install --upgrade cudakit" in refused.value.hint
    assert "'nvidia-cuda-sanitizer-api==13.5.*'" in refused.value.hint


def test_unparsable_structs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnusable, match="cannot parse"):
        check_structures({"Sanitizer_Odd": {"ok": 0}}, library(tmp_path, 13, 5, header=HEADER))


def test_equal_structs_are_accepted_in_any_release(tmp_path: Path) -> None:
    check_structures({"Sanitizer_Small": SMALL}, library(tmp_path, 99, header=HEADER))


@pytest.mark.parametrize("version", [(13, 4, 1), (13, 5, 25)])
def test_known_release_without_headers_is_accepted(
    tmp_path: Path, version: tuple[int, ...]
) -> None:
    check_structures({"Sanitizer_Small": SMALL}, library(tmp_path, *version))


@pytest.mark.parametrize("version", [(13, 6), (14, 4), ()])
def test_unknown_release_without_headers_is_refused(
    tmp_path: Path, version: tuple[int, ...]
) -> None:
    with pytest.raises(EnvironmentUnusable, match="has no headers") as refused:
        check_structures({"Sanitizer_Small": SMALL}, library(tmp_path, *version))

    assert refused.value.hint == "pip install 'cudakit[sanitize]'"


@pytest.mark.skipif(
    find_spec("cudakit.record._recorder") is None, reason="the recorder was not built"
)
def test_recorder_fits_the_installed_library() -> None:
    from cudakit.record import _recorder

    try:
        installed = find_sanitizer_library(SearchPaths.of_this_process())
    except EnvironmentUnusable as missing:
        pytest.skip(f"{missing.message}; {missing.hint}")

    check_structures(_recorder.offsets(), installed)
