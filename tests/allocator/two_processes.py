"""Two simulated processes of one machine, each with an allocator."""

from __future__ import annotations

import pytest
from allocator.device import MIB

from cudakit.allocator.ipc import OpenedMemory
from cudakit.api.allocator import CachingAllocator
from cudakit.gpu.api import LEGACY, Ptr
from cudakit.gpu.sim import Sim
from cudakit.torch_rules.settings import Settings

CAPACITY = 256 * MIB
PLAIN, EXPANDING = Settings(), Settings(expandable_segments=True)


class Pair:
    """Two processes of one machine, and their written bytes."""

    def __init__(self, settings: Settings = PLAIN, *, shares: bool = True) -> None:
        self.first = Sim(capacity_bytes=CAPACITY)
        self.second = Sim(capacity_bytes=CAPACITY, same_machine_as=self.first)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC", "1" if shares else "0")
            self.exporter = CachingAllocator(self.first, settings=settings.as_text())
        self.importer = CachingAllocator(self.second, settings="")

    def write(self, ptr: int, value: int, size_bytes: int) -> None:
        self.first.fill(Ptr(ptr), value, size_bytes, LEGACY)
        self.first.sync()

    def read(self, memory: OpenedMemory, begin: int = 0, size_bytes: int = 4) -> bytes:
        host = self.second.host_malloc(size_bytes)
        self.second.copy(host, Ptr(memory.ptr + begin), size_bytes, LEGACY)
        self.second.sync()
        return bytes(self.second.host_view(host, size_bytes))
