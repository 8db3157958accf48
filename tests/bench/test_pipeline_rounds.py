from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import chain, count, pairwise, repeat
from statistics import median
from typing import Any

import numpy as np
import pytest
from bench.workloads import Busy, Copy, busy_device, stamps_at

from cudakit.bench.case import Method, Mode, Rule, Workload
from cudakit.bench.pipeline import Outcome, measure_case
from cudakit.bench.summary import Measurement
from cudakit.bench.timer import Timer
from cudakit.errors import CudaError, UsageError
from cudakit.gpu.open import open_gpu
from cudakit.gpu.sim import Sim
from cudakit.units import Unavailable

MODES: list[Mode] = ["isolated", "batch", "graph", "host", "call"]
METHOD = Method("isolated", "hot")
ROTATED = Method("isolated", "rotate")
RULE = Rule(min_samples=10, min_time_s=0.0, timeout_s=0.5)


@pytest.fixture
def timer() -> Iterator[Timer]:
    # The model with the smallest L2 cache: cold buffers are small, and quickly copied.
    with closing(Sim("jetson")) as gpu, closing(Timer(gpu)) as timer:
        yield timer


def single_measurement(outcomes: tuple[Outcome, ...]) -> Measurement:
    (measurement,) = outcomes
    assert isinstance(measurement, Measurement)
    return measurement


def run(timer: Timer, workload: Workload, method: Method = METHOD, **options: Any) -> Measurement:
    return single_measurement(measure_case(timer, [workload], method, **options))


def sampling_s(measured: Measurement) -> float:
    """Return the time from the first sample to the last."""
    return (measured.telemetry_after.time_ns - measured.telemetry_before.time_ns) / 1e9


def expected_ns(timer: Timer, size_bytes: int) -> int:
    assert isinstance(timer.gpu, Sim)
    return timer.gpu.costs.device_memory_ns(2 * size_bytes)


# --- modes and L2 states


@pytest.mark.parametrize("mode", MODES)
def test_mode_measures_verifies_and_records_method(timer: Timer, mode: Mode) -> None:
    copy = Copy(size_bytes=1 << 18)
    free = timer.gpu.memory_info().free_bytes

    measured = run(timer, copy, replace(ROTATED, mode=mode, seed=7))

    assert measured.verification.passed
    assert measured.samples.converged
    assert measured.stop_reason == "precision"
    assert len(measured.samples.times_s) >= 10
    assert len(measured.samples.sm_clock_hz) == len(measured.samples.times_s)
    assert measured.axes == {"size_bytes": 1 << 18}
    assert measured.bytes_moved == 1 << 19
    assert measured.method.mode == mode
    assert measured.method.seed == 7
    assert measured.method.buffer_sets == 17
    assert measured.warnings == ()
    assert timer.gpu.memory_info().free_bytes == free
    assert copy.prepared[0].closed == 1


@pytest.mark.parametrize("mode", ["isolated", "batch"])
def test_sample_is_device_time(timer: Timer, mode: Mode) -> None:
    measured = run(timer, Copy(size_bytes=1 << 20), replace(METHOD, mode=mode))

    device_s = expected_ns(timer, 1 << 20) / 1e9
    assert measured.samples.times_s == pytest.approx([device_s] * len(measured.samples.times_s))


def test_batch_and_graph_samples_fill_a_millisecond(timer: Timer) -> None:
    for mode in ("batch", "graph"):
        measured = run(timer, Copy(size_bytes=1 << 20), replace(METHOD, mode=mode))
        assert measured.method.executions * measured.samples.times_s[0] >= 0.0005


def test_host_mode_exceeds_device_time(timer: Timer) -> None:
    host, isolated = (
        run(timer, Copy(), replace(METHOD, mode=mode)) for mode in ("host", "isolated")
    )

    assert min(host.samples.times_s) > max(isolated.samples.times_s)
    assert not host.method.blocker
    assert isolated.method.blocker


def test_call_mode_is_below_host_mode(timer: Timer) -> None:
    call, host = (run(timer, Copy(), replace(METHOD, mode=mode)) for mode in ("call", "host"))

    assert max(call.samples.times_s) < min(host.samples.times_s)
    assert not call.method.blocker


