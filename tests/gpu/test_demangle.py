"""Tests demangling by the C++ runtime."""

from __future__ import annotations

import ctypes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudakit.gpu.demangle import demangle


def _has_runtime() -> bool:
    try:
        ctypes.CDLL("libstdc++.so.6")
    except OSError:
        return False
    return True


needs_runtime = pytest.mark.skipif(not _has_runtime(), reason="there is no libstdc++")


@needs_runtime
@pytest.mark.parametrize(
    ("mangled", "readable"),
    [
        ("_Z3addPfS_i", "add(float*, float*, int)"),
        ("_ZN2at6native4fillIfEEvPT_", "void at::native::fill<float>(float*)"),
        (
            "_Z4fillIZ4makevEUlfE_EvT_",
            "void fill<make()::{lambda(float)#1}>(make()::{lambda(float)#1})",
        ),
    ],
)
def test_mangled_name_is_demangled(mangled: str, readable: str) -> None:
    assert demangle(mangled) == readable


@pytest.mark.parametrize("name", ["", "add", "triton_poi_fused_add_0", "_Z", "_Zno", "_ZN3no"])
def test_unmangled_name_is_unchanged(name: str) -> None:
    assert demangle(name) == name


def test_overlong_name_is_unchanged() -> None:
    name = f"_Z70000{'a' * 70_000}v"

    assert demangle(name) == name


@given(st.text().map("_Z{}".format))
def test_any_text_can_be_demangled_without_error(name: str) -> None:
    assert isinstance(demangle(name), str)
