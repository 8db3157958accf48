from __future__ import annotations

import json as standard_json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench.tuning.tunings import FASTER, GEMM, MACHINE, tuned, tuned_gemm, untuned_gemm

from cudakit.bench.tuning.tuned import Tuned, UntunedGemm, load_tuned
from cudakit.errors import InputError
from cudakit.gpu.api.gemm import Gemm, GemmSettings
from cudakit.report import json
from cudakit.units import Unavailable

OTHER = Gemm(dtype="bf16", m=64, n=64, k=64)


def test_only_algorithms_faster_than_default_are_used() -> None:
    tuning = tuned(tuned_gemm(), untuned_gemm(gemm=OTHER))

    assert tuning.algorithms_for(MACHINE) == {GEMM: FASTER}


@pytest.mark.parametrize(
    ("other_machine", "message"),
    [
        (replace(MACHINE, gpu="NVIDIA H100"), "GPU: tuned NVIDIA H200, here NVIDIA H100"),
        (replace(MACHINE, compute_capability="10.0"), "tuned 9.0, here 10.0"),
        (replace(MACHINE, library_version="13.2.0"), "cublaslt version: tuned 13.1.0, here 13.2.0"),
        (replace(MACHINE, gpu=Unavailable("it does not say")), "here unknown"),
    ],
)
def test_tuned_algorithms_of_other_machine_are_rejected(
    other_machine: object, message: str
) -> None:
    with pytest.raises(InputError, match="tuned on another machine") as caught:
        tuned(tuned_gemm()).algorithms_for(other_machine)  # type: ignore[arg-type]

    assert message in caught.value.message
    assert "--tune" in caught.value.hint


def test_other_driver_or_cudakit_version_is_accepted() -> None:
    newer = replace(MACHINE, driver="590.1", cudakit="0.2.0")

    assert tuned(tuned_gemm()).algorithms_for(newer) == {GEMM: FASTER}


def test_algorithm_is_not_used_with_other_settings() -> None:
    deterministic = GemmSettings(deterministic=True)

    assert tuned(tuned_gemm()).algorithms_for(MACHINE, deterministic) == {}
    assert tuned(tuned_gemm()).algorithms_for(MACHINE, GemmSettings()) == {GEMM: FASTER}


TUNED = tuned(
    tuned_gemm(), untuned_gemm(shape="llama3-8b qkv"), untuned=(UntunedGemm(GEMM, "why", True),)
)


def write_tuning(path: Path, tuning: Tuned = TUNED) -> Path:
    path.write_text(json.render(tuning), encoding="utf-8")
    return path


def test_written_tuning_is_read_back(tmp_path: Path) -> None:
    assert load_tuned(write_tuning(tmp_path / "tuned.json")) == TUNED


def set_value(*keys: str | int, value: object) -> Callable[[Any], None]:
    def change(values: Any) -> None:
        for key in keys[:-1]:
            values = values[key]
        values[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_value("products", 1, "gemm", "m", value=0), r"products\[1\]: m is 0"),
        (
            set_value("products", 0, "gemm", "dtype", value="fp7"),
            r"products\[0\]: unknown data type 'fp7'",
        ),
        (
            set_value("products", 0, "winner", "id", value="x"),
            r"products\[0\].winner.id should be a whole",
        ),
        (
            set_value("products", 0, "limits", "time_s", value=-1.0),
            r"products\[0\]: the tuning time",
        ),
        (set_value("products", value={}), "products should be a list"),
        (set_value("untuned", 0, "gemm", "k", value=-1), r"untuned\[0\]: k is -1"),
        (set_value("machine", "library", value="torch7"), "machine.library should be"),
        (set_value("machine", value=[]), "machine should be an object"),
        (
            set_value("schema", value="cudakit.bench/1"),
            "is a result of cudakit bench, not a result of cudakit bench gemm --tune",
        ),
        (set_value("schema", value="cudakit.tuned/2"), "cudakit.tuned/2"),
    ],
)
def test_damaged_file_error_names_position(
    tmp_path: Path, change: Callable[[Any], None], message: str
) -> None:
    path = write_tuning(tmp_path / "tuned.json")
    values = standard_json.loads(path.read_text())
    change(values)
    path.write_text(standard_json.dumps(values))

    with pytest.raises(InputError, match=message):
        load_tuned(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "it is not text"),
        (b"[]", "is not a result of cudakit bench gemm --tune"),
        (b"[" * 9999, "JSON"),
    ],
)
def test_file_of_other_kind_is_rejected(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "tuned.json"
    path.write_bytes(content)

    with pytest.raises(InputError, match=message):
        load_tuned(path)


def test_missing_file_error_names_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        load_tuned(tmp_path / "tuned.json")
