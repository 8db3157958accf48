"""The ranks of ``bench nccl``: the group that rank 0 drives, and the work of one rank on its device.

A rank is a thread of this process, or another process with a TCP connection. Every request goes to all ranks;
an answer, an error or the end of a rank arrives in one queue. The first failure ends all ranks.
"""

from __future__ import annotations

import os
import queue
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import lru_cache
from threading import Thread
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from cudakit.arrays.compare import Compare
from cudakit.bench.case import POISON, allocate
from cudakit.bench.timer import (
    CapturedWork,
    Enqueue,
    Reading,
    SampleWork,
    Timer,
    host_clock,
    l2_size_bytes,
)
from cudakit.errors import CollectiveError, CudakitError, Unsupported
from cudakit.gpu.api import LEGACY, Gpu, Ptr, Stream
from cudakit.gpu.api.arrays import ELEMENTS, FP32, Bits, Element, encode
from cudakit.gpu.api.collectives import (
    REDUCTIONS,
    ROOT,
    Collective,
    CollectiveLibrary,
    CollectiveLibraryName,
    Communicator,
)

# After the first failure, the group waits this long for the reasons of the other ranks.
_FAILURE_GRACE_S = 1.0
# Maximum time that a process waits for the end of a rank.
END_TIMEOUT_S = 5.0
# The operation id that marks a graph launch in a list of work.
_GRAPH = -1
_ALIGNING_OPERATION = Collective("all-reduce", FP32, 1)

# Number of elements after which a pattern repeats. It is a prime number, so that chunks of a power of two
# begin at different points of the pattern.
PERIOD = 8191
# Maximum of the input values of all types, even of those that represent larger integers exactly.
_MAX_VALUE = 1 << 20

Message = dict[str, Any]
# Key of a request in a message to a rank, the request that ends the rank, and the message with this request.
REQUEST = "request"
CLOSE = "close"
CLOSE_MESSAGE: Message = {"number": 0, REQUEST: CLOSE, "arguments": {}}
# A queue of pairs of a rank's number and its message; the message None means that the rank ended.
Answers = queue.SimpleQueue[tuple[int, Message | None]]
# A pair of an operation's id and the index of a buffer set, or of _GRAPH and a graph's id.
Execution: TypeAlias = Sequence[int]


# --- the group, in the process of rank 0 ------------------------------------------------------------


class Channel(Protocol):
    """The connection of rank 0's process to one rank: a ``Rank`` in it, or one in another process."""

    @property
    def name(self) -> str:
        """Name of the rank in messages: "rank 1 (host, process 42)"."""

    def send(self, message: Message) -> None:
        """Send a message. Has no effect if the rank has ended."""

    def abort(self, reason: str) -> None:
        """End the current operation of the rank, and then the rank."""

    def close(self) -> None:
        """Wait for the end of the rank, and release the channel."""


