"""NCCL by its C functions, without another Python package.

The communicators are blocking ones: a non-blocking communicator starts a thread for every operation. A rank
never waits inside NCCL for its stream; ``synchronize`` polls instead, so that it can abort the communicator.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Mapping
from contextlib import suppress

from cudakit.errors import CollectiveError, CudaError
from cudakit.gpu.api import Ptr, Stream
from cudakit.gpu.api.collectives import ROOT, Collective
from cudakit.gpu.collectives.library import UNIQUE_ID_BYTES, CollectiveDevice, UniqueId, load_nccl

# The values of ncclDataType_t by the name of the element type.
_DATA_TYPES = {
    "int8": 0,
    "int32": 2,
    "fp16": 6,
    "fp32": 7,
    "fp64": 8,
    "bf16": 9,
    "fp8_e4m3": 10,
    "fp8_e5m2": 11,
}
_SUM_OPERATION = 0  # The value of ncclSum in ncclRedOp_t.
# NCCL's function for each operation, and its arguments between the data type and the communicator (nccl.h).
_FUNCTIONS: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "all-reduce": ("ncclAllReduce", (_SUM_OPERATION,)),
    "all-gather": ("ncclAllGather", ()),
    "reduce-scatter": ("ncclReduceScatter", (_SUM_OPERATION,)),
    "broadcast": ("ncclBroadcast", (ROOT,)),
    "reduce": ("ncclReduce", (_SUM_OPERATION, ROOT)),
}
_SUCCESS, _IN_PROGRESS = 0, 7  # Values of ncclResult_t.
# Time in which ``synchronize`` polls without a pause. Afterwards it polls at intervals of _PAUSE_S.
_SPIN_S = 0.005
_PAUSE_S = 0.0002


class Nccl:
    """NCCL on one device."""

    def __init__(self, gpu: CollectiveDevice) -> None:
        self._gpu = gpu
        self._library, self.path = load_nccl()
        version_number = ctypes.c_int()
        self._check_status(self._library.ncclGetVersion(ctypes.byref(version_number)))
        self.version = format_version(version_number.value)

    def unique_id(self, host: str) -> bytes:  # noqa: ARG002 NCCL chooses its network interface itself
        """Return an id of ncclGetUniqueId."""
        unique_id = UniqueId()
        self._check_status(self._library.ncclGetUniqueId(ctypes.byref(unique_id)))
        return bytes(unique_id)

    def connect(self, unique_id: bytes, rank: int, rank_count: int) -> NcclCommunicator:
        """Join a group of ranks (ncclCommInitRank)."""
        handle = ctypes.c_void_p()
        id_value = UniqueId.from_buffer_copy(unique_id[:UNIQUE_ID_BYTES])
        self.call("ncclCommInitRank", ctypes.byref(handle), rank_count, id_value, rank)
        return NcclCommunicator(self, self._gpu, handle, rank, rank_count)

    def call(self, name: str, *args: object) -> None:
        """Call a function of NCCL with the device's context current. Raises CollectiveError."""
        self._check_status(self._gpu.in_context(getattr(self._library, name), *args), name)

    def _check_status(self, status: int, name: str = "NCCL") -> None:
        if status not in (_SUCCESS, _IN_PROGRESS):
            reason = self._library.ncclGetErrorString(status).decode()
            raise CollectiveError(
                f"{name} failed: {reason}", hint="NCCL_DEBUG=WARN makes NCCL print the reason"
            )


