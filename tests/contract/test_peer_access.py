"""Tests that kernels of one real device access allocator memory of another."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import numpy as np
import pytest
from contract.workbench import Workbench

import cudakit
from cudakit.errors import CudaError
from cudakit.gpu.api import LEGACY
from cudakit.gpu.open import open_gpu

pytestmark = pytest.mark.gpu

MIB = 1 << 20
SETTINGS = ("expandable_segments:False", "expandable_segments:True")


@pytest.mark.parametrize("settings", SETTINGS)
def test_peer_kernel_uses_accessible_memory(settings: str, image: Callable[[str], bytes]) -> None:
    with closing(open_gpu("cuda", 0)) as first_gpu:
        try:
            reachable = first_gpu.can_access_peer(1)
        except CudaError:
            pytest.skip("there is one GPU")
        if not reachable:
            pytest.skip("the two GPUs are not linked")
        allocator = cudakit.CachingAllocator(first_gpu, settings=settings)
        ptr_before = allocator.alloc(30 * MIB)
        allocator.enable_peer_access(1)
        ptr_after = allocator.alloc(30 * MIB)
        assert allocator.peer_accessible_by == (1,)
        with closing(open_gpu("cuda", 1)) as second_gpu:
            bench = Workbench(second_gpu, image("cuda"))
            for ptr in (ptr_before, ptr_after):
                first_gpu.fill(ptr, 0, 8, LEGACY)
                first_gpu.sync()
                bench.add(ptr, 2, 7)
                second_gpu.sync()
                host = first_gpu.host_malloc(8)
                first_gpu.copy(host, ptr, 8, LEGACY)
                first_gpu.sync()
                assert np.frombuffer(first_gpu.host_view(host, 8), np.int32).tolist() == [7, 7]
        allocator.close()
