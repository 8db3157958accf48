"""PyTorch's allocator as a subject of scenarios. Needs neither PyTorch's random numbers nor its workspaces.

A capture begins with the driver's call, and its memory is routed as torch.cuda.graph does it, but without the
seed and the offset of the random numbers, which torch.cuda.graph allocates beside every graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from ctypes import CFUNCTYPE, c_int, c_size_t, c_void_p, cast
from typing import Any

import torch
from cuda.bindings import driver

from allocator_scenarios.scenario import DEFAULT, STREAMS, CannotRun
from allocator_scenarios.streams_at_work import DriverCapture, Gate

DEVICE = 0
ALLOC = CFUNCTYPE(c_void_p, c_size_t, c_int, c_void_p)
FREE = CFUNCTYPE(None, c_void_p, c_size_t, c_int, c_void_p)


class CountingUpstream:
    """A pool's upstream that counts its calls."""

    def __init__(self) -> None:
        self.malloc_count = self.free_count = 0
        # Keep the callbacks alive: PyTorch stores only their addresses.
        self._functions = ALLOC(self._alloc), FREE(self._free)
        addresses = [cast(function, c_void_p).value for function in self._functions]
        self.allocator = torch._C._cuda_customAllocator(*addresses)

    def _alloc(self, size_bytes: int, device: int, stream: int) -> int:  # noqa: ARG002
        self.malloc_count += 1
        status, ptr = driver.cuMemAlloc(size_bytes)
        return 0 if status else int(ptr)

    def _free(self, ptr: int, size_bytes: int, device: int, stream: int) -> None:  # noqa: ARG002
        self.free_count += 1
        driver.cuMemFree(ptr)


# Settings that stay from one configuration to the next unless they are set again, with their defaults.
PERSISTENT_SETTING_DEFAULTS = {
    "expandable_segments": "False",
    "release_lock_on_cudamalloc": "False",
    "graph_capture_record_stream_reuse": "False",
    "large_segment_size_mb": "20",
}


