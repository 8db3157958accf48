from __future__ import annotations

from dataclasses import replace

import pytest
from core.bench.tuning.tunings import FASTER, GEMM, MACHINE, product, tuned, unchanged

from cudakit.errors import InputError
from cudakit.gpu.api.gemm import Gemm, GemmSettings
from cudakit.units import Unavailable

OTHER = Gemm(dtype="bf16", m=64, n=64, k=64)


def test_algorithms_that_beat_the_default_are_used() -> None:
    found = tuned(product(), unchanged(gemm=OTHER))

    assert found.algorithms_for(MACHINE) == {GEMM: FASTER}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (replace(MACHINE, gpu="NVIDIA H100"), "the GPU was NVIDIA H200, and is NVIDIA H100"),
        (replace(MACHINE, compute_capability="10.0"), "was 9.0, and is 10.0"),
        (replace(MACHINE, library_version="13.2.0"), "cublaslt was 13.1.0, and is 13.2.0"),
        (replace(MACHINE, gpu=Unavailable("it does not say")), "and is unknown"),
    ],
)
def test_on_an_unlike_machine_they_are_refused(other: object, said: str) -> None:
    with pytest.raises(InputError, match="tuned elsewhere") as refused:
        tuned(product()).algorithms_for(other)  # type: ignore[arg-type]

    assert said in refused.value.message
    assert "--tune" in refused.value.hint


def test_another_driver_or_cudakit_is_no_reason_to_refuse() -> None:
    newer = replace(MACHINE, driver="590.1", cudakit="0.2.0")

    assert tuned(product()).algorithms_for(newer) == {GEMM: FASTER}


def test_under_other_settings_an_algorithm_is_not_used() -> None:
    deterministic = GemmSettings(deterministic=True)

    assert tuned(product()).algorithms_for(MACHINE, deterministic) == {}
    assert tuned(product()).algorithms_for(MACHINE, GemmSettings()) == {GEMM: FASTER}
