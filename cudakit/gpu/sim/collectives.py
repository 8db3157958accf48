"""A simulated NCCL: it moves and sums real values between simulated devices, in threads or processes.

All ranks connect by TCP to an exchange, which runs in the process that created the unique id. When a kernel
of a rank runs, it sends its data, waits for the data of all other ranks, and computes its own output.

Times are estimates in virtual time. An operation begins when its last rank begins. It then takes a fixed
latency, plus its bus bytes (size times the bus factor of nccl-tests) divided by 80% of the bandwidth of a
rank's links, plus the time to read and write the buffers in device memory.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from cudakit.errors import CollectiveError, CudaError, Unsupported
from cudakit.gpu.api import Ptr, Stream
from cudakit.gpu.api.arrays import Launch, decode, encode
from cudakit.gpu.api.collectives import (
    REDUCTIONS,
    ROOT,
    Collective,
    CollectiveLibraryName,
    bus_factor,
)
from cudakit.gpu.sim.kernels import SimKernels
from cudakit.gpu.sim.memory import SimPeers
from cudakit.gpu.sim.streams import SimStreams

_LATENCY_NS = 5_000
_LINK_EFFICIENCY = 0.8
_NS_PER_S = 1_000_000_000
_CONNECT_TIMEOUT_S = 30.0
_PACKET_PREFIX = struct.Struct("!IQ")  # Sizes of the JSON header and of the data, in bytes.


@dataclass(frozen=True, slots=True)
class SimParts:
    """The components of a simulated device that the simulated NCCL uses."""

    streams: SimStreams
    kernels: SimKernels
    peers: SimPeers


@dataclass(frozen=True, slots=True)
class _Packet:
    """The data that one rank contributes to one operation, with a header."""

    header: dict[str, Any]
    data: bytes = b""


class SimNccl:
    """The simulated NCCL of one device. Raises Unsupported for torch, which needs a real GPU."""

    version = "simulated"
    path = "simulated"

    def __init__(self, library: CollectiveLibraryName, gpu: SimParts) -> None:
        if library != "nccl":
            raise Unsupported(f"{library} needs a real GPU; this device is simulated")
        self._gpu = gpu
        self._exchange: _Exchange | None = None

    def unique_id(self, host: str) -> bytes:
        """Start an exchange that the other ranks reach at ``host``."""
        self._exchange = _Exchange(host)
        return f"{host} {self._exchange.port}".encode()

    def connect(self, unique_id: bytes, rank: int, rank_count: int) -> SimCommunicator:
        """Connect to the exchange, and wait for all ranks."""
        host, port = unique_id.decode().split()
        try:
            connection = socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _send_packet(connection, _Packet({"rank": rank, "ranks": rank_count}))
            _receive_packet(connection)
            connection.settimeout(None)
        except OSError as error:
            raise CollectiveError(f"rank {rank} cannot join the group: {error}") from error
        return SimCommunicator(self._gpu, connection, rank, rank_count)


class SimCommunicator:
    """One rank of a simulated group."""

    def __init__(
        self, gpu: SimParts, connection: socket.socket, rank: int, rank_count: int
    ) -> None:
        self._gpu, self._connection = gpu, connection
        self._rank, self._rank_count = rank, rank_count
        self._is_broken = False
        peers = gpu.peers
        context = peers.context
        other_ordinals = set(range(len(context.cuda_view.devices))) - {context.ordinal}
        nvlink_count = max(map(peers.nvlinks, other_ordinals), default=0)
        self._link_bytes_per_s = _LINK_EFFICIENCY * (
            nvlink_count * context.costs.nvlink_bytes_per_s or context.costs.link_bytes_per_s
        )

    def enqueue(
        self, collective: Collective, send_ptr: Ptr, receive_ptr: Ptr, stream: Stream
    ) -> None:
        """Enqueue an operation as a kernel."""
        name = f"ncclDevKernel_{collective.operation.replace('-', '_')}"
        self._gpu.kernels.launch_host_kernel(
            self._run_operation,
            name,
            (1, 1, 1),
            (512, 1, 1),
            (collective, send_ptr, receive_ptr),
            stream,
        )

    def synchronize(self, stream: Stream) -> None:
        """Wait for all work of a stream."""
        try:
            self._gpu.streams.sync_stream(stream)
        except CudaError as error:
            if self._is_broken:
                raise CollectiveError(
                    "the collective operation was aborted, or another rank failed"
                ) from error
            raise

    def abort(self) -> None:
        """Close the connection, which ends operations of all ranks."""
        self._is_broken = True
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _run_operation(
        self, launch: Launch, collective: Collective, send_ptr: Ptr, receive_ptr: Ptr
    ) -> None:
        """Perform one operation. This function is called as a host kernel."""
        operation, rank_count = collective.operation, self._rank_count
        send_bytes = collective.send_chunks(rank_count) * collective.chunk_bytes
        receive_bytes = collective.receive_chunks(rank_count) * collective.chunk_bytes
        is_root = self._rank == ROOT
        sends_data = operation != "broadcast" or is_root
        data = launch.read(send_ptr, np.uint8, send_bytes).tobytes() if sends_data else b""
        packets = self._exchange_packets(launch.begin_ns, collective, data)
        if operation != "reduce" or is_root:
            output = _compute_output(collective, [packet.data for packet in packets], self._rank)
            launch.write(receive_ptr, np.uint8, receive_bytes)[:] = np.frombuffer(output, np.uint8)
        begin_ns = max(int(packet.header["begin_ns"]) for packet in packets)
        size_bytes = max(send_bytes, receive_bytes)
        bus_bytes = size_bytes * bus_factor(operation, rank_count) if rank_count > 1 else 0
        duration_ns = _LATENCY_NS + int(bus_bytes * _NS_PER_S / self._link_bytes_per_s)
        launch.busy(begin_ns - launch.begin_ns + duration_ns)

    def _exchange_packets(
        self, begin_ns: int, collective: Collective, data: bytes
    ) -> list[_Packet]:
        """Send this rank's data, and return the data of all ranks in the order of the ranks."""
        request_fields = [collective.operation, collective.element.name, collective.count]
        try:
            _send_packet(
                self._connection, _Packet({"begin_ns": begin_ns, "request": request_fields}, data)
            )
            packets = [_receive_packet(self._connection) for _ in range(self._rank_count)]
        except OSError as error:
            self._is_broken = True
            raise CollectiveError("another rank has left the group") from error
        for expected_rank, packet in enumerate(packets):
            if packet.header["request"] != request_fields:
                raise CollectiveError(
                    f"rank {self._rank} called {request_fields},"
                    f" rank {expected_rank} {packet.header['request']}"
                )
        return packets


