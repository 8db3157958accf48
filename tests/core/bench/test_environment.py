from __future__ import annotations

from typing import Any

import pytest
from core.bench.made import VERSIONS, facts, machine, telemetry

from cudakit.core.bench.environment import environment, moment
from cudakit.gpu.api.run_context import RunContext
from cudakit.units import Unavailable


def test_environment_merges_facts_of_cuda_and_nvml() -> None:
    found = machine()

    assert (found.gpu, found.multiprocessors, found.pcie) == ("NVIDIA H200", 132, "5.0 x16")
    assert (found.sm_clock_max_mhz, found.l2_bytes) == (1980.0, 62_914_560)
    assert found.power_limit_w == found.power_limit_default_w == 700.0
    assert found.modes["mig_mode"] == Unavailable("not supported by this device")
    assert found.modes["ecc_enabled"] is True


def test_nvml_facts_are_unavailable_without_nvml() -> None:
    found = environment(facts(), RunContext(), simulated=True)

    assert isinstance(found.pcie, Unavailable)
    assert isinstance(found.power_limit_w, Unavailable)
    assert found.after is None
    assert found.before is None


def test_irrelevant_variables_are_dropped() -> None:
    assert machine().variables == {"CUDA_VISIBLE_DEVICES": "0"}


def test_throttling_is_the_difference_of_both_moments() -> None:
    found = machine(
        before=moment(telemetry(0, slowed_by_power_cap_ns=5_000_000_000)),
        after=moment(telemetry(2_000_000_000, slowed_by_power_cap_ns=5_500_000_000)),
    )

    assert found.slowed == {"power cap": 0.5}


def test_throttling_counter_in_one_moment_is_ignored() -> None:
    first = moment(telemetry(slowed_by_power_cap_ns=Unavailable("busy")))

    assert machine(before=first).slowed == {}


def test_unread_energy_is_unavailable() -> None:
    gone = moment(telemetry(energy_j=Unavailable("not supported")))

    assert gone.energy_j == Unavailable("not supported")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpu": "NVIDIA H100"}, "GPU: NVIDIA H200 before, NVIDIA H100 after"),
        ({"simulated": True}, "simulated: false before, true after"),
        ({"versions": {**VERSIONS, "driver": "1"}}, "driver: 580.159.04 before, 1 after"),
        ({"versions": {**VERSIONS, "torch": "2"}}, "torch: not recorded before, 2 after"),
        ({"multiprocessors": 66}, "SMs: 132 before, 66 after"),
    ],
)
def test_differences_of_machines_are_named(changes: dict[str, Any], words: str) -> None:
    assert machine().differences_from(machine(**changes)) == (words,)


def test_other_gpu_of_model_and_other_cudakit_are_comparable() -> None:
    other = machine(uuid="GPU-1", versions={**VERSIONS, "cudakit": "0.2.0", "python": "3.14"})

    assert machine().differences_from(other) == ()
