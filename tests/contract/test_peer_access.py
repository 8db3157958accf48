"""Kernels of one real device on allocator memory of another."""

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
    with closing(open_gpu("cuda", 0)) as here:
        try:
            reachable = here.can_access_peer(1)
        except CudaError:
            pytest.skip("there is one GPU")
        if not reachable:
            pytest.skip("the two GPUs are not linked")
        allocator = cudakit.CachingAllocator(here, settings=settings)
        before = allocator.alloc(30 * MIB)
        allocator.enable_peer_access(1)
        after = allocator.alloc(30 * MIB)
        assert allocator.peer_accessible_by == (1,)
        with closing(open_gpu("cuda", 1)) as there:
            bench = Workbench(there, image("cuda"))
            for ptr in (before, after):
                here.fill(ptr, 0, 8, LEGACY)
                here.sync()
                bench.add(ptr, 2, 7)
                there.sync()
                host = here.host_malloc(8)
                here.copy(host, ptr, 8, LEGACY)
                here.sync()
                assert np.frombuffer(here.host_view(host, 8), np.int32).tolist() == [7, 7]
        allocator.close()
