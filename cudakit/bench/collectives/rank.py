"""One rank: the buffers, verification and timing of collective operations on one device.

A rank executes the requests of rank 0's process (see group.py). All of its work runs in one thread.
"""

from __future__ import annotations

import os
import queue
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from cudakit.arrays.compare import Compare
from cudakit.bench.case import POISON, allocate
from cudakit.bench.collectives.patterns import (
    PERIOD,
    Pattern,
    chunk_regions,
    expected_chunks,
    input_chunks,
)
from cudakit.bench.timer import CapturedWork, SampleWork, Timer
from cudakit.errors import CollectiveError, CudakitError, Unsupported
from cudakit.gpu.api import LEGACY, Gpu, Ptr, Stream
from cudakit.gpu.api.arrays import ELEMENTS, FP32
from cudakit.gpu.api.collectives import (
    REDUCTIONS,
    Collective,
    CollectiveLibrary,
    CollectiveLibraryName,
    Communicator,
)

# The operation that makes all ranks start the timed work at the same time.
_ALIGNING_OPERATION = Collective("all-reduce", FP32, 1)
# Key of a request in a message to a rank, and the request that ends the rank.
REQUEST, CLOSE = "request", "close"

Message = dict[str, Any]


class Rank:
    """Executes requests on one device. ``reply`` receives the answers; it is called in the same thread."""

    def __init__(
        self,
        open_gpu: Callable[[], Gpu],
        rank: int,
        rank_count: int,
        reply: Callable[[Message], None],
    ) -> None:
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._open_gpu, self._reply = open_gpu, reply
        self._rank, self._rank_count = rank, rank_count
        self._communicators: dict[str, Communicator] = {}
        self._is_aborted = False

    def abort(self) -> None:
        """End the current operation. Any thread may call this method."""
        self._is_aborted = True
        for communicator in list(self._communicators.values()):
            communicator.abort()

    def run(self) -> None:
        """Execute requests until the request ``CLOSE``, or until a request fails."""
        try:
            with closing(self._open_gpu()) as gpu, ExitStack() as cleanup:
                requests = _Requests(
                    gpu, self._rank, self._rank_count, self._communicators, cleanup
                )
                while self._execute(requests, self.inbox.get()):
                    pass
        except Exception as error:  # noqa: BLE001 the device cannot be opened or closed
            self._reply({"number": 0, "error": _describe_error(error)})

    def _execute(self, requests: _Requests, message: Message) -> bool:
        """Execute a request and reply; return whether to continue."""
        answer: Message = {"number": message["number"]}
        name, arguments = message[REQUEST], message["arguments"]
        is_fatal = False
        if name != CLOSE:
            try:
                if self._is_aborted:
                    raise CollectiveError("the measurement was ended")
                answer["value"] = getattr(requests, name)(**arguments)
            except Exception as error:  # noqa: BLE001 rank 0 reports every error
                answer["error"] = _describe_error(error)
                is_fatal = not isinstance(error, Unsupported)
        if not (is_fatal or name == CLOSE):
            self._reply(answer)
            return True
        if is_fatal:
            self.abort()
            self._reply(answer)
        return False


@dataclass(frozen=True, slots=True)
class _BufferSet:
    """The buffers of one operation. In place, the smaller buffer is a part of the larger one."""

    send_buffer: Ptr
    receive_buffer: Ptr
    expected_output: (
        Ptr | None
    )  # The output that the receive buffer must have; None without an output.