class RankGroup:
    """All ranks of a measurement. ``timeout_s`` is the maximum time of one request."""

    def __init__(self, channels: Sequence[Channel], answers: Answers, timeout_s: float) -> None:
        self.channels = channels
        self.failure = ""  # The reason why the group ended; "" while it works.
        self._answers, self._timeout_s = answers, timeout_s
        self._request_number = 0
        self._last_object_id = 0
        self._pending_work: list[Execution] = []  # Executions that no request contains yet.

    def new_id(self) -> int:
        self._last_object_id += 1
        return self._last_object_id

    def connect(self, library: str, host: str) -> list[str]:
        """Connect all ranks by a library; return its version on each rank."""
        unique_id = self.request("create_id", library=library, host=host, only_rank=0)[0]
        return self.request("connect", library=library, unique_id=unique_id)

    def enqueue(self, operation_id: int, buffer_set: int) -> None:
        """Add an execution to the work of the next request."""
        self._pending_work.append((operation_id, buffer_set))

    def take_pending_work(self) -> list[Execution]:
        """Return the executions that no request contains yet, and clear the list."""
        work, self._pending_work = self._pending_work, []
        return work

    def execute_pending_work(self) -> None:
        """Execute the pending work without timing it."""
        if work := self.take_pending_work():
            self.request("execute", work=work)

    def request(self, name: str, *, only_rank: int | None = None, **arguments: Any) -> list[Any]:
        """Send a request to all ranks or to one; return their values in the order of the ranks.

        Raises Unsupported if a rank does not support the request. Any other error ends the group, and raises
        CollectiveError with the name of the rank.
        """
        if self.failure:
            raise CollectiveError(self.failure)
        self._request_number += 1
        message = {"number": self._request_number, REQUEST: name, "arguments": arguments}
        ranks = range(len(self.channels)) if only_rank is None else (only_rank,)
        for rank in ranks:
            self.channels[rank].send(message)
        answers = self._collect(set(ranks))
        errors = {rank: answers[rank]["error"] for rank in ranks if "error" in answers[rank]}
        for rank, error in errors.items():
            if error["kind"] != "unsupported":
                raise self.fail(f"{self.channels[rank].name}: {error['message']}", error["hint"])
        for error in errors.values():
            raise Unsupported(error["message"], hint=error["hint"])
        return [answers[rank].get("value") for rank in ranks]

    def fail(self, reason: str, hint: str = "") -> CollectiveError:
        """End all ranks, and return the error with the reason."""
        if not self.failure:
            self.failure = reason
            for channel in self.channels:
                channel.abort(reason)
        return CollectiveError(self.failure, hint=hint)

    def close(self) -> None:
        if not self.failure:
            for channel in self.channels:
                channel.send(CLOSE_MESSAGE)
        for channel in self.channels:
            channel.close()

    def _collect(self, ranks: set[int]) -> dict[int, Message]:
        """Return the answers of ranks to the last request. Raises CollectiveError if one does not answer."""
        answers: dict[int, Message] = {}
        ended_ranks: set[int] = set()
        deadline_s = time.monotonic() + self._timeout_s
        while ranks - answers.keys():
            try:
                rank, message = self._answers.get(timeout=max(deadline_s - time.monotonic(), 0))
            except queue.Empty:
                break
            if message is None:
                ended_ranks.add(rank)
            elif message["number"] in (0, self._request_number):
                answers[rank] = message
            else:
                continue  # This is the answer to an earlier request, which was interrupted.
            if message is None or message.get("error", {}).get("kind") == "failed":
                # The other ranks may be waiting for the failed rank in a collective operation.
                deadline_s = min(deadline_s, time.monotonic() + _FAILURE_GRACE_S)
        missing_ranks = ranks - answers.keys()
        if ended_ranks:
            raise self.fail(f"{self._names(ended_ranks)} ended")
        if missing_ranks and not any("error" in answer for answer in answers.values()):
            raise self.fail(
                f"{self._names(missing_ranks)} did not answer within {self._timeout_s:g} s"
            )
        return answers | {rank: {} for rank in missing_ranks}

    def _names(self, ranks: set[int]) -> str:
        return " and ".join(self.channels[rank].name for rank in sorted(ranks))


