"""``cudakit.profile()`` and ``cudakit.timed()`` on the simulated device."""

from __future__ import annotations

import os
from contextlib import closing

import numpy as np
import pytest

import cudakit
from cudakit.errors import UsageError
from cudakit.gpu.api.arrays import Launch
from cudakit.gpu.sim import Sim

SOURCE = 'extern "C" __global__ void add(float* numbers, int count) {}'
COUNT = 1 << 16


def add(launch: Launch, numbers: int, count: int) -> None:
    launch.update(numbers, np.float32, count)[:] += 1
    launch.busy(50_000)


def device() -> Sim:
    return Sim(host_kernels={"add": add})


def work(gpu: Sim, launches: int) -> None:
    kernel = gpu.kernel(gpu.load(gpu.compile(SOURCE)), "add")
    numbers = gpu.malloc(4 * COUNT)
    for _ in range(launches):
        gpu.launch(kernel, (4, 1, 1), (64, 1, 1), (numbers, np.int32(COUNT)), gpu.stream())


def test_profile_of_a_block_has_its_kernels_and_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with cudakit.profile(gpu="sim") as profile, closing(device()) as gpu:
        work(gpu, 3)
    (profiled,) = profile.result.devices
    assert profile.result.simulated
    assert [(kernel.name, kernel.calls) for kernel in profiled.kernels] == [("add", 3)]
    assert profiled.lines[0].frame.name == "work"
    assert capsys.readouterr() == ("", "")


def test_device_opened_outside_of_the_block_is_not_profiled() -> None:
    with closing(device()) as gpu, cudakit.profile(gpu="sim") as profile:
        work(gpu, 1)
    assert profile.result.devices == ()


def test_blocks_of_simulated_devices_are_independent() -> None:
    counts = []
    for launches in (1, 2):
        with cudakit.profile(gpu="sim") as profile, closing(device()) as gpu:
            work(gpu, launches)
        counts.append(profile.result.devices[0].launches)
    assert counts == [1, 2]
    assert "CUDAKIT_SPOOL" not in os.environ


def test_result_is_not_available_in_the_block() -> None:
    with (
        cudakit.profile(gpu="sim") as profile,
        pytest.raises(UsageError, match="complete when its block has ended"),
    ):
        _ = profile.result


def test_blocks_cannot_be_nested() -> None:
    with (
        cudakit.profile(gpu="sim"),
        pytest.raises(UsageError, match="already recorded"),
        cudakit.profile(gpu="sim"),
    ):
        pass


def test_profile_is_complete_after_an_error_in_the_block() -> None:
    with pytest.raises(ValueError, match="mine"), cudakit.profile(gpu="sim") as profile:
        raise ValueError("mine")
    assert profile.result.devices == ()


def test_timed_block_has_the_time_of_its_work() -> None:
    with closing(device()) as gpu:
        kernel = gpu.kernel(gpu.load(gpu.compile(SOURCE)), "add")
        numbers, stream = gpu.malloc(4 * COUNT), gpu.stream()
        with cudakit.timed(stream, gpu=gpu) as timing:
            for _ in range(4):
                gpu.launch(kernel, (4, 1, 1), (64, 1, 1), (numbers, np.int32(COUNT)), stream)
        assert 200e-6 < timing.seconds < 210e-6
        assert timing.seconds == timing.seconds
