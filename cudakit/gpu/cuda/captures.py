"""Captures while they go on: the graph so far, and what a thread may do meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from cudakit.gpu.api import LEGACY, GraphNode, Stream
from cudakit.gpu.cuda.driver import check, cu, optional
from cudakit.gpu.cuda.graphs import Graphs

_ACTIVE = cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
_RELAXED = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED

# The first that is there is asked: since CUDA 12.3 there are calls that know edges with data, as programmatic
# dependent launches make them, and to which the older ones answer CUDA_ERROR_LOSSY_QUERY. The bindings of
# CUDA 13 have these alone, under the old names.
_INFO = "cuStreamGetCaptureInfo_v3", "cuStreamGetCaptureInfo"
_DEPENDENCIES = "cuGraphNodeGetDependencies_v2", "cuGraphNodeGetDependencies"


class Captures(Graphs):
    """The captures of one device that are under way, whoever began them."""

    def capture_id(self, stream: Stream) -> int | None:
        if stream == LEGACY:  # which is never captured, and not to be asked about while others are
            return None
        return self._capture(stream)[0]

    def capture_ends(self, stream: Stream) -> tuple[GraphNode, ...]:
        return () if stream == LEGACY else self._capture(stream)[1]

    def dependencies(self, node: GraphNode) -> tuple[GraphNode, ...]:
        handle = cu.CUgraphNode(node)
        *_, count = self._newest(_DEPENDENCIES, handle, 0)
        return _numbers(self._newest(_DEPENDENCIES, handle, count)[0][:count]) if count else ()

    @contextmanager
    def relaxed(self) -> Iterator[None]:
        """Let this thread allocate though a stream is captured: it is no part of the graph.

        Other modes of capture refuse cuMemAlloc and break the capture (CUDA Driver API,
        cuThreadExchangeStreamCaptureMode). PyTorch's allocator does the same (CUDAStreamCaptureModeGuard).
        """
        mode = self.call(cu.cuThreadExchangeStreamCaptureMode, _RELAXED)
        try:
            yield
        finally:
            self.call(cu.cuThreadExchangeStreamCaptureMode, mode)

    def _capture(self, stream: Stream) -> tuple[int | None, tuple[GraphNode, ...]]:
        """Return the id of a stream's capture, and the nodes that it has come to."""
        status, number, _, nodes, *_ = self._newest(_INFO, self.handle(stream))
        return (int(number), _numbers(nodes)) if status == _ACTIVE else (None, ())

    def _newest(self, names: tuple[str, str], *args: object) -> Any:
        newer, older = names
        result = self.ask(optional, newer, *args)
        return self.call(getattr(cu, older), *args) if result is None else check(result)


def _numbers(nodes: Iterable[Any]) -> tuple[GraphNode, ...]:
    """Return the driver's handles as numbers: none is given twice while the graph is there."""
    return tuple(GraphNode(int(node)) for node in nodes)
