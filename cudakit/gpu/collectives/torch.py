"""Collective operations by torch.distributed's NCCL backend, on memory that cudakit allocated.

cudakit creates the backend object itself instead of calling ``init_process_group``. One process can then
have several ranks, one per thread.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np

from cudakit.errors import CollectiveError, EnvironmentUnusable, MissingDependency, Unsupported
from cudakit.gpu.api import Ptr, Stream
from cudakit.gpu.api.collectives import ROOT, Collective
from cudakit.gpu.collectives.library import CollectiveDevice

_TIMEOUT = timedelta(seconds=60)
_PAUSE_S = 0.0002
# torch's data types by the name of the element type.
_DATA_TYPES = {
    "int8": "int8",
    "int32": "int32",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
    "bf16": "bfloat16",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
# Operations that torch performs in place only: its functions take one tensor.
_IN_PLACE_ONLY = ("all-reduce", "broadcast", "reduce")


# Names that cudakit uses. torch.distributed has some of them, its module distributed_c10d the others.
_DISTRIBUTED_NAMES = (
    "TCPStore",
    "ProcessGroupNCCL",
    "AllreduceOptions",
    "AllgatherOptions",
    "ReduceScatterOptions",
    "BroadcastOptions",
    "ReduceOptions",
    "AllToAllOptions",
    "is_nccl_available",
)


class TorchCollectives:
    """torch.distributed on one device."""

    def __init__(self, gpu: CollectiveDevice) -> None:
        self._gpu = gpu
        try:
            self._torch = import_module("torch")
            self._distributed = _load_distributed()
        except ImportError as error:
            raise MissingDependency("torch", purpose="--vs torch") from error
        if not self._distributed.is_nccl_available():
            raise EnvironmentUnusable(
                f"torch {self._torch.__version__} was built without NCCL",
                hint="pip install torch from an index of builds with CUDA",
            )
        nccl_version = ".".join(map(str, self._torch.cuda.nccl.version()))
        self.version = f"{self._torch.__version__}, NCCL {nccl_version}"
        self.path = "torch.distributed"
        self._server_store: Any = None  # Keeps the server of the store alive.

    def unique_id(self, host: str) -> bytes:
        """Start a TCPStore on a free port, and return its address."""
        self._server_store = self._distributed.TCPStore(
            host, 0, is_master=True, timeout=_TIMEOUT, wait_for_workers=False
        )
        return f"{host} {self._server_store.port}".encode()

    def connect(self, unique_id: bytes, rank: int, rank_count: int) -> TorchCommunicator:
        """Create a ProcessGroupNCCL. torch connects to the other ranks at the first operation."""
        torch, distributed = self._torch, self._distributed
        host, port = unique_id.decode().split()
        device = torch.device("cuda", self._gpu.ordinal)
        torch.cuda.set_device(device)
        store = distributed.TCPStore(
            host, int(port), is_master=False, timeout=_TIMEOUT, wait_for_workers=False
        )
        options = distributed.ProcessGroupNCCL.Options()
        backend = distributed.ProcessGroupNCCL(store, rank, rank_count, options)
        return TorchCommunicator(torch, distributed, self._gpu, backend, rank, rank_count)


class TorchCommunicator:
    """A ProcessGroupNCCL, and tensors of the buffers that cudakit passes to it."""

    def __init__(
        self,
        torch: Any,
        distributed: Any,
        gpu: CollectiveDevice,
        backend: Any,
        rank: int,
        rank_count: int,
    ) -> None:
        self._torch, self._distributed, self._gpu, self._backend = torch, distributed, gpu, backend
        self._rank, self._rank_count = rank, rank_count
        self._device = torch.device("cuda", gpu.ordinal)
        self._streams: dict[int, Any] = {}
        self._tensors: dict[tuple[int, int, str], Any] = {}
        self._abort_requested = threading.Event()

    def enqueue(
        self, collective: Collective, send_buffer: Ptr, receive_buffer: Ptr, stream: Stream
    ) -> None:
        """Enqueue an operation on a stream. Raises Unsupported with torch's reason if the call fails."""
        operation, torch = collective.operation, self._torch
        if operation in _IN_PLACE_ONLY and send_buffer != receive_buffer:
            raise Unsupported(f"torch performs {operation} in place only")
        inputs = self._tensor(collective, send_buffer, collective.send_chunks(self._rank_count))
        outputs = self._tensor(
            collective, receive_buffer, collective.receive_chunks(self._rank_count)
        )
        try:
            with torch.cuda.stream(self._stream(stream)):
                if operation == "send-receive":
                    self._send_receive(inputs, outputs)
                else:
                    self._call(operation, inputs, outputs)
        except (AttributeError, RuntimeError, ValueError, TypeError) as error:
            reason = str(error).partition("\n")[0]
            raise Unsupported(f"torch's {operation} failed: {reason}") from error

    def synchronize(self, stream: Stream) -> None:
        """Poll a stream until its work has completed."""
        while not self._gpu.query_stream(stream):
            if self._abort_requested.is_set():
                raise CollectiveError("the collective operation was aborted")
            time.sleep(_PAUSE_S)

    def abort(self) -> None:
        """End the wait in ``synchronize``; ``close`` then aborts the backend."""
        self._abort_requested.set()

    def close(self) -> None:
        """Shut the backend down, or abort it after a call of ``abort``. A second call has no effect."""
        backend, self._backend = self._backend, None
        self._tensors.clear()
        if backend is None:
            return
        with suppress(RuntimeError):  # The context may have a sticky error.
            if self._abort_requested.is_set():
                backend.abort()
            else:
                # torch 2.8 renamed the method.
                (getattr(backend, "shutdown", None) or backend._shutdown)()

    def _call(self, operation: str, inputs: Any, outputs: Any) -> None:
        """Call the function of an operation, in the current stream instead of a stream of the backend."""
        distributed, backend = self._distributed, self._backend
        match operation:
            case "all-reduce":
                self._wait(
                    backend.allreduce([outputs], _backend_options(distributed.AllreduceOptions()))
                )
            case "all-gather":
                options = _backend_options(distributed.AllgatherOptions())
                self._wait(backend._allgather_base(outputs, inputs, options))
            case "reduce-scatter":
                options = _backend_options(distributed.ReduceScatterOptions())
                self._wait(backend._reduce_scatter_base(outputs, inputs, options))
            case "broadcast":
                options = _backend_options(distributed.BroadcastOptions())
                options.rootRank, options.rootTensor = ROOT, 0
                self._wait(backend.broadcast([outputs], options))
            case "reduce":
                options = _backend_options(distributed.ReduceOptions())
                options.rootRank, options.rootTensor = ROOT, 0
                self._wait(backend.reduce([outputs], options))
            case "all-to-all":
                options = _backend_options(distributed.AllToAllOptions())
                self._wait(backend.alltoall_base(outputs, inputs, [], [], options))

    def _send_receive(self, inputs: Any, outputs: Any) -> None:
        """Send to the next rank and receive from the previous one (batch_isend_irecv)."""
        next_rank, previous_rank = (
            (self._rank + 1) % self._rank_count,
            (self._rank - 1) % self._rank_count,
        )
        self._backend._start_coalescing()
        self._backend.send([inputs], next_rank, 0)
        self._backend.recv([outputs], previous_rank, 0)
        self._wait(self._backend._end_coalescing())

    def _wait(self, work: Any) -> None:
        """Make the current stream wait for work that runs in another stream."""
        if work is not None:
            work.wait()

    def _stream(self, stream: Stream) -> Any:
        handle = self._gpu.stream_address(stream)
        if handle not in self._streams:
            self._streams[handle] = self._torch.cuda.ExternalStream(handle, device=self._device)
        return self._streams[handle]

    def _tensor(self, collective: Collective, ptr: Ptr, chunk_count: int) -> Any:
        """Return a tensor of a buffer, without a copy."""
        size_bytes = chunk_count * collective.chunk_bytes
        dtype_name = _DATA_TYPES[collective.element.name]
        key = (ptr, size_bytes, dtype_name)
        if key not in self._tensors:
            byte_array = self._torch.as_tensor(_DeviceBytes(ptr, size_bytes), device=self._device)
            self._tensors[key] = byte_array.view(getattr(self._torch, dtype_name))
        return self._tensors[key]


def _load_distributed() -> SimpleNamespace:
    """Return the functions and classes of torch.distributed that exist, by their names."""
    modules = [
        import_module(name) for name in ("torch.distributed", "torch.distributed.distributed_c10d")
    ]
    return SimpleNamespace(
        **{
            name: getattr(module, name)
            for module in modules
            for name in _DISTRIBUTED_NAMES
            if hasattr(module, name)
        }
    )


class _DeviceBytes:
    """Device memory as an array of bytes (CUDA Array Interface, version 2)."""

    def __init__(self, ptr: Ptr, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": np.dtype(np.uint8).str,
            "data": (int(ptr), False),
            "version": 2,
        }


def _backend_options(options: Any) -> Any:
    """Select the current stream: by default torch enqueues in a stream of its own."""
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
    return options