class _Requests:
    """The requests of rank 0: one method per request. Arguments and return values are JSON."""

    def __init__(
        self,
        gpu: Gpu,
        rank: int,
        rank_count: int,
        communicators: dict[str, Communicator],
        cleanup: ExitStack,
    ) -> None:
        self._gpu, self._rank, self._rank_count = gpu, rank, rank_count
        self._communicators = communicators
        self._compare = cleanup.enter_context(closing(Compare(gpu)))
        self._aligning_buffer = allocate(gpu, cleanup, FP32.size_bytes)
        self._timer = cleanup.enter_context(closing(Timer(gpu, wait=self._wait)))
        # Aborting the communicators ends operations that would otherwise block the release of memory.
        cleanup.callback(self._release_operations)
        cleanup.callback(self._close_communicators)
        self._operations: dict[int, RankOperation] = {}
        self._graphs: dict[int, CapturedWork] = {}
        # Libraries that created a unique id, and may serve the ranks that join.
        self._serving_libraries: list[CollectiveLibrary] = []

    def describe(self) -> Message:
        """Return the facts of this rank: its process, its device, and the version of NCCL."""
        nccl, facts = self._gpu.collectives("nccl"), self._gpu.facts()
        return {
            "host": socket.gethostname(),
            "process": os.getpid(),
            "device": facts.index,
            "gpu": str(facts.fields.get("name", "")),
            "uuid": facts.uuid if isinstance(facts.uuid, str) else "",
            "pci_bus_id": facts.pci_bus_id if isinstance(facts.pci_bus_id, str) else "",
            "nccl_version": nccl.version,
            "nccl_path": nccl.path,
            "free_bytes": self._gpu.memory_info().free_bytes,
        }

    def create_id(self, library: CollectiveLibraryName, host: str) -> str:
        """Return the unique id of a new group, as hexadecimal text."""
        opened_library = self._gpu.collectives(library)
        self._serving_libraries.append(opened_library)
        return opened_library.unique_id(host).hex()

    def connect(self, library: CollectiveLibraryName, unique_id: str) -> str:
        """Join a group, and return the version of the library."""
        opened_library = self._gpu.collectives(library)
        self._communicators[library] = opened_library.connect(
            bytes.fromhex(unique_id), self._rank, self._rank_count
        )
        return opened_library.version

    def prepare(
        self, operation_id: int, library: str, collective: Sequence[Any], in_place: bool, seed: int
    ) -> None:
        """Allocate one buffer set of an operation."""
        name, element, element_count = collective
        self._operations[operation_id] = RankOperation(
            self._gpu,
            self._compare,
            self._communicators[library],
            Collective(name, ELEMENTS[element], element_count),
            self._rank,
            self._rank_count,
            in_place=in_place,
            seed=seed,
            wait=self._wait,
        )

    def rotate(self, operation_id: int, set_count: int) -> None:
        """Allocate more buffer sets of an operation, up to ``set_count`` in total."""
        self._operations[operation_id].rotate(set_count)

    def execute(self, work: Sequence[Sequence[int]]) -> None:
        """Execute a list of operations without timing them."""
        self._enqueue(work, self._timer.stream)
        self._wait(self._timer.stream)

    def time(
        self,
        enqueue_before: Sequence[Sequence[int]],
        work: Sequence[Sequence[int]],
        executions: int,
        is_blocked: bool,
        clock: str,
    ) -> list[Any]:
        """Time work; return the seconds of one execution, the SM clock and whether the reading is valid."""
        reading = self._timer.time(
            SampleWork(
                lambda stream: self._enqueue(work, stream),
                executions,
                (lambda stream: self._enqueue(enqueue_before, stream)) if enqueue_before else None,
                "host" if clock == "host" else "device",
                align_devices=self._align_ranks,
            ),
            is_blocked=is_blocked,
        )
        return [reading.time_s, reading.sm_clock_hz, reading.valid]

    def capture(self, graph_id: int, work: Sequence[Sequence[int]]) -> None:
        """Capture a list of operations in a CUDA graph."""
        self._graphs[graph_id] = self._timer.capture(lambda stream: self._enqueue(work, stream))

    def destroy_graph(self, graph_id: int) -> None:
        """Destroy a graph."""
        self._graphs.pop(graph_id).close()

    def verify(self, operation_id: int) -> list[int]:
        """Return the number of wrong and of compared 32-bit words of an operation's outputs."""
        return list(self._operations[operation_id].verify(self._timer.stream))

    def release(self, operation_id: int) -> None:
        """Free the buffers of an operation."""
        self._operations.pop(operation_id).close()

    def _enqueue(self, work: Sequence[Sequence[int]], stream: Stream) -> None:
        """Enqueue work: pairs of an operation's id and a buffer set, or of -1 and a graph's id."""
        for operation_id, set_index in work:
            if operation_id < 0:
                self._graphs[set_index].launch(stream)
            else:
                self._operations[operation_id].enqueue(stream, set_index)

    def _align_ranks(self, stream: Stream) -> None:
        """Enqueue a collective, after which the streams of all ranks continue at the same time."""
        buffer = self._aligning_buffer
        self._communicators["nccl"].enqueue(_ALIGNING_OPERATION, buffer, buffer, stream)

    def _wait(self, stream: Stream) -> None:
        """Wait for a stream; ``abort`` ends the wait."""
        for communicator in list(self._communicators.values())[:1]:
            communicator.synchronize(stream)
        if not self._communicators:
            self._gpu.sync_stream(stream)

    def _release_operations(self) -> None:
        for operation in self._operations.values():
            operation.close()

    def _close_communicators(self) -> None:
        """Destroy all graphs, then the communicators: NCCL waits for the end of the graphs."""
        for graph in self._graphs.values():
            graph.close()
        for communicator in reversed(list(self._communicators.values())):
            communicator.close()