class GroupTimer:
    """Times work on all ranks: the time of a sample is that of the slowest rank.

    ``gpu`` is the device of the first rank in this process; the properties of this device stand for those of
    all ranks.
    """

    def __init__(self, gpu: Gpu, group: RankGroup) -> None:
        self.gpu = gpu
        self.l2_bytes = l2_size_bytes(gpu.facts().fields)
        # Simulated ranks have separate clocks; this clock is the sum of all samples.
        self._virtual_s = 0.0
        self.now_s = (lambda: self._virtual_s) if gpu.simulated else host_clock(gpu)
        self.stream = gpu.stream(blocking=False)  # The pipeline synchronizes this empty stream.
        self._group = group

    def time(self, work: SampleWork, *, is_blocked: bool = False) -> Reading:
        """Time one sample on all ranks."""
        group = self._group
        group.execute_pending_work()
        if work.enqueue_before:
            work.enqueue_before(self.stream)
        enqueue_before = group.take_pending_work()
        work.enqueue(self.stream)
        readings = group.request(
            "time",
            enqueue_before=enqueue_before,
            work=group.take_pending_work(),
            executions=work.executions,
            is_blocked=is_blocked,
            clock=work.clock,
        )
        slowest_s = max(time_s for time_s, _, _ in readings)
        self._virtual_s += slowest_s * work.executions
        return Reading(slowest_s, readings[0][1], all(is_valid for _, _, is_valid in readings))

    def flush(self, stream: Stream) -> None:  # noqa: ARG002 every flush raises
        """Raise Unsupported: the L2 state of collectives is hot or rotate, never flush."""
        raise Unsupported("L2 cannot be flushed for collectives", hint="add --cache rotate")

    def capture(self, work: Enqueue) -> CapturedWork:
        group = self._group
        group.execute_pending_work()
        work(self.stream)
        graph_id = group.new_id()
        group.request("capture", graph_id=graph_id, work=group.take_pending_work())

        def destroy_graph() -> None:
            if not group.failure:
                group.request("destroy_graph", graph_id=graph_id)

        return CapturedWork(lambda _: group.enqueue(_GRAPH, graph_id), destroy_graph)

    def close(self) -> None:
        self.gpu.destroy_stream(self.stream)


# --- one rank ---------------------------------------------------------------------------------------


class Rank:
    """Executes requests on one device, in a thread of this process that it starts.

    ``answer`` receives the rank and the answer to a request; it is called in that thread.
    """

    def __init__(
        self,
        open_gpu: Callable[[], Gpu],
        rank: int,
        rank_count: int,
        answer: Callable[[tuple[int, Message]], object],
    ) -> None:
        self.name = f"rank {rank}"
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._open_gpu, self._answer = open_gpu, answer
        self._rank, self._rank_count = rank, rank_count
        self._communicators: dict[str, Communicator] = {}
        self._is_aborted = False
        self._thread = Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        self._inbox.put(message)

    def abort(self, reason: str) -> None:  # noqa: ARG002 this process reports the reason
        self._abort_communicators()
        self._inbox.put(CLOSE_MESSAGE)

    def close(self) -> None:
        self._thread.join(END_TIMEOUT_S)

    def _abort_communicators(self) -> None:
        self._is_aborted = True
        for communicator in list(self._communicators.values()):
            communicator.abort()

    def _run(self) -> None:
        """Execute requests until the request ``CLOSE``, or until a request fails."""
        try:
            with closing(self._open_gpu()) as gpu, ExitStack() as cleanup:
                requests = _Requests(
                    gpu, self._rank, self._rank_count, self._communicators, cleanup
                )
                while (message := self._inbox.get())[REQUEST] != CLOSE:
                    answer: Message = {"number": message["number"]}
                    try:
                        if self._is_aborted:
                            raise CollectiveError("the measurement was ended")
                        answer["value"] = getattr(requests, message[REQUEST])(
                            **message["arguments"]
                        )
                    except Unsupported as error:
                        answer["error"] = _describe_error(error)
                    except Exception as error:  # noqa: BLE001 rank 0 reports every error
                        self._abort_communicators()
                        self._answer((self._rank, answer | {"error": _describe_error(error)}))
                        return
                    self._answer((self._rank, answer))
        except Exception as error:  # noqa: BLE001 the device cannot be opened or closed
            self._answer((self._rank, {"number": 0, "error": _describe_error(error)}))


