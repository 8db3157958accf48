from __future__ import annotations

import pytest
from core.bench.made import WRONG, gemm, launch, machine, result

from cudakit.core.bench.bands import Band, band, judge
from cudakit.units import Unavailable


@pytest.mark.parametrize(
    ("rate", "health"),
    [(793e12, "pass"), (745e12, "pass"), (720e12, "warn"), (600e12, "fail"), (940e12, "warn")],
)
def test_a_figure_is_judged_by_its_share_of_what_is_expected(rate: float, health: str) -> None:
    found = band("NVIDIA H200", "gemm bf16")

    assert isinstance(found, Band)
    assert found.judge(rate) == health


def test_of_other_models_no_expectation_is_known() -> None:
    for gpu in ("NVIDIA L4", Unavailable("lost")):
        assert band(gpu, "gemm bf16") == Unavailable("no expectation is known")


def test_every_case_is_judged_and_one_without_figures_fails() -> None:
    other = gemm(environment=machine(gpu="NVIDIA L4"))
    found = judge(result(gemm(rate=790e12), gemm(verification=WRONG), launch(), other))

    assert [one.health for one in found] == [
        "pass",
        "fail",
        Unavailable("no expectation is known"),
        Unavailable("no expectation is known"),
    ]
