from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudakit.core.bench.energy import EnergyMeter
from cudakit.units import Unavailable


class Device:
    """Draws a constant power, and has a counter that moves in steps of a tenth of a second."""

    def __init__(self, watts: float, phase_s: float = 0.0) -> None:
        self.now_s, self._watts, self._phase_s = 100.0, watts, phase_s

    def counter_j(self) -> float:
        return int((self.now_s + self._phase_s) * 10) / 10 * self._watts


def metered(device: Device, *, run_s: float, for_s: float, idle_s: float = 0.0) -> EnergyMeter:
    meter = EnergyMeter(device.counter_j, lambda: device.now_s)
    runs, end_s = 0, device.now_s + for_s
    while device.now_s < end_s:
        device.now_s += run_s + idle_s
        runs += 1
        meter.look(runs, runs * run_s)
    return meter


@given(
    watts=st.floats(50, 700),
    run_s=st.floats(0.0002, 0.004),
    for_s=st.floats(0.8, 3),
    phase_s=st.floats(0, 0.1),
)
def test_the_energy_of_a_run_is_its_power_by_its_time(
    watts: float, run_s: float, for_s: float, phase_s: float
) -> None:
    meter = metered(Device(watts, phase_s), run_s=run_s, for_s=for_s)

    assert meter.per_run_j() == pytest.approx(watts * run_s, rel=0.02)


def test_a_run_between_two_steps_of_the_counter_has_no_energy() -> None:
    energy = metered(Device(500), run_s=0.001, for_s=0.4).per_run_j()

    assert energy == Unavailable("too short for the energy counter")


def test_a_device_that_waited_has_no_energy_of_a_run() -> None:
    energy = metered(Device(500), run_s=0.001, idle_s=0.001, for_s=2).per_run_j()

    assert energy == Unavailable("the GPU was busy with it for 50% of the time only")


def test_a_device_that_does_not_count_says_so_once() -> None:
    asked = []

    def refuse() -> Unavailable:
        asked.append(1)
        return Unavailable("the GPU does not count energy")

    meter = EnergyMeter(refuse, lambda: float(len(asked)))
    for runs in range(3):
        meter.look(runs, 0.0)

    assert meter.per_run_j() == Unavailable("the GPU does not count energy")
    assert len(asked) == 1


def test_the_counter_is_not_asked_more_often_than_helps() -> None:
    asked: list[float] = []
    device = Device(500)
    meter = EnergyMeter(
        lambda: asked.append(device.now_s) or device.counter_j(), lambda: device.now_s
    )
    for runs in range(1000):
        device.now_s += 0.0001
        meter.look(runs, runs * 0.0001)

    assert 10 <= len(asked) <= 25