def _describe_error(error: Exception) -> Mapping[str, str]:
    """Return an error as JSON: message, hint and kind."""
    kind = "unsupported" if isinstance(error, Unsupported) else "failed"
    if isinstance(error, CudakitError):
        return {"kind": kind, "message": error.message, "hint": error.hint}
    return {"kind": kind, "message": f"{type(error).__name__}: {error}", "hint": ""}


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
        self.gpu, self.rank, self.rank_count = gpu, rank, rank_count
        self.communicators = communicators
        self.compare = cleanup.enter_context(closing(Compare(gpu)))
        self._aligning_buffer = allocate(gpu, cleanup, FP32.size_bytes)
        self._timer = cleanup.enter_context(closing(Timer(gpu, wait=self.wait)))
        self._operations: dict[int, _Operation] = {}
        self._graphs: dict[int, CapturedWork] = {}
        # Libraries that created a unique id, and may serve the ranks that join.
        self._serving_libraries: list[CollectiveLibrary] = []
        cleanup.callback(self._close)

    def describe(self) -> Message:
        """Return the facts of this rank: its process, its device, and the version of NCCL."""
        nccl, facts = self.gpu.collectives("nccl"), self.gpu.facts()
        return {
            "host": socket.gethostname(),
            "process": os.getpid(),
            "device": facts.index,
            "gpu": str(facts.fields.get("name", "")),
            "uuid": facts.uuid if isinstance(facts.uuid, str) else "",
            "pci_bus_id": facts.pci_bus_id if isinstance(facts.pci_bus_id, str) else "",
            "nccl_version": nccl.version,
            "nccl_path": nccl.path,
            "free_bytes": self.gpu.memory_info().free_bytes,
        }

    def create_id(self, library: CollectiveLibraryName, host: str) -> str:
        """Return the unique id of a new group, as hexadecimal text."""
        opened_library = self.gpu.collectives(library)
        self._serving_libraries.append(opened_library)
        return opened_library.unique_id(host).hex()

    def connect(self, library: CollectiveLibraryName, unique_id: str) -> str:
        """Join a group, and return the version of the library."""
        opened_library = self.gpu.collectives(library)
        self.communicators[library] = opened_library.connect(
            bytes.fromhex(unique_id), self.rank, self.rank_count
        )
        return opened_library.version

    def prepare(
        self, operation_id: int, library: str, collective: Sequence[Any], in_place: bool, seed: int
    ) -> None:
        name, element, element_count = collective
        self._operations[operation_id] = _Operation(
            self,
            self.communicators[library],
            Collective(name, ELEMENTS[element], element_count),
            in_place=in_place,
            seed=seed,
        )

    def rotate(self, operation_id: int, set_count: int) -> None:
        """Allocate more buffer sets of an operation, up to ``set_count`` in total."""
        self._operations[operation_id].rotate(set_count)

    def execute(self, work: Sequence[Execution]) -> None:
        self._enqueue(work, self._timer.stream)
        self.wait(self._timer.stream)

    def time(
        self,
        enqueue_before: Sequence[Execution],
        work: Sequence[Execution],
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
                # After a collective, the streams of all ranks continue at the same time.
                align_devices=lambda stream: self.communicators["nccl"].enqueue(
                    _ALIGNING_OPERATION, self._aligning_buffer, self._aligning_buffer, stream
                ),
            ),
            is_blocked=is_blocked,
        )
        return [reading.time_s, reading.sm_clock_hz, reading.valid]

    def capture(self, graph_id: int, work: Sequence[Execution]) -> None:
        self._graphs[graph_id] = self._timer.capture(lambda stream: self._enqueue(work, stream))

    def destroy_graph(self, graph_id: int) -> None:
        self._graphs.pop(graph_id).close()

    def verify(self, operation_id: int) -> list[int]:
        """Return the number of wrong and of compared 32-bit words of an operation's outputs."""
        return list(self._operations[operation_id].verify(self._timer.stream))

    def release(self, operation_id: int) -> None:
        self._operations.pop(operation_id).close()

    def _enqueue(self, work: Sequence[Execution], stream: Stream) -> None:
        for operation_id, set_index in work:
            if operation_id == _GRAPH:
                self._graphs[set_index].launch(stream)
            else:
                self._operations[operation_id].enqueue(stream, set_index)

    def wait(self, stream: Stream) -> None:
        """Wait for a stream; ``abort`` ends the wait."""
        for communicator in list(self.communicators.values())[:1]:
            communicator.synchronize(stream)
        if not self.communicators:
            self.gpu.sync_stream(stream)

    def _close(self) -> None:
        """Destroy graphs, communicators and buffers, in this order.

        NCCL waits for the end of the graphs. Closed communicators end operations that would otherwise block
        the release of memory.
        """
        with ExitStack() as cleanup:
            for operation in reversed(self._operations.values()):
                cleanup.callback(operation.close)
            for communicator in list(self.communicators.values()):
                cleanup.callback(communicator.close)
            for graph in reversed(self._graphs.values()):
                cleanup.callback(graph.close)


