from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudakit.arrays.spin import Spin
from cudakit.bench.energy import CounterChanges, energy_per_execution
from cudakit.gpu.api import Stream
from cudakit.gpu.sim import Sim
from cudakit.units import Unavailable

MIN_S = 0.5


class Counter:
    """An energy counter of a device with constant power; it changes every 0.1 s, and a read takes 5 ms."""

    def __init__(self, watts: float, phase_s: float = 0.0) -> None:
        self.now_s, self._watts, self._phase_s = 100.0, watts, phase_s

    def read_j(self) -> float:
        self.now_s += 0.005
        return int((self.now_s + self._phase_s) * 10) / 10 * self._watts

    def clock(self) -> float:
        return self.now_s


@given(watts=st.floats(50, 700), phase_s=st.floats(0, 0.1))
def test_power_is_measured_between_counter_changes(watts: float, phase_s: float) -> None:
    counter = Counter(watts, phase_s)
    counter_changes = CounterChanges(counter.read_j, counter.clock)
    while counter_changes.elapsed_s < MIN_S:
        counter_changes.poll()

    assert counter_changes.power_w() == pytest.approx(watts, rel=0.02)


def test_device_without_energy_counter_runs_no_work() -> None:
    reason = Unavailable("the GPU does not count energy")
    gpu, enqueued = Sim(), []

    energy_j = energy_per_execution(
        gpu,
        gpu.stream(),
        enqueued.append,
        executions=1,
        execution_s=1e-3,
        min_s=MIN_S,
        now_s=lambda: 0.0,
        progress=lambda _: None,
        read_j=lambda: reason,
    )

    assert energy_j == reason
    assert enqueued == []


class BusyDevice:
    """A device that spins for 2 ms per execution, and an energy counter of its virtual time."""

    EXECUTION_S = 2e-3

    def __init__(
        self, watts: float = 500.0, pause_ns: int = 0, execution_s: float = EXECUTION_S
    ) -> None:
        self._execution_s = execution_s
        self.gpu = Sim()
        self.stream: Stream = self.gpu.stream()
        self._spin, self._pause_ns, self._watts = Spin(self.gpu), pause_ns, watts

    def now_s(self) -> float:
        return self.gpu.clock.now_ns / 1e9

    def read_j(self) -> float:
        self.gpu.clock.advance(2_000_000)
        return int(self.now_s() * 10) / 10 * self._watts

    def work(self, stream: Stream) -> None:
        self._spin.for_(int(self._execution_s * 1e9) + self._pause_ns, stream)

    def measure(self, progress: Callable[[float], None] = lambda _: None) -> float | Unavailable:
        return energy_per_execution(
            self.gpu,
            self.stream,
            self.work,
            executions=1,
            execution_s=self._execution_s,
            min_s=MIN_S,
            now_s=self.now_s,
            progress=progress,
            read_j=self.read_j,
        )


def test_energy_of_run_is_power_times_time() -> None:
    fractions: list[float] = []

    energy_j = BusyDevice().measure(fractions.append)

    assert energy_j == pytest.approx(500 * BusyDevice.EXECUTION_S, rel=0.03)
    assert all(0 <= fraction < 1 for fraction in fractions)


def test_execution_longer_than_counter_window_has_energy() -> None:
    fractions: list[float] = []

    assert BusyDevice(execution_s=2.0).measure(fractions.append) == pytest.approx(
        500 * 2.0, rel=0.03
    )
    assert all(0 <= fraction <= 1 for fraction in fractions)


def test_idle_gaps_make_energy_unavailable() -> None:
    assert BusyDevice(pause_ns=2_000_000).measure() == Unavailable(
        "the GPU was busy for only 50% of the time"
    )


def test_wait_for_slow_counter_is_bounded() -> None:
    device = BusyDevice(watts=0.0)

    assert device.measure() == Unavailable("the energy counter changed too rarely")
    assert device.now_s() < 4 * MIN_S
