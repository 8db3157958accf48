from __future__ import annotations

from typing import Any

import pytest
from core.devices.diagnose.machines import OK, UNKNOWN, WARN, Machine, gpu, judged, seen

from cudakit.gpu.api.facts import DeviceFacts
from cudakit.units import Unavailable

ALL = ("CK029", "CK030", "CK031", "CK032")
NONE = Unavailable("not supported by this device")


def one(**fields: Any) -> dict[str, Any]:
    return seen(gpu(0, **fields))


@pytest.mark.parametrize("name", ALL)
def test_a_gpu_at_its_full_pace_is_well(machine: Machine, name: str) -> None:
    assert judged(name, machine()).status is OK


@pytest.mark.parametrize("name", ALL)
def test_a_gpu_that_tells_nothing_is_not_blamed(machine: Machine, name: str) -> None:
    silent = seen(DeviceFacts(0, "GPU-1", "0000:01:00.0", {"power_limit_enforced_w": NONE}))

    assert judged(name, machine(**silent)).status is OK


@pytest.mark.parametrize("name", ALL)
def test_without_nvml_pace_is_not_judged(machine: Machine, name: str) -> None:
    assert judged(name, machine(nvml=Unavailable("silent"))).status is UNKNOWN


# --- CK029: PCIe -----------------------------------------------------------------------------------


def test_a_link_that_is_slow_while_idle_is_normal(machine: Machine) -> None:
    found = judged("CK029", machine(**one(pcie_generation=1)))

    assert found.status is OK
    assert "slower while idle, as is normal" in found.summary


def test_a_link_that_is_slow_under_load_is_pointed_out(machine: Machine) -> None:
    found = judged("CK029", machine(**one(pcie_generation=3, utilization_gpu_percent=90)))

    assert found.status is WARN
    assert found.evidence == {"GPU 0": "generation 3 x16 of 5 x16, busy"}


def test_a_narrow_link_is_pointed_out_even_while_idle(machine: Machine) -> None:
    found = judged("CK029", machine(**one(pcie_width=8)))

    assert found.status is WARN
    assert "narrower than card and slot allow" in found.summary


# --- CK030: throttling -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reasons", "status"),
    [
        (("idle",), OK),
        (("software power cap",), OK),
        ((), OK),
        (("hardware slowdown", "hardware thermal slowdown"), WARN),
        (("software thermal slowdown",), WARN),
        (("hardware power brake slowdown",), WARN),
    ],
)
def test_only_heat_and_lack_of_power_slow_a_gpu_down(
    machine: Machine, reasons: tuple[str, ...], status: object
) -> None:
    assert judged("CK030", machine(**one(clock_event_reasons=reasons))).status is status


# --- CK031: power limit ----------------------------------------------------------------------------


def test_a_limit_below_the_default_tells_how_to_restore_it(machine: Machine) -> None:
    found = judged("CK031", machine(**one(power_limit_enforced_w=450.0)))

    assert found.status is WARN
    assert found.evidence == {"GPU 0": "450 W of 700 W"}
    assert found.fix == ("sudo nvidia-smi -i 0 -pl 700",)


def test_a_limit_that_is_a_rounding_away_is_the_default(machine: Machine) -> None:
    assert judged("CK031", machine(**one(power_limit_enforced_w=699.5))).status is OK


# --- CK032: persistence ----------------------------------------------------------------------------


def test_without_persistence_mode_first_programs_wait(machine: Machine) -> None:
    found = judged("CK032", machine(**one(persistence_mode=False)))

    assert found.status is WARN
    assert "nvidia-persistenced" in found.fix[0]


def test_a_display_keeps_the_driver_as_well(machine: Machine) -> None:
    shown = one(persistence_mode=False, display_active=True)

    assert judged("CK032", machine(**shown)).status is OK