@dataclass(frozen=True, slots=True)
class _BufferSet:
    """The buffers of one operation. In place, the smaller buffer is a part of the larger one."""

    send_buffer: Ptr
    receive_buffer: Ptr
    # The output that the receive buffer must have; None without an output.
    expected_output: Ptr | None


class _Operation:
    """The buffers of one collective operation on one rank."""

    def __init__(
        self,
        owner: _Requests,
        communicator: Communicator,
        collective: Collective,
        *,
        in_place: bool,
        seed: int,
    ) -> None:
        rank, rank_count = owner.rank, owner.rank_count
        self._owner, self._gpu, self._communicator = owner, owner.gpu, communicator
        self._collective, self._in_place = collective, in_place
        self._send_bytes = collective.send_chunks(rank_count) * collective.chunk_bytes
        self._receive_bytes = collective.receive_chunks(rank_count) * collective.chunk_bytes
        self._input_chunks = input_chunks(collective, rank, rank_count, seed)
        self._output_chunks = expected_chunks(collective, rank, rank_count, seed)
        self._sets: list[_BufferSet] = []
        self._cleanup = ExitStack()
        # An in-place reduction overwrites its input with the sum, so later outputs differ from the first
        # one.
        self._accumulates = in_place and collective.operation in REDUCTIONS
        try:
            self._staging_buffer = self._gpu.host_malloc(PERIOD * collective.element.size_bytes)
            self._cleanup.callback(self._gpu.host_free, self._staging_buffer)
            self.rotate(1)
        except BaseException:
            self.close()
            raise

    def rotate(self, set_count: int) -> None:
        """Allocate and fill more buffer sets, up to ``set_count``."""
        gpu, cleanup = self._gpu, self._cleanup
        send_bytes, receive_bytes = self._send_bytes, self._receive_bytes
        while len(self._sets) < set_count:
            if self._in_place:
                # The smaller buffer is the rank's chunk of the larger one (NCCL, "In-place Operations").
                buffer = allocate(gpu, cleanup, max(send_bytes, receive_bytes))
                rank_chunk = Ptr(buffer + self._owner.rank * self._collective.chunk_bytes)
                send_buffer = rank_chunk if receive_bytes > send_bytes else buffer
                receive_buffer = rank_chunk if send_bytes > receive_bytes else buffer
            else:
                send_buffer = allocate(gpu, cleanup, send_bytes)
                receive_buffer = allocate(gpu, cleanup, receive_bytes)
            expected_output = None
            if self._output_chunks:
                expected_output = allocate(gpu, cleanup, receive_bytes)
                self._write_chunks(expected_output, self._output_chunks)
            self._sets.append(_BufferSet(send_buffer, receive_buffer, expected_output))
            self._fill(self._sets[-1])

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
                self._owner.wait(stream)
            if buffers.expected_output is not None:
                size_bytes = len(self._output_chunks) * self._collective.chunk_bytes
                wrong_count += self._owner.compare.count_different(
                    buffers.receive_buffer, buffers.expected_output, size_bytes, LEGACY
                )
                word_count += size_bytes // 4
            self._fill(buffers)
        return wrong_count, word_count

    def close(self) -> None:
        self._cleanup.close()

    def _fill(self, buffers: _BufferSet) -> None:
        """Poison the output, then write the input."""
        self._gpu.fill(buffers.receive_buffer, POISON, self._receive_bytes, LEGACY)
        self._write_chunks(buffers.send_buffer, self._input_chunks)

    def _write_chunks(self, ptr: Ptr, chunks: list[Pattern]) -> None:
        """Write each chunk: copy a period from the host, then repeat it by copies on the device."""
        gpu, element = self._gpu, self._collective.element
        size_bytes = self._collective.chunk_bytes
        for number, pattern in enumerate(chunks):
            chunk = Ptr(ptr + number * size_bytes)
            first_period = pattern.elements(min(self._collective.count, PERIOD))
            staging_view = gpu.host_view(self._staging_buffer, first_period.nbytes)
            np.frombuffer(staging_view, element.storage_dtype)[:] = first_period
            gpu.copy(chunk, self._staging_buffer, first_period.nbytes, LEGACY)
            written_bytes = first_period.nbytes
            while written_bytes < size_bytes:
                copied_bytes = min(written_bytes, size_bytes - written_bytes)
                gpu.copy(Ptr(chunk + written_bytes), chunk, copied_bytes, LEGACY)
                written_bytes += copied_bytes
            gpu.sync_stream(LEGACY)


