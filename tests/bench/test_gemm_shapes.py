from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudakit.bench.gemm_shapes import (
    PRESETS,
    Shape,
    default_shapes,
    parse_shape,
    preset,
    read_shapes,
)
from cudakit.errors import InputError

dimensions = st.integers(1, 10**9)


@given(dimensions, dimensions, dimensions)
def test_shape_text_is_parsed(m: int, n: int, k: int) -> None:
    assert parse_shape(f"{m}x{n}x{k}") == Shape(m, n, k)
    assert parse_shape(str(m)) == Shape(m, m, m)


@pytest.mark.parametrize(
    "text", ["", "x", "4x4", "4x4x4x4", "-4", "4.0", "4e3", "1 2 3", "4X4Xq", "٤"]
)
def test_invalid_shape_error_has_hint(text: str) -> None:
    with pytest.raises(InputError, match="is not a shape") as error:
        parse_shape(text)
    assert "4096x1024x8192" in error.value.hint


@pytest.mark.parametrize("text", ["0", "4x0x4"])
def test_dimension_of_0_is_rejected(text: str) -> None:
    with pytest.raises(InputError, match=f"'{text}' has a dimension of 0"):
        parse_shape(text)


def test_every_preset_has_shapes_and_model_presets_have_names() -> None:
    for name in PRESETS:
        shapes = preset(name)
        assert len(shapes) == len(set(shapes)) > 3
        assert all(shape.name for shape in shapes) == (name != "cubes")
    with pytest.raises(InputError, match="unknown preset 'gpt5'") as error:
        preset("gpt5")
    assert "llama3-8b" in error.value.hint


def test_cubes_are_powers_of_two_from_512_to_16384() -> None:
    assert [shape.m for shape in preset("cubes")] == [512, 1024, 2048, 4096, 8192, 16384]


def test_preset_layers_match_paper() -> None:
    by_name = {shape.name: (shape.m, shape.n, shape.k) for shape in preset("llama3-8b")}

    assert by_name["llama3-8b qkv, 4096 tokens"] == (6144, 4096, 4096)
    assert by_name["llama3-8b gate and up, 16 tokens"] == (28672, 16, 4096)
    assert by_name["llama3-8b down, 4096 tokens"] == (4096, 4096, 14336)
    # GPT-3 has 96 heads of size 128, keys and values for each head, and no gate.
    assert any(
        (shape.m, shape.k) == (36864, 12288) and "qkv" in shape.name
        for shape in preset("gpt3-175b")
    )
    assert not any("gate" in shape.name for shape in preset("gpt3-175b"))


def test_default_shapes_of_simulated_device_are_smaller() -> None:
    simulated, real = (default_shapes(simulated=is_simulated) for is_simulated in (True, False))

    assert max(shape.m for shape in simulated) < min(shape.m for shape in real)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 2 3\n", [Shape(1, 2, 3)]),
        ("1,2,3\n4, 5 ,6,7\n", [Shape(1, 2, 3), Shape(4, 5, 6, 7)]),
        ("# of a model\n\n  1\t2   3 # qkv\r\n", [Shape(1, 2, 3)]),
        ("m,n,k\n1,2,3\n", [Shape(1, 2, 3)]),
        ("batch;K;N;M;what\n4;3;2;1;qkv\n", [Shape(1, 2, 3, 4)]),
        ("\ufeffm n k batch\n1 2 3 4\n", [Shape(1, 2, 3, 4)]),
    ],
)
def test_file_has_one_shape_per_line(text: str, expected: list[Shape], tmp_path: Path) -> None:
    file = tmp_path / "shapes.txt"
    file.write_text(text, encoding="utf-8")

    assert list(read_shapes(file)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 2 3\n\n1 2\n", ":3: '1 2' is not a shape"),
        ("1 2 3 4 5\n", ":1: '1 2 3 4 5' is not a shape"),
        ("1 2 3\n1 -2 3\n", ":2: '1 -2 3' is not a shape"),
        ("1 2 0\n", ":1: '1 2 0' has a dimension of 0"),
        ("m,n,k,batch\n1,2,3\n", ":2: '1,2,3' is not a shape"),
        ("m,n\n1,2\n", ":1: 'm,n' is not a shape, and as a header it lacks k"),
        ("m,n,k,k\n1,2,3,3\n", "it lacks k"),
        ("", "is empty"),
        ("# nothing\n", "contains no shapes"),
        ("m n k\n", "contains no shapes"),
    ],
)
def test_invalid_line_of_shapes_is_named(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "shapes.txt"
    file.write_text(text)

    with pytest.raises(InputError, match=message) as error:
        read_shapes(file)
    assert str(file) in error.value.message


def test_unreadable_file_error_names_file(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")

    with pytest.raises(InputError, match="missing does not exist"):
        read_shapes(tmp_path / "missing")
    with pytest.raises(InputError, match="is a directory"):
        read_shapes(tmp_path)
    with pytest.raises(InputError, match="it is not text"):
        read_shapes(binary)