@pytest.mark.parametrize("mode", MODES)
def test_buffer_sets_rotate(timer: Timer, mode: Mode) -> None:
    copy = Copy(size_bytes=1 << 19)

    sets = run(timer, copy, replace(ROTATED, mode=mode)).method.buffer_sets

    indices = copy.prepared[0].indices
    # A captured execution does not run, so the first launch of the graph uses the same index again.
    steps = {(b - a) % sets for a, b in pairwise(indices)}
    assert sets == 9
    assert steps <= ({1, 1 - sets} if mode != "graph" else {1, 0})


def test_hot_and_flushed_modes_use_one_buffer_set(timer: Timer) -> None:
    for cache in ("hot", "flush"):
        copy = Copy()
        measured = run(timer, copy, replace(METHOD, cache=cache))
        assert measured.method.buffer_sets == 1
        assert set(copy.prepared[0].indices) == {0}


def test_flush_precedes_each_execution_untimed(timer: Timer) -> None:
    flushed = run(timer, Copy(), replace(METHOD, cache="flush"))
    hot = run(timer, Copy(), replace(METHOD, cache="hot"))

    assert flushed.samples.times_s[0] == hot.samples.times_s[0]
    flush_s = 2 * timer.l2_bytes / 4.92e12
    assert sampling_s(flushed) / len(flushed.samples.times_s) > flush_s


@pytest.mark.parametrize("mode", ["batch", "graph"])
def test_flush_within_batch_or_graph_is_rejected(timer: Timer, mode: Mode) -> None:
    copy = Copy()

    with pytest.raises(UsageError, match=f"executions of a {mode}") as caught:
        run(timer, copy, replace(METHOD, mode=mode, cache="flush"))
    assert "isolated" in caught.value.hint
    assert copy.prepared[0].closed == 1


def test_buffer_sets_that_do_not_fit_are_warned() -> None:
    with closing(Sim(capacity_bytes=40 << 20)) as gpu, closing(Timer(gpu)) as timer:
        measured = run(timer, Copy(size_bytes=8 << 20), ROTATED)

    assert measured.method.buffer_sets == 2
    assert any("buffer sets" in warning for warning in measured.warnings)


# --- wrong values


def test_wrong_value_before_first_sample_withholds_figure(timer: Timer) -> None:
    measured = run(timer, Copy(spoiled=(0, 0)))

    assert not measured.verification.passed
    assert measured.verification.detail == "1 words are wrong"
    assert measured.samples.times_s == ()
    assert measured.stop_reason == "wrong"
    assert sampling_s(measured) == 0


@pytest.mark.parametrize("mode", MODES)
def test_wrong_value_after_first_sample_withholds_figure(timer: Timer, mode: Mode) -> None:
    copy = Copy(size_bytes=1 << 20, spoiled=(2, 15))

    measured = run(timer, copy, replace(ROTATED, mode=mode))

    assert not measured.verification.passed
    assert measured.samples.times_s == ()
    assert not measured.samples.converged
    assert measured.stop_reason == "wrong"
    assert sampling_s(measured) > 0


def test_wrong_workload_leaves_figures_of_interleaved_workload(timer: Timer) -> None:
    wrong, right = measure_case(timer, [Copy(spoiled=(0, 0)), Copy()], METHOD)

    assert wrong.samples.times_s == ()
    assert right.samples.converged


# --- devices that do not settle, and samples that do not converge


def swinging(low: int, high: int) -> Iterator[int]:
    return chain.from_iterable(repeat((low, high)))


def test_scattered_samples_end_at_timeout_unconverged() -> None:
    durations_ns = (10_000 * 1000 ** ((n * 0.618) % 1) for n in count())
    with closing(busy_device(int(n) for n in durations_ns)) as gpu, closing(Timer(gpu)) as timer:
        measured = run(timer, Busy(gpu), replace(METHOD, rule=replace(RULE, timeout_s=0.05)))

    assert not measured.samples.converged
    assert measured.stop_reason == "timeout"
    assert 0.05 <= sampling_s(measured) < 0.07