# --- inputs and expected outputs: the host reference ------------------------------------------------
#
# Every rank has its own periodic pattern of small integers. All partial sums are exact in the element type,
# so that the order of additions does not matter and outputs are compared bit by bit.


@dataclass(frozen=True, slots=True)
class Pattern:
    """A chunk of a buffer: element i has the bits ``period[(begin + i) % PERIOD]``."""

    period: Bits
    begin: int  # Index of the first element within the period.

    def elements(self, count: int) -> Bits:
        return np.take(self.period, np.arange(self.begin, self.begin + count), mode="wrap")


def input_chunks(collective: Collective, rank: int, rank_count: int, seed: int) -> list[Pattern]:
    """Return the chunks of a rank's send buffer.

    Raises Unsupported if sums over the ranks are not exact in the element type.
    """
    period = encode(_input_values(collective, rank, rank_count, seed), collective.element)
    return [
        Pattern(period, chunk * collective.count % PERIOD)
        for chunk in range(collective.send_chunks(rank_count))
    ]


def expected_chunks(collective: Collective, rank: int, rank_count: int, seed: int) -> list[Pattern]:
    """Return the chunks that a rank's receive buffer must have; no chunk if the rank receives nothing."""
    chunk = 0
    match collective.operation:
        case "all-gather":
            sources = list(range(rank_count))
        case "all-to-all":
            sources, chunk = list(range(rank_count)), rank
        case "broadcast":
            sources = [ROOT]
        case "send-receive":
            sources = [(rank - 1) % rank_count]
        case "reduce" if rank != ROOT:
            return []
        case _:
            chunk = rank if collective.operation == "reduce-scatter" else 0
            summed_values = sum(
                _input_values(collective, source, rank_count, seed) for source in range(rank_count)
            )
            period = encode(summed_values, collective.element)
            return [Pattern(period, chunk * collective.count % PERIOD)]
    return [input_chunks(collective, source, rank_count, seed)[chunk] for source in sources]


def exact_limit(element: Element) -> int:
    """Return the largest integer up to which an element type represents all integers exactly."""
    if element.is_integer:
        return int(np.iinfo(element.storage_dtype).max)
    own_format = element.format
    bits = own_format.mantissa_bits if own_format else np.finfo(element.storage_dtype).nmant
    return int(2 ** (bits + 1))


@lru_cache(maxsize=64)
def _input_values(
    collective: Collective, rank: int, rank_count: int, seed: int
) -> npt.NDArray[np.float64]:
    """Return one period of a rank's input values."""
    largest_sum = exact_limit(collective.element)
    if collective.operation in REDUCTIONS:
        largest_sum //= rank_count
        if not largest_sum:
            raise Unsupported(
                f"sums of {collective.element.name} over {rank_count} ranks are not exact, "
                "so they cannot be verified",
                hint="choose another --dtype",
            )
    generator = np.random.default_rng([seed, rank])
    values = generator.integers(0, min(largest_sum, _MAX_VALUE), PERIOD, endpoint=True)
    return values.astype(np.float64)
