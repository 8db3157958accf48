"""The CUDA C++ sources of all kernels, compiled without a GPU."""

from __future__ import annotations

import pytest
from gpu.test_compile import needs_nvrtc

from cudakit.arrays import bandwidth, compare, fill, nonfinite, poison, random, spin, timestamp
from cudakit.arrays.random import STORED_COUNTER_SOURCE
from cudakit.gpu import selftest
from cudakit.gpu.compile import compile_cuda

MODULES = (bandwidth, compare, fill, nonfinite, poison, random, spin, timestamp, selftest)
# One generation by default; with --all, also the oldest one that NVRTC 13 supports, and each later one.
CAPABILITIES = [
    (9, 0),
    *(
        pytest.param(capability, marks=pytest.mark.thorough)
        for capability in [(7, 5), (8, 0), (8, 9), (10, 0), (12, 0)]
    ),
]


@needs_nvrtc
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_kernel_compiles_for_every_generation(capability: tuple[int, int]) -> None:
    for module in MODULES:
        assert compile_cuda(module.SOURCE, capability).startswith(b"\x7fELF"), module.__name__


@needs_nvrtc
def test_random_kernels_with_a_stored_counter_compile() -> None:
    assert compile_cuda(STORED_COUNTER_SOURCE, (9, 0)).startswith(b"\x7fELF")
