"""From a function and its buffers to a graph: on which device, and by whose means."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeVar, cast

from cudakit.errors import UsageError
from cudakit.gpu.api import Gpu
from cudakit.gpu.graphed.buffers import buffer_of
from cudakit.gpu.graphed.callable import Graphed
from cudakit.gpu.graphed.captured import DriverGraph
from cudakit.gpu.graphed.streams import OfFrameworks, OfSimulated

if TYPE_CHECKING:
    from cudakit.gpu.cuda.device import Cuda

_T = TypeVar("_T")


def make(
    function: Callable[..., _T],
    buffers: tuple[object, ...],
    device: object,
    warmup: int,
) -> Graphed[_T]:
    """Run a function ahead and capture it; see ``cudakit.graph``."""
    if warmup < 0:
        raise UsageError(f"warmup is {warmup}, and must be at least 0")
    owned = ExitStack()
    try:
        graph = _graph(buffers, device, owned)
        owned.callback(graph.close)
        return Graphed(graph, function, buffers, warmup=warmup, close=owned.close)
    except BaseException:
        owned.close()
        raise


def _graph(buffers: tuple[object, ...], device: object, owned: ExitStack) -> DriverGraph:
    if getattr(device, "simulated", False):
        return DriverGraph(cast("Gpu", device), OfSimulated())
    gpu = _real(buffers, device, owned)
    surroundings = OfFrameworks(gpu, buffers)
    if any(map(_is_tensor, buffers)):
        from cudakit.gpu.graphed.torch_graph import TorchGraph

        return TorchGraph(gpu, surroundings, gpu.ordinal)
    return DriverGraph(gpu, surroundings)


def _real(buffers: tuple[object, ...], device: object, owned: ExitStack) -> Cuda:
    from cudakit.gpu.cuda.device import Cuda

    if isinstance(device, Cuda):
        return device
    if not isinstance(device, int | None):
        raise UsageError(
            f"no device: {device!r}", hint="give CUDA's number of one, or a device itself"
        )
    gpu = Cuda(_ordinal_of(buffers) if device is None else device)
    owned.callback(gpu.close)
    return gpu


def _ordinal_of(buffers: tuple[object, ...]) -> int:
    """Return the number of the device where the first buffer is, or else of the current one."""
    from cudakit.gpu.cuda.current import current_device
    from cudakit.gpu.cuda.driver import cu, initialize

    initialize()
    which = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    for place, given in enumerate(buffers[:1]):
        status, ordinal = cu.cuPointerGetAttribute(which, buffer_of(given, place).ptr)
        if not status:
            return int(ordinal)
    return current_device()


def _is_tensor(given: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(given, torch.Tensor)
