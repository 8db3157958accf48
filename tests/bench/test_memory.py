from __future__ import annotations

from contextlib import closing
from itertools import count
from typing import Any

import numpy as np
import pytest

from cudakit.bench.case import Verification
from cudakit.bench.memory import OPERATIONS, MemorySpec
from cudakit.bench.pipeline import run
from cudakit.bench.result import BenchResult, CaseResult
from cudakit.bench.roofline import Work
from cudakit.gpu.api import Ptr
from cudakit.gpu.api.arrays import registered_kernels
from cudakit.gpu.sim import Launch, Sim
from cudakit.units import Unavailable

BUFFERS = {"read": 1, "write": 1, "copy": 2, "scale": 2, "triad": 3}
SIZE = 64 << 10


def measure(gpu: Sim, operation: str, **options: Any) -> CaseResult:
    options = {"mode": "isolated", "sizes_bytes": (SIZE,)} | options
    (case,) = run(MemorySpec(operations=(operation,), **options), gpu).results
    return case


@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_operation_is_measured_verified_and_frees_memory(operation: str) -> None:
    with closing(Sim()) as gpu:
        free_bytes = gpu.memory_info().free_bytes
        case = measure(gpu, operation)

        assert case.verified
        assert case.axes == {"operation": operation, "size_bytes": SIZE}
        assert case.bytes_moved == BUFFERS[operation] * SIZE
        assert case.median_s == pytest.approx(
            gpu.costs.device_memory_ns(BUFFERS[operation] * SIZE) / 1e9
        )
        assert gpu.memory_info().free_bytes == free_bytes


@pytest.mark.parametrize("operation", OPERATIONS)
def test_rotated_buffer_sets_are_all_verified(operation: str) -> None:
    with closing(Sim("jetson")) as gpu:
        case = measure(gpu, operation, cache="rotate", sizes_bytes=(1 << 17,))

    assert case.verified
    assert case.method.buffer_sets > 10


@pytest.mark.parametrize("operation", OPERATIONS)
def test_cold_buffers_are_bound_by_memory(operation: str) -> None:
    with closing(Sim()) as gpu:
        case = measure(gpu, operation, cache="flush", sizes_bytes=(1 << 20,))

    assert not isinstance(case.limit, Unavailable)
    assert case.limit.bound == "memory"


def write_nothing(launch: Launch, *_: object) -> None:
    """Do nothing."""


def skip_last_vector(launch: Launch, target: int, *args: Any) -> None:
    words = launch.write(target, np.uint32, 4 * (int(args[-1]) - 1))
    words[:] = (
        args[0] if isinstance(args[0], np.uint32) else launch.read(args[0], np.uint32, len(words))
    )


def round_twice(launch: Launch, target: int, source: int, factor: np.float32, count: int) -> None:
    x = launch.read(source, np.float32, 4 * int(count))
    launch.write(target, np.float32, 4 * int(count))[:] = (factor * x).astype(np.float16)


@pytest.mark.parametrize(
    ("operation", "kernel", "message"),
    [
        *((operation, write_nothing, "") for operation in OPERATIONS),
        ("write", skip_last_vector, "4 of 16384 words"),
        ("copy", skip_last_vector, "4 of 16384 words"),
        ("scale", skip_last_vector, "4 of 16384 values were never written"),
        ("scale", round_twice, "compared with an fp64 computation"),
    ],
)
def test_wrong_kernel_has_no_figures(operation: str, kernel: Any, message: str) -> None:
    with closing(Sim(host_kernels={f"cudakit_{operation}": kernel})) as gpu:
        case = measure(gpu, operation)

    assert not case.verified
    assert isinstance(case.verification, Verification)
    assert isinstance(case.median_s, Unavailable)
    assert message in case.median_s.reason
    assert case.samples_s == ()


def test_incomplete_read_withholds_time() -> None:
    def read_half(launch: Launch, _: int, source: int, *args: np.generic) -> None:
        launch.read(source, np.uint32, 2 * int(args[-1]))

    with closing(Sim(host_kernels={"cudakit_read": read_half})) as gpu:
        case = measure(gpu, "read")

    assert isinstance(case.median_s, Unavailable)
    assert "end of the buffer" in case.median_s.reason


@pytest.mark.parametrize("operation", OPERATIONS)
def test_kernel_that_stops_after_first_check_withholds_time(operation: str) -> None:
    runs = count()

    def stop_after_first(launch: Launch, *args: Any) -> None:
        if next(runs) < 1:
            registered_kernels()[f"cudakit_{operation}"](launch, *args)

    with closing(Sim(host_kernels={f"cudakit_{operation}": stop_after_first})) as gpu:
        case = measure(gpu, operation)

    assert next(runs) > 10
    assert isinstance(case.median_s, Unavailable)


def test_one_wrong_buffer_set_withholds_time() -> None:
    targets: list[Ptr] = []

    def skip_third_set(launch: Launch, target: Ptr, *args: Any) -> None:
        targets.extend({target} - set(targets))
        if target != targets[min(2, len(targets) - 1)] or len(targets) < 3:
            registered_kernels()["cudakit_copy"](launch, target, *args)

    with closing(Sim("jetson", host_kernels={"cudakit_copy": skip_third_set})) as gpu:
        case = measure(gpu, "copy", cache="rotate", sizes_bytes=(1 << 19,))

    assert len(targets) == case.method.buffer_sets > 3
    assert isinstance(case.median_s, Unavailable)


class NotSimulated(Sim):
    """A simulated device that claims to be real, so that its cases are those of a real device."""

    simulated = False


def test_default_sizes_span_l2_and_have_peak_beyond_it() -> None:
    with closing(NotSimulated()) as gpu:
        l2_bytes = gpu.facts().fields["l2_cache_size_bytes"]
        cases = MemorySpec(operations=("copy",)).cases(gpu)

    assert isinstance(l2_bytes, int)
    footprints = [case.size_bytes * case.buffers for case in cases]
    assert footprints == sorted(footprints)
    assert footprints[0] < l2_bytes / 4
    assert sum(l2_bytes / 2 <= footprint <= 2 * l2_bytes for footprint in footprints) >= 4
    assert footprints[-1] > 16 * l2_bytes
    for case, footprint in zip(cases, footprints, strict=True):
        assert isinstance(case.work, Work) == (footprint >= 2 * l2_bytes)


def test_seed_is_recorded_and_reproduces_result() -> None:
    def run_with_seed(seed: int) -> BenchResult:
        with closing(Sim()) as gpu:
            spec = MemorySpec(
                operations=("triad",), sizes_bytes=(4096,), mode="isolated", seed=seed
            )
            return run(spec, gpu, now_ns=lambda: 0)

    assert run_with_seed(3) == run_with_seed(3)
    assert run_with_seed(3).results[0].method.seed == 3
    assert run_with_seed(3).results[0].verification != run_with_seed(4).results[0].verification
