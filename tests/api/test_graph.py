from __future__ import annotations

import doctest
import importlib
import sys
from pathlib import Path

import pytest

import cudakit
from cudakit.gpu.sim import Sim


def test_the_example_of_the_call_runs() -> None:
    module = importlib.import_module("cudakit.arrays.graph")
    results = doctest.testmod(module, extraglobs={"cudakit": cudakit})

    assert results.attempted >= 5
    assert results.failed == 0


def test_no_framework_is_imported_for_it() -> None:
    sim = Sim()
    buffer = sim.malloc(16)
    before = set(sys.modules)
    with cudakit.graph(
        lambda buffer, stream: sim.fill(buffer, 1, 16, stream), buffer, device=sim
    ) as graphed:
        graphed.replay()

    assert not {"torch", "cupy", "numba"} & (set(sys.modules) - before)


@pytest.mark.skipif(
    any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists(),
    reason="needs a machine without a CUDA device",
)
@pytest.mark.parametrize("device", [None, 0])
def test_without_a_driver_the_call_says_what_to_install(device: int | None) -> None:
    with pytest.raises(cudakit.EnvironmentUnusable, match="libcuda") as caught:
        cudakit.graph(lambda buffer: None, 4096, device=device)  # noqa: ARG005
    assert "driver" in caught.value.hint


def test_non_device_is_refused() -> None:
    with pytest.raises(cudakit.UsageError, match="not a device: 'gpu'"):
        cudakit.graph(lambda buffer: None, 4096, device="gpu")  # type: ignore[arg-type]  # noqa: ARG005
