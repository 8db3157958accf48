from __future__ import annotations

import json as standard_json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from core.bench.tuning.tunings import FASTER, GEMM, MACHINE, product, tuned, unchanged

from cudakit.core.bench.tuning.tuned import Tuned, Untuned, load_tuned
from cudakit.errors import InputError
from cudakit.gpu.api.gemm import Gemm, GemmSettings
from cudakit.render import json
from cudakit.units import Unavailable

OTHER = Gemm(dtype="bf16", m=64, n=64, k=64)


def test_algorithms_that_beat_the_default_are_used() -> None:
    found = tuned(product(), unchanged(gemm=OTHER))

    assert found.algorithms_for(MACHINE) == {GEMM: FASTER}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (replace(MACHINE, gpu="NVIDIA H100"), "GPU: tuned NVIDIA H200, here NVIDIA H100"),
        (replace(MACHINE, compute_capability="10.0"), "tuned 9.0, here 10.0"),
        (replace(MACHINE, library_version="13.2.0"), "cublaslt version: tuned 13.1.0, here 13.2.0"),
        (replace(MACHINE, gpu=Unavailable("it does not say")), "here unknown"),
    ],
)
def test_tuned_algorithms_of_other_machine_are_rejected(other: object, message: str) -> None:
    with pytest.raises(InputError, match="tuned on another machine") as caught:
        tuned(product()).algorithms_for(other)  # type: ignore[arg-type]

    assert message in caught.value.message
    assert "--tune" in caught.value.hint


def test_another_driver_or_cudakit_is_no_reason_to_refuse() -> None:
    newer = replace(MACHINE, driver="590.1", cudakit="0.2.0")

    assert tuned(product()).algorithms_for(newer) == {GEMM: FASTER}


def test_under_other_settings_an_algorithm_is_not_used() -> None:
    deterministic = GemmSettings(deterministic=True)

    assert tuned(product()).algorithms_for(MACHINE, deterministic) == {}
    assert tuned(product()).algorithms_for(MACHINE, GemmSettings()) == {GEMM: FASTER}


TUNED = tuned(product(), unchanged(shape="llama3-8b qkv"), untuned=(Untuned(GEMM, "why", True),))


def written(path: Path, found: Tuned = TUNED) -> Path:
    path.write_text(json.render(found), encoding="utf-8")
    return path


def test_written_tuning_is_read_back(tmp_path: Path) -> None:
    assert load_tuned(written(tmp_path / "tuned.json")) == TUNED


def set_(*keys: str | int, to: object) -> Callable[[Any], None]:
    def change(plain: Any) -> None:
        for key in keys[:-1]:
            plain = plain[key]
        plain[keys[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_("products", 1, "gemm", "m", to=0), r"products\[1\]: m is 0"),
        (
            set_("products", 0, "gemm", "dtype", to="fp7"),
            r"products\[0\]: unknown data type 'fp7'",
        ),
        (set_("products", 0, "winner", "id", to="x"), r"products\[0\].winner.id should be a whole"),
        (set_("products", 0, "limits", "time_s", to=-1.0), r"products\[0\]: the tuning time"),
        (set_("products", to={}), "products should be a list"),
        (set_("untuned", 0, "gemm", "k", to=-1), r"untuned\[0\]: k is -1"),
        (set_("machine", "library", to="torch7"), "machine.library should be"),
        (set_("machine", to=[]), "machine should be an object"),
        (set_("schema", to="cudakit.bench/1"), "contains no tuned algorithms"),
        (set_("schema", to="cudakit.tuned/2"), "cudakit.tuned/2"),
    ],
)
def test_damaged_file_error_names_position(
    tmp_path: Path, change: Callable[[Any], None], message: str
) -> None:
    place = written(tmp_path / "tuned.json")
    plain = standard_json.loads(place.read_text())
    change(plain)
    place.write_text(standard_json.dumps(plain))

    with pytest.raises(InputError, match=message):
        load_tuned(place)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not a text"),
        (b"[]", "no tuned algorithms"),
        (b"[" * 9999, "JSON"),
    ],
)
def test_file_of_other_kind_is_rejected(tmp_path: Path, content: bytes, message: str) -> None:
    place = tmp_path / "tuned.json"
    place.write_bytes(content)

    with pytest.raises(InputError, match=message):
        load_tuned(place)


def test_missing_file_error_names_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read: No such file"):
        load_tuned(tmp_path / "tuned.json")