class NcclCommunicator:
    """A blocking communicator of NCCL (ncclComm_t)."""

    def __init__(
        self, nccl: Nccl, gpu: CollectiveDevice, handle: ctypes.c_void_p, rank: int, rank_count: int
    ) -> None:
        self._nccl, self._gpu = nccl, gpu
        self._handle: ctypes.c_void_p | None = handle
        self._rank, self._rank_count = rank, rank_count
        self._abort_requested = threading.Event()

    def enqueue(
        self, collective: Collective, send_buffer: Ptr, receive_buffer: Ptr, stream: Stream
    ) -> None:
        """Enqueue an operation on a stream."""
        self._raise_if_aborted()
        stream_address = self._gpu.stream_address(stream)
        if collective.operation == "all-to-all":
            self._all_to_all(collective, send_buffer, receive_buffer, stream_address)
        elif collective.operation == "send-receive":
            self._send_receive(collective, send_buffer, receive_buffer, stream_address)
        else:
            function, arguments = _FUNCTIONS[collective.operation]
            data_type = _DATA_TYPES[collective.element.name]
            buffers = (send_buffer, receive_buffer, collective.count, data_type)
            self._nccl.call(function, *buffers, *arguments, self._handle, stream_address)

    def synchronize(self, stream: Stream) -> None:
        """Poll a stream until its work has completed."""
        begin_s = time.perf_counter()
        while not self._gpu.query_stream(stream):
            self._raise_if_aborted()
            if time.perf_counter() - begin_s < _SPIN_S:
                time.sleep(0)  # Lets threads of other ranks run.
            else:
                self._raise_async_error()
                time.sleep(_PAUSE_S)
        self._raise_if_aborted()

    def abort(self) -> None:
        """End the wait in ``synchronize``; ``close`` then aborts the communicator."""
        self._abort_requested.set()

    def close(self) -> None:
        """Destroy the communicator, or abort it after a call of ``abort``. A second call has no effect.

        NCCL waits until all graphs with its operations are destroyed, also before it aborts.
        """
        handle, self._handle = self._handle, None
        if handle:
            is_aborted = self._abort_requested.is_set()
            with suppress(CollectiveError, CudaError):  # The context may have a sticky error.
                self._nccl.call("ncclCommAbort" if is_aborted else "ncclCommDestroy", handle)

    def _raise_if_aborted(self) -> None:
        if self._abort_requested.is_set() or self._handle is None:
            raise CollectiveError("the collective operation was aborted")

    def _raise_async_error(self) -> None:
        status = ctypes.c_int()
        self._nccl.call("ncclCommGetAsyncError", self._handle, ctypes.byref(status))
        if status.value not in (_SUCCESS, _IN_PROGRESS):
            self.abort()
            raise CollectiveError("NCCL reports that another rank failed")

    def _all_to_all(
        self, collective: Collective, send_buffer: Ptr, receive_buffer: Ptr, stream: int
    ) -> None:
        """Exchange a chunk with every rank by sends and receives, as in nccl-tests (src/alltoall.cu)."""
        offsets = [rank * collective.chunk_bytes for rank in range(self._rank_count)]
        self._exchange(
            collective,
            [(Ptr(send_buffer + offset), rank) for rank, offset in enumerate(offsets)],
            [(Ptr(receive_buffer + offset), rank) for rank, offset in enumerate(offsets)],
            stream,
        )

    def _send_receive(
        self, collective: Collective, send_buffer: Ptr, receive_buffer: Ptr, stream: int
    ) -> None:
        """Send to the next rank and receive from the previous one, as in nccl-tests (src/sendrecv.cu)."""
        next_rank, previous_rank = (
            (self._rank + 1) % self._rank_count,
            (self._rank - 1) % self._rank_count,
        )
        self._exchange(
            collective, [(send_buffer, next_rank)], [(receive_buffer, previous_rank)], stream
        )

    def _exchange(
        self,
        collective: Collective,
        sends: list[tuple[Ptr, int]],
        receives: list[tuple[Ptr, int]],
        stream: int,
    ) -> None:
        """Perform sends to and receives from the given ranks at the same time."""
        element_count, data_type = collective.count, _DATA_TYPES[collective.element.name]
        self._nccl.call("ncclGroupStart")
        try:
            for ptr, peer in sends:
                self._nccl.call(
                    "ncclSend", ptr, element_count, data_type, peer, self._handle, stream
                )
            for ptr, peer in receives:
                self._nccl.call(
                    "ncclRecv", ptr, element_count, data_type, peer, self._handle, stream
                )
        finally:
            self._nccl.call("ncclGroupEnd")


def format_version(version_number: int) -> str:
    """Format the number of ncclGetVersion: 22809 is 2.28.9 (NCCL_VERSION in nccl.h)."""
    major, minor_and_patch = (
        divmod(version_number, 10_000)
        if version_number >= 10_000
        else divmod(version_number, 1_000)
    )
    return f"{major}.{minor_and_patch // 100}.{minor_and_patch % 100}"
