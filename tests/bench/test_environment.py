""""""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from bench.example_results import VERSIONS, facts, machine, telemetry

from cudakit.bench.environment import environment, environment_warnings, likely_causes, moment
from cudakit.gpu.api.facts import Field, RunContext
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


LINK: dict[str, Field] = {
    "pcie_width": 16,
    "pcie_width_max": 16,
    "pcie_generation_max": 5,
    "pcie_generation_device_max": 5,
}


def test_healthy_machine_has_no_likely_cause() -> None:
    assert likely_causes([machine(), machine()], LINK) == ()


def test_cause_of_all_cases_appears_once() -> None:
    shared_machine = machine(other_processes=2, power_limit_w=400.0)

    assert likely_causes([shared_machine, shared_machine], LINK) == (
        "2 other processes use the GPU, so rates may be too low",
        "the power limit is 400 W instead of the default 700 W",
    )


def test_throttled_times_of_cases_are_added() -> None:
    before, after = (
        moment(telemetry(slowed_by_software_thermal_ns=ns)) for ns in (0, 1_500_000_000)
    )
    case = machine(before=before, after=after)

    assert likely_causes([case, case], LINK) == (
        "the clock was throttled for 3 s: heat, by software",
    )


def test_clock_reasons_are_causes_if_throttled_time_is_not_counted() -> None:
    throttled = moment(telemetry(1, clock_event_reasons=("software thermal slowdown",)))
    without_counters = machine(after=replace(throttled, slowed_ns={}))

    (message,) = likely_causes([without_counters], LINK)
    assert "software thermal slowdown" in message


def test_slow_pcie_link_is_a_cause() -> None:
    assert likely_causes([machine()], {**LINK, "pcie_width": 8, "pcie_generation_max": 4}) == (
        "PCIe runs with 8 of 16 lanes",
        "the slot supports PCIe 4.0, and the GPU PCIe 5.0",
    )
    assert likely_causes([machine()], {}) == ()


def test_quiet_machine_has_no_warning() -> None:
    assert environment_warnings([machine()]) == ()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"other_processes": 1}, "1 other process uses the GPU"),
        ({"other_processes": 2}, "2 other processes use the GPU"),
        ({"power_limit_w": 500.0}, "the power limit is 500 W instead of the default 700 W"),
        ({"modes": {"mps_enabled": True}}, "MPS is on"),
        ({"variables": {"CUDA_LAUNCH_BLOCKING": "1"}}, "CUDA_LAUNCH_BLOCKING is set"),
        (
            {"after": moment(telemetry(1, slowed_by_power_cap_ns=500_000_000))},
            "the clock was throttled for 500 ms: power limit",
        ),
    ],
)
def test_disturbed_machine_has_warning(changes: dict[str, Any], expected: str) -> None:
    (message,) = environment_warnings([machine(**changes)])

    assert expected in message


def test_variable_set_to_off_has_no_warning() -> None:
    assert environment_warnings([machine(variables={"CUDA_LAUNCH_BLOCKING": "0"})]) == ()


def test_clock_reasons_are_warned_if_throttled_time_is_not_counted() -> None:
    sample_telemetry = telemetry(
        clock_event_reasons=("idle", "software power cap"),
        slowed_by_power_cap_ns=Unavailable("not supported"),
    )

    assert environment_warnings([machine(before=None, after=moment(sample_telemetry))]) == (
        "the clock was throttled: power limit",
    )
