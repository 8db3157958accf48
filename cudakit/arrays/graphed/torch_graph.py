"""Capture of functions of torch tensors as a torch.cuda.CUDAGraph.

Only torch.cuda.CUDAGraph keeps allocations of a capture in a private pool of torch's caching allocator, and
advances the random number generators at each replay ("CUDA Graphs" in torch's notes on CUDA semantics).
"""

from __future__ import annotations

import gc
import sys
from typing import Any, TypeVar

from cudakit.arrays.graphed.capture import DriverGraph, GraphDevice, Work, run_captured
from cudakit.arrays.graphed.streams import StreamSource
from cudakit.gpu.api import Stream

_T = TypeVar("_T")

# Handles of the legacy default stream: NULL and CU_STREAM_LEGACY.
_LEGACY_HANDLES = (0, 1)


class TorchGraph(DriverGraph):
    """The captured work of a function of torch tensors."""

    def __init__(self, gpu: GraphDevice, streams: StreamSource, ordinal: int) -> None:
        super().__init__(gpu, streams)
        self._torch: Any = sys.modules["torch"]
        self._ordinal = ordinal
        self._graph: Any = None

    def capture(self, work: Work[_T]) -> _T:
        graph, handle = self._torch.cuda.CUDAGraph(), self.streams.handle(self.capture_stream)
        pool_id = self._torch.cuda.graph_pool_handle()
        # Release cached memory, because the graph's private pool cannot reuse it.
        gc.collect()
        self._torch.cuda.empty_cache()
        self.gpu.sync()
        with self.streams.as_current(handle):
            _, work_result = run_captured(
                lambda: work(handle),
                begin_capture=lambda: graph.capture_begin(
                    pool_id, capture_error_mode="thread_local"
                ),
                end_capture=lambda: self._end_capture(graph, pool_id),
                destroy_graph=lambda _: None,
            )
        self._graph = graph
        return work_result

    def _end_capture(self, graph: Any, pool_id: tuple[int, int]) -> None:
        """End the capture; after a failure, release the private pool, which torch would leave in use.

        torch's allocator aborts the process when a MemPool is deleted while a pool is in use by a capture
        (CUDAGraph::capture_end of aten/src/ATen/cuda/CUDAGraph.cpp and synchronize_and_free_events of
        c10/cuda/CUDACachingAllocator.cpp, torch 2.11).
        """
        try:
            graph.capture_end()
        except Exception:
            torch_c = self._torch._C
            if hasattr(torch_c, "_cuda_endAllocateToPool"):  # since torch 2.8
                torch_c._cuda_endAllocateToPool(self._ordinal, pool_id)
                torch_c._cuda_releasePool(self._ordinal, pool_id)
            raise

    def update(self, work: Work[_T]) -> _T:
        """Capture the work again; the new graph replaces the old one and may have another topology."""
        return self.capture(work)

    def launch(self, stream: Stream) -> None:
        cuda, handle = self._torch.cuda, int(self.streams.handle(stream))
        with cuda.device(self._ordinal):
            external_stream = cuda.ExternalStream(handle, self._ordinal)
            replay_stream = cuda.default_stream() if handle in _LEGACY_HANDLES else external_stream
            with cuda.stream(replay_stream):
                self._graph.replay()

    def close(self) -> None:
        self.gpu.sync()
        self._graph = None
        super().close()
