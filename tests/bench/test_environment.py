from __future__ import annotations

from typing import Any

import pytest
from bench.example_results import VERSIONS, facts, machine, telemetry

from cudakit.bench.environment import environment, moment
from cudakit.gpu.api.facts import RunContext
from cudakit.units import Unavailable


def test_environment_merges_facts_of_cuda_and_nvml() -> None:
    recorded = machine()

    assert (recorded.gpu, recorded.multiprocessors, recorded.pcie) == (
        "NVIDIA H200",
        132,
        "5.0 x16",
    )
    assert (recorded.sm_clock_max_mhz, recorded.l2_bytes) == (1980.0, 62_914_560)
    assert recorded.power_limit_w == recorded.power_limit_default_w == 700.0
    assert recorded.modes["mig_mode"] == Unavailable("not supported by this device")
    assert recorded.modes["ecc_enabled"] is True


def test_nvml_facts_are_unavailable_without_nvml() -> None:
    recorded = environment(facts(), RunContext(), simulated=True)

    assert isinstance(recorded.pcie, Unavailable)
    assert isinstance(recorded.power_limit_w, Unavailable)
    assert recorded.after is None
    assert recorded.before is None


def test_irrelevant_variables_are_dropped() -> None:
    assert machine().variables == {"CUDA_VISIBLE_DEVICES": "0"}


def test_throttled_time_is_difference_of_counters() -> None:
    recorded = machine(
        before=moment(telemetry(0, slowed_by_power_cap_ns=5_000_000_000)),
        after=moment(telemetry(2_000_000_000, slowed_by_power_cap_ns=5_500_000_000)),
    )

    assert recorded.throttled_seconds == {"power limit": 0.5}


def test_throttling_counter_in_one_moment_is_ignored() -> None:
    first = moment(telemetry(slowed_by_power_cap_ns=Unavailable("busy")))

    assert machine(before=first).throttled_seconds == {}


def test_unread_energy_is_unavailable() -> None:
    telemetry_without_energy = moment(telemetry(energy_j=Unavailable("not supported")))

    assert telemetry_without_energy.energy_j == Unavailable("not supported")


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"gpu": "NVIDIA H100"}, "GPU: NVIDIA H200 before, NVIDIA H100 after"),
        ({"simulated": True}, "simulated: false before, true after"),
        ({"versions": {**VERSIONS, "driver": "1"}}, "driver: 580.159.04 before, 1 after"),
        ({"versions": {**VERSIONS, "torch": "2"}}, "torch: not recorded before, 2 after"),
        ({"multiprocessors": 66}, "SMs: 132 before, 66 after"),
    ],
)
def test_differences_of_machines_are_named(changes: dict[str, Any], difference: str) -> None:
    assert machine().differences_from(machine(**changes)) == (difference,)


def test_other_gpu_of_same_model_and_other_cudakit_version_are_comparable() -> None:
    comparable = machine(uuid="GPU-1", versions={**VERSIONS, "cudakit": "0.2.0", "python": "3.14"})

    assert machine().differences_from(comparable) == ()