def test_unsettled_device_ends_warm_up_at_limit_with_warning() -> None:
    rising = (1_000_000 + 20_000 * n for n in count())
    with closing(busy_device(rising)) as gpu, closing(Timer(gpu)) as timer:
        method = replace(METHOD, warmup_s=0.1, rule=RULE)
        measured = run(timer, Busy(gpu), method, skip_settling=False)

    assert measured.method.warmup_s == pytest.approx(3.0, rel=0.01)
    assert any("warm-up" in warning for warning in measured.warnings)


def test_sampling_begins_after_device_settled() -> None:
    slow = [5_000_000 - 40_000 * n for n in range(100)]
    with closing(busy_device([*slow, 1_000_000])) as gpu, closing(Timer(gpu)) as timer:
        method = replace(METHOD, warmup_s=0.1, rule=RULE)
        measured = run(timer, Busy(gpu), method, skip_settling=False)

    assert measured.warnings == ()
    assert set(np.round(measured.samples.times_s, 9)) == {0.001001}


def test_simulated_device_skips_settling(timer: Timer) -> None:
    measured = run(timer, Copy(), replace(METHOD, warmup_s=5.0))

    assert sampling_s(measured) < 0.01
    assert measured.method.warmup_s < 0.01


def test_throttled_samples_are_discarded_with_growing_pauses() -> None:
    clocks = chain(repeat(1_900_000, 40), [1_000_000] * 3, repeat(1_900_000))
    pauses: list[float] = []
    device = busy_device([1_000_000], cudakit_timestamp=stamps_at(clocks))
    with closing(device) as gpu, closing(Timer(gpu)) as timer:
        method = replace(METHOD, warmup_s=0.01, rule=replace(RULE, min_samples=60))
        measured = run(timer, Busy(gpu), method, skip_settling=False, pause=pauses.append)

    assert measured.samples.discarded == 3
    assert pauses == [0.05, 0.1, 0.2]
    assert min(measured.samples.sm_clock_hz) == pytest.approx(1.9e9, rel=1e-3)


# --- timeouts of the blocking kernel


def test_synchronizing_work_is_measured_without_blocking_kernel() -> None:
    with closing(Sim()) as gpu, closing(Timer(gpu, blocking_limit_s=0.001)) as timer:
        measured = run(timer, Copy(before_each=gpu.sync), replace(METHOD, rule=RULE))

    assert measured.verification.passed
    assert measured.samples.converged
    assert not measured.method.blocker
    assert any("blocker" in warning for warning in measured.warnings)
    assert max(measured.samples.times_s) < 0.001


def test_single_timeout_of_blocking_kernel_discards_one_sample() -> None:
    calls = count()

    def wait_once() -> None:
        if next(calls) == 30:
            gpu.sync()

    with closing(Sim()) as gpu, closing(Timer(gpu, blocking_limit_s=0.001)) as timer:
        method = replace(METHOD, rule=replace(RULE, min_samples=60))
        measured = run(timer, Copy(before_each=wait_once), method)

    assert measured.samples.discarded == 1
    assert measured.samples.converged
    assert measured.method.blocker


# --- interrupts and failures


def interrupting_after(runs: int) -> Callable[[], None]:
    calls = count()

    def interrupt() -> None:
        if next(calls) == runs:
            raise KeyboardInterrupt

    return interrupt


@pytest.mark.parametrize(("mode", "runs"), [("isolated", 10), ("batch", 2500), ("host", 10)])
def test_interrupt_keeps_verified_samples(timer: Timer, mode: Mode, runs: int) -> None:
    rule = replace(RULE, min_samples=10**9, timeout_s=10**9)
    copy = Copy(before_each=interrupting_after(runs))

    measured = run(timer, copy, replace(METHOD, mode=mode, rule=rule))

    assert measured.was_interrupted
    assert measured.verification.passed
    assert not measured.samples.converged
    assert 1 < len(measured.samples.times_s) < 10
    assert copy.prepared[0].closed == 1
    assert timer.now_s() < 0.5  # The blocking kernel was released before its time limit.


def test_interrupt_before_any_sample_propagates(timer: Timer) -> None:
    for runs in (0, 2, 4):  # Executions while verifying, estimating the time, and warming up.
        copy = Copy(before_each=interrupting_after(runs))
        with pytest.raises(KeyboardInterrupt):
            run(timer, copy)
        assert copy.prepared[0].closed == 1