class TorchSubject:
    """PyTorch's caching allocator in this process, through tensors and raw pointers."""

    name = "PyTorch"

    def __init__(self, gpu: Any) -> None:
        torch.cuda.set_device(DEVICE)
        torch.cuda.init()
        # PyTorch keeps free blocks by the handles of their streams.
        streams = sorted((torch.cuda.Stream(DEVICE) for _ in range(16)), key=_handle)
        self._streams = dict(zip(STREAMS, streams, strict=False))
        self._gates = {name: Gate(gpu) for name in STREAMS}
        self._blocking_streams = {
            name: torch.cuda.ExternalStream(
                int(gpu.streams.handle(gate.blocked_stream)), device=DEVICE
            )
            for name, gate in self._gates.items()
        }
        self._tensors: dict[int, torch.Tensor] = {}
        self._raw_ptrs: set[int] = set()
        self._streams_using: dict[int, set[str]] = {}
        self._busy_streams: set[str] = set()
        self._persistent: set[str] = set()
        self._observers: list[Callable[[], None]] = []
        # PyTorch decides by the current limit whether a freed block was oversize, so its counts stay
        # wrong after a change of the limit. These are the counts at the begin of the scenario.
        self._oversize_before: dict[str, int] = {}
        self.capturing = False
        self._captured = DriverCapture()
        self._pools: dict[int, Any] = {}
        self._pool_upstreams: dict[int, CountingUpstream] = {}
        self._all_upstreams: list[
            CountingUpstream
        ] = []  # kept, because memory may outlive its pool
        self._graphs: dict[int, tuple[int, int]] = {}  # pool id of each open graph
        self._pool_names: dict[tuple[int, int], str] = {}
        self._last_id = 0
        torch._C._cuda_attach_out_of_memory_observer(self._call_observers)

    # Begin and end of a scenario

    def begin(self, settings: str) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()
        statistics = torch.cuda.memory_stats(DEVICE)
        self._oversize_before = {
            name: n for name, n in statistics.items() if name.startswith("oversize_")
        }
        nonzero = {
            name: n for name, n in self.statistics().items() if n and name != "max_split_size"
        }
        if nonzero:
            raise RuntimeError(f"PyTorch's allocator is not empty: {nonzero}")
        if settings:
            self._configure_if_supported(settings)
        self.record_history(clear=True)

    def end(self) -> None:
        for stream in list(self._busy_streams):
            self.finish_work(stream)
        self._observers.clear()
        self.enable_caching(enabled=True)
        self.set_memory_fraction(1.0)
        for ptr in [*self._tensors, *self._raw_ptrs]:
            self.free(ptr)
        self._close_all()
        torch.cuda.memory._record_memory_history(None)
        self.set_metadata("")
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self.configure("")

    # Memory

    def alloc(self, size_bytes: int, stream: str = DEFAULT, *, raw: bool = False) -> int:
        if raw:
            ptr = torch.cuda.caching_allocator_alloc(size_bytes, DEVICE, self._handle(stream))
            self._raw_ptrs.update([ptr] if ptr else [])
            return int(ptr)
        with torch.cuda.stream(self._stream(stream)):
            tensor = torch.empty(size_bytes, dtype=torch.uint8, device=f"cuda:{DEVICE}")
        ptr = tensor.data_ptr()
        if ptr:
            self._tensors[ptr] = tensor
        return ptr

    def try_alloc(self, size_bytes: int, stream: str = DEFAULT, *, raw: bool = False) -> int:
        try:
            return self.alloc(size_bytes, stream, raw=raw)
        except torch.OutOfMemoryError:
            return 0

    def out_of_memory_message(self, size_bytes: int, stream: str = DEFAULT) -> str:
        try:
            self.free(self.alloc(size_bytes, stream))
        except torch.OutOfMemoryError as error:
            return str(error)
        return ""

    def free(self, ptr: int) -> None:
        if self._tensors.pop(ptr, None) is None:  # removing the tensor frees its memory
            self._raw_ptrs.discard(ptr)
            torch.cuda.caching_allocator_delete(ptr)
        streams = self._streams_using.pop(ptr, set())
        if not self.capturing:
            for stream in streams - self._busy_streams:
                self._streams[stream].synchronize()

    def rejects_free(self, ptr: int) -> bool:
        try:
            torch.cuda.caching_allocator_delete(ptr)
        except RuntimeError:
            return True
        return False

    def record_use(self, ptr: int, stream: str) -> None:
        self._tensors[ptr].record_stream(self._stream(stream))
        self._streams_using.setdefault(ptr, set()).add(stream)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    # Work on streams

    def keep_busy(self, stream: str) -> None:
        self._busy_streams.add(stream)
        self._gates[stream].close()
        self._streams[stream].wait_stream(self._blocking_streams[stream])

    def finish_work(self, stream: str) -> None:
        self._busy_streams.discard(stream)
        self._gates[stream].open()
        self._streams[stream].synchronize()

    def make_wait(self, stream: str, other_stream: str) -> None:
        self._stream(stream).wait_stream(self._stream(other_stream))

    def enqueue_work(self, stream: str) -> None:
        with torch.cuda.stream(self._stream(stream)):
            torch.cuda._sleep(1)

    # Settings and limits

    @property
    def total_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(DEVICE)[1])

    def configure(self, settings: str) -> None:
        keys = {key for key in PERSISTENT_SETTING_DEFAULTS if f"{key}:" in settings}
        defaults = [
            f"{key}:{PERSISTENT_SETTING_DEFAULTS[key]}" for key in sorted(self._persistent - keys)
        ]
        self._persistent = keys
        _set_allocator_settings(",".join([*([settings] if settings else []), *defaults]))

    def _configure_if_supported(self, settings: str) -> None:
        try:
            self.configure(settings)
        except (RuntimeError, ValueError) as error:
            self._persistent.clear()
            raise CannotRun(f"PyTorch refuses {settings}: {error}") from None

    def rejects_settings(self, settings: str) -> bool:
        try:
            _set_allocator_settings(settings)
        except (RuntimeError, ValueError):
            return True
        finally:
            self.configure("")
        return False

    def set_memory_fraction(self, fraction: float) -> None:
        torch.cuda.set_per_process_memory_fraction(fraction, DEVICE)

    def memory_fraction(self) -> float:
        return float(torch.cuda.get_per_process_memory_fraction(DEVICE))

    def memory_fraction_error(self, fraction: Any) -> str:
        try:
            torch.cuda.set_per_process_memory_fraction(fraction, DEVICE)
        except (TypeError, ValueError) as error:
            return type(error).__name__
        return ""

    def enable_caching(self, *, enabled: bool) -> None:
        torch.cuda.caching_allocator_enable(enabled)

    def on_out_of_memory(self, observer: Callable[[], None]) -> None:
        self._observers.append(observer)

    # Pools and captures, by number

    def make_pool(
        self, *, separate_upstream: bool = False, use_on_oom: bool = False, no_split: bool = False
    ) -> int:
        options = {"use_on_oom": use_on_oom, "no_split": no_split}
        enabled_options = {name: True for name, value in options.items() if value}
        upstream = CountingUpstream() if separate_upstream else None
        try:
            pool = torch.cuda.MemPool(upstream.allocator if upstream else None, **enabled_options)
        except TypeError as error:
            raise CannotRun(f"this PyTorch lacks an option of MemPool: {error}") from None
        number = self._new_id(pool.id)
        self._pools[number] = pool
        if upstream:
            self._pool_upstreams[number] = upstream
            self._all_upstreams.append(upstream)
        return number

    def pool_id_and_use_count(self, pool: int) -> tuple[tuple[int, int], int]:
        return self._pools[pool].id, self._pools[pool].use_count()

    def upstream_call_counts(self, pool: int) -> tuple[int, int]:
        upstream = self._pool_upstreams[pool]
        return upstream.malloc_count, upstream.free_count

    @contextmanager
    def use_pool(self, pool: int) -> Iterator[None]:
        with torch.cuda.use_mem_pool(self._pools[pool], DEVICE):
            yield

    def close_pool(self, pool: int) -> None:
        del self._pools[pool]

    def pool_snapshot(self, pool: int) -> list[dict[str, Any]]:
        return self._segments(self._pools[pool].id)

    @contextmanager
    def capture(self, stream: str, graph: int | None = None) -> Iterator[int]:
        pool = self._graphs[graph] if graph is not None else torch.cuda.graph_pool_handle()
        number = self._new_id(pool)
        with torch.cuda.stream(self._stream(stream)):
            torch._C._cuda_beginAllocateToPool(DEVICE, pool)
            self.capturing = True
            self._captured.begin(self._handle(stream))
            try:
                yield number
            finally:
                self._captured.end(self._handle(stream))
                self.capturing = False
                torch._C._cuda_endAllocateToPool(DEVICE, pool)
                self._graphs[number] = pool

    def close_graph(self, graph: int) -> None:
        torch._C._cuda_releasePool(DEVICE, self._graphs.pop(graph))

    def save_pool(self, graph: int) -> Any:
        return torch._C._cuda_getCheckpointState(DEVICE, self._graphs[graph])

    def restore_pool(self, graph: int, state: Any, stale: Collection[int]) -> Collection[int]:
        tensors = [self._tensors.pop(ptr) for ptr in stale]
        storages = [tensor.untyped_storage()._cdata for tensor in tensors]
        torch._C._cuda_setCheckpointPoolState(DEVICE, state, storages, [])
        del tensors
        live = [
            block["address"]
            for segment in self._segments(self._graphs[graph])
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        ]
        # Allocations without a tensor are freed by address.
        self._raw_ptrs.update(ptr for ptr in live if ptr not in self._tensors)
        return live

    def live_allocations_are(self, graph: int, live: Collection[int]) -> bool:
        pool = self._graphs[graph]
        return bool(torch._C._cuda_checkPoolLiveAllocations(DEVICE, pool, set(live)))

    def _close_all(self) -> None:
        """Close every pool and graph."""
        self._pools.clear()
        for graph in list(self._graphs):
            self.close_graph(graph)
        self._pool_names.clear()

    def pool_names(self) -> dict[tuple[int, int], str]:
        return self._pool_names

    def _segments(self, pool: tuple[int, int]) -> list[dict[str, Any]]:
        """List the segments of a pool from a full snapshot."""
        segments = torch.cuda.memory._snapshot()["segments"]
        return [s for s in segments if tuple(s["segment_pool_id"]) == tuple(pool)]

    def _new_id(self, pool: tuple[int, int]) -> int:
        self._last_id += 1
        self._pool_names.setdefault(tuple(pool), f"pool {len(self._pool_names) + 1}")
        return self._last_id

    # Statistics and snapshots

    def statistics(self) -> dict[str, int]:
        torch_stats = torch.cuda.memory_stats(DEVICE)
        return {name: n - self._oversize_before.get(name, 0) for name, n in torch_stats.items()}

    def snapshot(self) -> dict[str, Any]:
        torch_snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
        return torch_snapshot

    def reset_peaks(self) -> None:
        torch.cuda.reset_peak_memory_stats(DEVICE)

    def reset_sums(self) -> None:
        torch.cuda.reset_accumulated_memory_stats(DEVICE)

    def record_history(
        self,
        history: Any = "all",
        *,
        context: Any = None,
        max_entries: int = 1 << 40,
        skip: Collection[str] = (),
        clear: bool = False,
    ) -> None:
        options = {"skip_actions": list(skip)} if skip else {}
        try:
            torch.cuda.memory._record_memory_history(
                history,
                context=context,
                stacks="python",
                max_entries=max_entries,
                clear_history=clear,
                **options,
            )
        except TypeError as error:
            raise CannotRun(
                f"this PyTorch lacks an option of _record_memory_history: {error}"
            ) from None

    def set_metadata(self, text: str) -> None:
        torch.cuda.memory._set_memory_metadata(text)

    def stream_names(self) -> dict[int, str]:
        return {_handle(stream): name for name, stream in self._streams.items()}

    def _stream(self, name: str) -> Any:
        return self._streams[name] if name else torch.cuda.default_stream(DEVICE)

    def _handle(self, name: str) -> int:
        return _handle(self._stream(name))

    def _call_observers(self, *_: object) -> None:
        for observer in self._observers:
            observer()


def _handle(stream: Any) -> int:
    return int(stream.cuda_stream)


def _set_allocator_settings(settings: str) -> None:
    set_settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (set_settings or torch.cuda.memory._set_allocator_settings)(settings)
