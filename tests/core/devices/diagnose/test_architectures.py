from __future__ import annotations

import pytest
from core.devices.diagnose.machines import FAIL, OK, UNKNOWN, Machine, built, gpu, judged, seen

from cudakit.units import Unavailable


@pytest.mark.parametrize(
    ("capability", "cuda"),
    [("9.0", (11, 8)), ("9.0", (13, None)), ("12.0", (12, 8)), ("7.5", (13, 0)), ("99.0", (12, 4))],
)
def test_a_build_whose_cuda_knows_the_gpu_can_have_code_for_it(
    machine: Machine, capability: str, cuda: tuple[int, int | None]
) -> None:
    fitting = machine(**seen(gpu(compute_capability=capability)), builds=(built("torch", cuda),))

    assert judged("CK010", fitting).status is OK


def test_a_build_from_before_the_gpu_has_no_code_for_it(machine: Machine) -> None:
    early = machine(
        **seen(gpu(name="NVIDIA B200", compute_capability="10.0")),
        builds=(built("torch", (12, 4), "2.5.0"),),
    )

    found = judged("CK010", early)

    assert found.status is FAIL
    assert found.summary == (
        "torch 2.5.0 has no code for NVIDIA B200 (sm_100): CUDA 12.8 was the first to know it"
    )
    assert found.fix == ("install a build for CUDA 12.8 or newer",)


def test_a_build_for_a_cuda_that_dropped_the_gpu_has_no_code_for_it(machine: Machine) -> None:
    late = machine(
        **seen(gpu(name="Tesla V100", compute_capability="7.0")), builds=(built("torch", (13, 0)),)
    )

    found = judged("CK010", late)

    assert found.status is FAIL
    assert "CUDA 13 dropped it" in found.summary
    assert "cudakit needs 7.5" in found.summary


def test_a_gpu_that_does_not_tell_its_capability_is_not_judged(machine: Machine) -> None:
    silent = machine(nvml=Unavailable("no"), cuda=Unavailable("no"))

    assert judged("CK010", silent).status is UNKNOWN
