"""PyTorch's private pools and captures.

A capture is begun with the driver, and its memory routed as torch.cuda.graph does it, but without the seed
and the offset of the random numbers, which that allocates beside every graph.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from ctypes import CFUNCTYPE, c_int, c_size_t, c_void_p, cast
from typing import Any

import torch
from cuda.bindings import driver

from allocator_scenarios.capturing import CapturedByDriver
from allocator_scenarios.subject import CannotRun

DEVICE = 0
ALLOC = CFUNCTYPE(c_void_p, c_size_t, c_int, c_void_p)
FREE = CFUNCTYPE(None, c_void_p, c_size_t, c_int, c_void_p)


class Calls:
    """An allocator of segments that counts how often it is asked."""

    def __init__(self) -> None:
        self.made = self.freed = 0
        # Kept: PyTorch knows no more than their addresses.
        self._functions = ALLOC(self._alloc), FREE(self._free)
        addresses = [cast(function, c_void_p).value for function in self._functions]
        self.allocator = torch._C._cuda_customAllocator(*addresses)

    def _alloc(self, size_bytes: int, device: int, stream: int) -> int:  # noqa: ARG002
        self.made += 1
        status, ptr = driver.cuMemAlloc(size_bytes)
        return 0 if status else int(ptr)

    def _free(self, ptr: int, size_bytes: int, device: int, stream: int) -> None:  # noqa: ARG002
        self.freed += 1
        driver.cuMemFree(ptr)


class TorchPools:
    """Pools and graphs by number."""

    def __init__(self) -> None:
        self.capturing = False
        self._captured = CapturedByDriver()
        self._pools: dict[int, Any] = {}
        self._calls: dict[int, Calls] = {}
        self._every_call: list[Calls] = []  # memory may outlive its pool
        self._graphs: dict[int, tuple[int, int]] = {}  # ids of pools, of graphs that are there
        self._names: dict[tuple[int, int], str] = {}
        self._made = 0

    def make_pool(
        self, *, own: bool = False, use_on_oom: bool = False, no_split: bool = False
    ) -> int:
        options = {"use_on_oom": use_on_oom, "no_split": no_split}
        wanted = {name: True for name, value in options.items() if value}
        calls = Calls() if own else None
        try:
            pool = torch.cuda.MemPool(calls.allocator if calls else None, **wanted)
        except TypeError as error:
            raise CannotRun(f"this PyTorch makes pools otherwise: {error}") from None
        number = self._numbered(pool.id)
        self._pools[number] = pool
        if calls:
            self._calls[number] = calls
            self._every_call.append(calls)
        return number

    def pool_facts(self, pool: int) -> tuple[tuple[int, int], int]:
        return self._pools[pool].id, self._pools[pool].use_count()

    def own_calls(self, pool: int) -> tuple[int, int]:
        return self._calls[pool].made, self._calls[pool].freed

    @contextmanager
    def inside(self, pool: int) -> Iterator[None]:
        with torch.cuda.use_mem_pool(self._pools[pool], DEVICE):
            yield

    def drop_pool(self, pool: int) -> None:
        del self._pools[pool]

    def pool_snapshot(self, pool: int) -> list[dict[str, Any]]:
        return self._segments(self._pools[pool].id)

    @contextmanager
    def capture(self, stream: str, graph: int | None = None) -> Iterator[int]:
        pool = self._graphs[graph] if graph is not None else torch.cuda.graph_pool_handle()
        number = self._numbered(pool)
        with self._on(stream) as handle:  # type: ignore[attr-defined]
            torch._C._cuda_beginAllocateToPool(DEVICE, pool)
            self.capturing = True
            self._captured.begin(handle)
            try:
                yield number
            finally:
                self._captured.end(handle)
                self.capturing = False
                torch._C._cuda_endAllocateToPool(DEVICE, pool)
                self._graphs[number] = pool

    def drop_graph(self, graph: int) -> None:
        torch._C._cuda_releasePool(DEVICE, self._graphs.pop(graph))

    def save_pool(self, graph: int) -> Any:
        return torch._C._cuda_getCheckpointState(DEVICE, self._graphs[graph])

    def restore_pool(self, graph: int, state: Any, stale: Collection[int]) -> Collection[int]:
        tensors = [self._tensor(ptr) for ptr in stale]  # type: ignore[attr-defined]
        storages = [tensor.untyped_storage()._cdata for tensor in tensors]
        torch._C._cuda_setCheckpointPoolState(DEVICE, state, storages, [])
        del tensors
        self._forget(stale)  # type: ignore[attr-defined]
        live = [
            block["address"]
            for segment in self._segments(self._graphs[graph])
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        ]
        self._adopt(live)  # type: ignore[attr-defined]
        return live

    def live_set_is(self, graph: int, live: Collection[int]) -> bool:
        pool = self._graphs[graph]
        return bool(torch._C._cuda_checkPoolLiveAllocations(DEVICE, pool, set(live)))

    def drop_all(self) -> None:
        """Let every pool and every graph go."""
        self._pools.clear()
        for graph in list(self._graphs):
            self.drop_graph(graph)
        self._names.clear()

    def pool_names(self) -> dict[tuple[int, int], str]:
        return self._names

    def _segments(self, pool: tuple[int, int]) -> list[dict[str, Any]]:
        """List the segments of a pool, of a whole snapshot: of a part of one, the trace tells otherwise."""
        segments = torch.cuda.memory._snapshot()["segments"]
        return [s for s in segments if tuple(s["segment_pool_id"]) == tuple(pool)]

    def _numbered(self, pool: tuple[int, int]) -> int:
        self._made += 1
        self._names.setdefault(tuple(pool), f"pool {len(self._names) + 1}")
        return self._made