class RankOperation:
    """The buffers of one collective operation on one rank."""

    def __init__(
        self,
        gpu: Gpu,
        compare: Compare,
        communicator: Communicator,
        collective: Collective,
        rank: int,
        rank_count: int,
        *,
        in_place: bool,
        seed: int,
        wait: Callable[[Stream], None],
    ) -> None:
        self._gpu, self._compare, self._communicator = gpu, compare, communicator
        self._collective, self._in_place, self._wait = collective, in_place, wait
        self._rank, self._rank_count = rank, rank_count
        self._input_chunks = input_chunks(collective, rank, rank_count, seed)
        self._output_chunks = expected_chunks(collective, rank, rank_count, seed)
        self._sets: list[_BufferSet] = []
        self._cleanup = ExitStack()
        # An in-place reduction overwrites its input with the sum, so later outputs differ from the first
        # one.
        self._accumulates = in_place and collective.operation in REDUCTIONS
        try:
            self._staging_buffer = gpu.host_malloc(PERIOD * collective.element.size_bytes)
            self._cleanup.callback(gpu.host_free, self._staging_buffer)
            self.rotate(1)
        except BaseException:
            self.close()
            raise

    def rotate(self, set_count: int) -> None:
        """Allocate and fill more buffer sets, up to ``set_count``."""
        while len(self._sets) < set_count:
            self._sets.append(self._allocate_set())

    def enqueue(self, stream: Stream, set_index: int) -> None:
        """Enqueue one execution on a buffer set."""
        buffers = self._sets[set_index % len(self._sets)]
        self._communicator.enqueue(
            self._collective, buffers.send_buffer, buffers.receive_buffer, stream
        )

    def verify(self, stream: Stream) -> tuple[int, int]:
        """Compare the outputs of all buffer sets with the reference, and poison them again.

        For a sum in place, each buffer set is filled again and executed once before the comparison. Returns
        the number of wrong words and the number of compared words, of 32 bits.
        """
        wrong_count = word_count = 0
        for set_index, buffers in enumerate(self._sets):
            if self._accumulates:
                self._fill(buffers)
                self.enqueue(stream, set_index)
                self._wait(stream)
            if buffers.expected_output is not None:
                size_bytes = len(self._output_chunks) * self._collective.chunk_bytes
                wrong_count += self._compare.count_different(
                    buffers.receive_buffer, buffers.expected_output, size_bytes, LEGACY
                )
                word_count += size_bytes // 4
            self._fill(buffers)
        return wrong_count, word_count

    def close(self) -> None:
        """Free the memory."""
        self._cleanup.close()

    def _allocate_set(self) -> _BufferSet:
        gpu, size_bytes, cleanup = self._gpu, self._collective.chunk_bytes, self._cleanup
        send_bytes = self._collective.send_chunks(self._rank_count) * size_bytes
        receive_bytes = self._collective.receive_chunks(self._rank_count) * size_bytes
        if self._in_place:
            # The smaller buffer is the rank's chunk of the larger one (NCCL, "In-place Operations").
            buffer = allocate(gpu, cleanup, max(send_bytes, receive_bytes))
            rank_chunk = Ptr(buffer + self._rank * size_bytes)
            send_buffer = rank_chunk if receive_bytes > send_bytes else buffer
            receive_buffer = rank_chunk if send_bytes > receive_bytes else buffer
        else:
            send_buffer = allocate(gpu, cleanup, send_bytes)
            receive_buffer = allocate(gpu, cleanup, receive_bytes)
        expected_output = None
        if self._output_chunks:
            expected_output = allocate(gpu, cleanup, receive_bytes)
            self._write_chunks(expected_output, self._output_chunks)
        buffers = _BufferSet(send_buffer, receive_buffer, expected_output)
        self._fill(buffers)
        return buffers

    def _fill(self, buffers: _BufferSet) -> None:
        """Poison the output, then write the input."""
        receive_bytes = (
            self._collective.receive_chunks(self._rank_count) * self._collective.chunk_bytes
        )
        self._gpu.fill(buffers.receive_buffer, POISON, receive_bytes, LEGACY)
        self._write_chunks(buffers.send_buffer, self._input_chunks)

    def _write_chunks(self, ptr: Ptr, chunks: list[Pattern]) -> None:
        for offset, pattern in chunk_regions(chunks, self._collective.chunk_bytes):
            self._write_chunk(Ptr(ptr + offset), pattern)

    def _write_chunk(self, ptr: Ptr, pattern: Pattern) -> None:
        """Write one chunk: copy a period from the host, then repeat it by copies on the device."""
        gpu, element = self._gpu, self._collective.element
        size_bytes = self._collective.chunk_bytes
        first_period = pattern.elements(min(self._collective.count, PERIOD))
        staging_view = gpu.host_view(self._staging_buffer, first_period.nbytes)
        np.frombuffer(staging_view, element.storage_dtype)[:] = first_period
        gpu.copy(ptr, self._staging_buffer, first_period.nbytes, LEGACY)
        written_bytes = first_period.nbytes
        while written_bytes < size_bytes:
            copied_bytes = min(written_bytes, size_bytes - written_bytes)
            gpu.copy(Ptr(ptr + written_bytes), ptr, copied_bytes, LEGACY)
            written_bytes += copied_bytes
        gpu.sync_stream(LEGACY)


def _describe_error(error: BaseException) -> Mapping[str, str]:
    """Return an error as JSON: message, hint and kind."""
    if isinstance(error, CudakitError):
        error_kind = "unsupported" if isinstance(error, Unsupported) else "failed"
        return {"kind": error_kind, "message": error.message, "hint": error.hint}
    return {"kind": "failed", "message": f"{type(error).__name__}: {error}", "hint": ""}
