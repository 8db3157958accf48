"""Functions that are captured once and replayed: the work of many launches for the price of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from cudakit.gpu.api import Gpu
from cudakit.gpu.graphed.callable import Graphed, capture_function

_T = TypeVar("_T")


def graph(
    fn: Callable[..., _T],
    *buffers: object,
    device: int | Gpu | None = None,
    warmup: int = 3,
) -> Graphed[_T]:
    """Capture what ``fn(*buffers)`` enqueues on a GPU as a CUDA graph, and return it to be replayed.

    Buffers are memory of a device: tensors of torch, arrays with ``__cuda_array_interface__`` (CuPy, Numba)
    or DLPack (cuda.core), or mere addresses. The graph goes on using that memory, and all else that ``fn``
    uses; bind what is no buffer by a lambda or ``functools.partial``.

    What it returns has these methods, none of which waits for the device but ``close``:

    * ``graphed(*contents)`` copies new contents, of the same dtype and shape, into the buffers, replays, and
      returns what ``fn`` returned when it was captured, whose memory each replay writes anew;
    * ``graphed.replay(stream=None)`` replays with what is in the buffers, on the current stream of torch or
      CuPy where the first buffers are theirs, or else on that of ``cudakit.stream``;
    * ``graphed.update(fn=None, warmup=0)`` captures again, or another function, for other parameters;
    * ``graphed.close()`` gives all back; it is a context manager, too.

    ``fn`` first runs ``warmup`` times, and so changes its buffers, and is then captured: both on a stream
    that is made for it, which is the current one of torch and CuPy meanwhile, where the program has imported
    them. Where a library has no current stream (Numba, cuda.core, cuda.bindings), give ``fn`` a parameter
    named ``stream``: it gets the driver's handle, a number that also speaks ``__cuda_stream__``. What goes to
    the legacy default stream is refused, as it would be left out; other threads must not use that stream
    meanwhile either. Garbage is not collected during the capture.

    With torch tensors among the buffers it is a ``torch.cuda.CUDAGraph``, because only that knows how torch's
    allocator (a private pool) and random numbers are captured; pass at least one tensor where ``fn`` uses
    torch. CuPy allocates from a pool of the graph's own. Other allocations inside ``fn`` are refused. No
    gradient flows through a replay.

    ``device`` is CUDA's number of one, or a device of cudakit itself, the simulated one included, which is
    not closed; without it, the device of the first buffer is taken.

    Raises CudaError with the driver's name of what cannot be captured (CUDA_ERROR_STREAM_CAPTURE_...),
    UsageError for what is no buffer and for a function that enqueues nothing, EnvironmentUnusable without
    a driver, and what ``fn`` itself raises.

    >>> from cudakit.gpu.sim import Sim
    >>> sim = Sim()
    >>> buffer = sim.malloc(1024)
    >>> def clear(buffer, stream):
    ...     sim.fill(buffer, 0, 1024, stream)
    >>> with graph(clear, buffer, device=sim) as cleared:
    ...     cleared.replay()
    """
    return capture_function(fn, buffers, device, warmup)