def test_stream_works_after_interrupted_capture(timer: Timer) -> None:
    copy = Copy(before_each=interrupting_after(15))

    with pytest.raises(KeyboardInterrupt):
        run(timer, copy, replace(METHOD, mode="graph"))

    assert run(timer, Copy(), replace(METHOD, mode="graph")).verification.passed


def test_interrupt_ends_run_that_waits_for_samples_of_other_run() -> None:
    durations_ns = (int(10_000 * 1000 ** ((n * 0.618) % 1)) for n in count())
    method = replace(METHOD, rule=replace(RULE, timeout_s=10**9))
    with closing(busy_device(durations_ns)) as gpu, closing(Timer(gpu)) as timer:
        steady = Copy(before_each=interrupting_after(200))
        measurement, other_measurement = measure_case(timer, [steady, Busy(gpu)], method)

    assert (measurement.stop_reason, other_measurement.stop_reason) == ("precision", "interrupted")
    assert measurement.telemetry_after.time_ns > measurement.telemetry_before.time_ns


def test_device_error_propagates_and_releases_workload(timer: Timer) -> None:
    copy = Copy()
    assert isinstance(timer.gpu, Sim)
    timer.gpu.fail_next("elapsed", CudaError(1, "CUDA_ERROR_INVALID_VALUE", "injected error"))

    with pytest.raises(CudaError, match="injected error"):
        run(timer, copy)
    assert copy.prepared[0].closed == 1


# --- interleaved workloads, progress and energy


def test_interleaved_workloads_run_once_untimed_before_each_sample(timer: Timer) -> None:
    order: list[str] = []
    measurement = Copy(name="one", before_each=lambda: order.append("one"))
    other_measurement = Copy(name="other", before_each=lambda: order.append("other"))

    first, second = measure_case(timer, [measurement, other_measurement], METHOD)

    assert len(first.samples.times_s) == len(second.samples.times_s) == 10
    assert first.method.interleaved == ("one", "other")
    # After verification, estimates and warm-up, each sample is preceded by one untimed execution.
    assert order[-40:] == ["one", "one", "other", "other"] * 10


def test_progress_follows_each_sample_within_unit_range() -> None:
    reports: list[tuple[str, float]] = []
    with closing(busy_device([1_000_000])) as gpu, closing(Timer(gpu)) as timer:
        method = replace(METHOD, warmup_s=0.2, rule=replace(RULE, min_samples=300))
        run(
            timer,
            Busy(gpu, axes={"n": 3}),
            method,
            skip_settling=False,
            progress=lambda stage, fraction: reports.append((stage, fraction)),
        )

    assert {stage for stage, _ in reports} == {"busy n 3: warming up", "busy n 3"}
    assert len([stage for stage, _ in reports if stage == "busy n 3"]) >= 300
    assert all(0 <= fraction <= 1 for _, fraction in reports)


def test_garbage_collector_is_off_during_sampling(timer: Timer) -> None:
    states: list[bool] = []

    run(
        timer, Copy(before_each=lambda: states.append(gc.isenabled())), replace(METHOD, cache="hot")
    )

    assert states[0]  # The collector is on while the workload is prepared and verified.
    assert not any(states[1:-1])
    assert gc.isenabled()


def test_energy_is_counted_after_samples_if_requested(timer: Timer) -> None:
    assert run(timer, Copy()).energy_j == Unavailable("energy was not measured")

    method = replace(METHOD, energy_s=0.5, rule=RULE)
    measured = run(timer, Copy(), method, skip_settling=False)
    assert measured.energy_j == Unavailable("the GPU has no energy counter")
    assert measured.method.energy_s == 0.5


@pytest.mark.gpu
def test_energy_of_execution_is_about_power_times_time() -> None:
    method = replace(METHOD, mode="batch", warmup_s=0.5, energy_s=0.5)
    with closing(open_gpu("cuda")) as gpu, closing(Timer(gpu)) as device_timer:
        measured = run(device_timer, Copy(size_bytes=1 << 30), method)
        limit_w = gpu.telemetry().fields["power_limit_w"]

    time_s = median(measured.samples.times_s)
    assert isinstance(measured.energy_j, float)
    assert isinstance(limit_w, float)
    assert 0.2 * limit_w * time_s < measured.energy_j < 1.2 * limit_w * time_s