class _Exchange:
    """Passes the packets of every operation on to all ranks, in a thread. Ends when a rank disconnects."""

    def __init__(self, host: str) -> None:
        self._server = socket.create_server((host, 0))
        self._server.settimeout(_CONNECT_TIMEOUT_S)
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._serve_ranks, name="simulated NCCL", daemon=True).start()

    def _serve_ranks(self) -> None:
        connections: dict[int, socket.socket] = {}
        rank_count = 1
        with suppress(OSError, ValueError):
            while len(connections) < rank_count:
                connection, _ = self._server.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                hello = _receive_packet(connection).header
                connections[int(hello["rank"])] = connection
                rank_count = int(hello["ranks"])
            for connection in connections.values():
                _send_packet(connection, _Packet({}))  # the group is complete
            ordered = [connections[rank] for rank in sorted(connections)]
            while True:
                packets = [_receive_packet(connection) for connection in ordered]
                for connection in ordered:
                    for packet in packets:
                        _send_packet(connection, packet)
        for connection in connections.values():
            connection.close()
        self._server.close()


def _compute_output(collective: Collective, inputs: Sequence[bytes], rank: int) -> bytes:
    """Return the receive buffer of a rank; ``inputs`` are the send buffers of all ranks."""
    chunk_bytes = collective.chunk_bytes
    match collective.operation:
        case "all-gather":
            return b"".join(inputs)
        case "all-to-all":
            return b"".join(data[rank * chunk_bytes : (rank + 1) * chunk_bytes] for data in inputs)
        case "broadcast":
            return inputs[ROOT]
        case "send-receive":
            return inputs[(rank - 1) % len(inputs)]
        case "reduce-scatter":
            inputs = [data[rank * chunk_bytes : (rank + 1) * chunk_bytes] for data in inputs]
    assert collective.operation in REDUCTIONS  # noqa: S101 an unknown operation is a bug
    element = collective.element
    with np.errstate(over="ignore"):  # Repeated in-place reductions may overflow the dtype.
        summed_values = sum(
            decode(np.frombuffer(data, element.storage_dtype), element) for data in inputs
        )
        return encode(summed_values, element).tobytes()


def _send_packet(connection: socket.socket, packet: _Packet) -> None:
    header = json.dumps(packet.header).encode()
    connection.sendall(_PACKET_PREFIX.pack(len(header), len(packet.data)) + header + packet.data)


def _receive_packet(connection: socket.socket) -> _Packet:
    """Read one packet. Raises OSError if the connection ends."""
    header_bytes, data_bytes = _PACKET_PREFIX.unpack(_read_bytes(connection, _PACKET_PREFIX.size))
    header = json.loads(_read_bytes(connection, header_bytes))
    return _Packet(header, _read_bytes(connection, data_bytes))


def _read_bytes(connection: socket.socket, size_bytes: int) -> bytes:
    buffer = bytearray(size_bytes)
    view, read_bytes = memoryview(buffer), 0
    while read_bytes < size_bytes:
        received_bytes = connection.recv_into(view[read_bytes:])
        if not received_bytes:
            raise ConnectionResetError("the connection was closed")
        read_bytes += received_bytes
    return bytes(buffer)
