"""The group of ranks in the process of rank 0: it sends requests to all ranks and collects the answers.

A rank is a thread of this process, or another process with a TCP connection. Every request goes to all ranks;
an answer, an error or the end of a rank arrives in one queue. The first failure ends all ranks.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any, Protocol, TypeAlias

from cudakit.bench.collectives.rank import CLOSE, REQUEST, Message, Rank
from cudakit.bench.timer import (
    CapturedWork,
    Enqueue,
    Reading,
    SampleWork,
    host_clock,
    l2_size_bytes,
)
from cudakit.errors import CollectiveError, Unsupported
from cudakit.gpu.api import Gpu, Stream

# After the first failure, the group waits this long for the reasons of the other ranks.
_FAILURE_GRACE_S = 1.0
_CLOSE_TIMEOUT_S = 5.0
# The operation id that marks a graph launch in a list of work.
_GRAPH = -1

# A queue of pairs of a rank's number and its message; the message None means that the rank ended.
Answers: TypeAlias = "queue.SimpleQueue[tuple[int, Message | None]]"
# A pair of an operation's id and the index of a buffer set.
Execution: TypeAlias = tuple[int, int]


def new_answers() -> Answers:
    """Return an empty queue for the messages of all ranks."""
    return queue.SimpleQueue()


class Channel(Protocol):
    """The connection of rank 0's process to one rank: a thread, or another process."""

    @property
    def name(self) -> str:
        """Name of the rank in messages: "rank 1 (host, process 42)"."""

    def send(self, message: Message) -> None:
        """Send a message. Has no effect if the rank has ended."""

    def abort(self, reason: str) -> None:
        """End the current operation of the rank, and then the rank."""

    def close(self) -> None:
        """Wait for the end of the rank, and release the channel."""


class LocalChannel:
    """A rank in a thread of this process."""

    def __init__(
        self, open_gpu: Callable[[], Gpu], rank: int, rank_count: int, answers: Answers, name: str
    ) -> None:
        self.name = name
        self._rank = Rank(open_gpu, rank, rank_count, lambda message: answers.put((rank, message)))
        self._thread = Thread(target=self._rank.run, name=f"rank {rank}", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        self._rank.inbox.put(message)

    def abort(self, reason: str) -> None:  # noqa: ARG002 this process reports the reason
        self._rank.abort()
        self._rank.inbox.put({"number": 0, REQUEST: CLOSE, "arguments": {}})

    def close(self) -> None:
        self._thread.join(_CLOSE_TIMEOUT_S)


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
        """Return an unused id for an operation or a graph."""
        self._last_object_id += 1
        return self._last_object_id

    def connect(self, library: str, host: str) -> list[str]:
        """Connect all ranks by a library; return its version on each rank."""
        unique_id = self.request("create_id", library=library, host=host, only_rank=0)[0]
        return self.request("connect", library=library, unique_id=unique_id)

    def enqueue(self, operation_id: int, buffer_set: int) -> None:
        """Add an execution to the work of the next request."""
        self._pending_work.append((operation_id, buffer_set))

    def launch_graph(self, graph_id: int) -> None:
        """Add the launch of a graph to the work of the next request."""
        self._pending_work.append((_GRAPH, graph_id))

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
        answer_by_rank = self._collect(set(ranks))
        error_by_rank = {
            rank: answer_by_rank[rank]["error"] for rank in ranks if "error" in answer_by_rank[rank]
        }
        for rank, error in error_by_rank.items():
            if error["kind"] != "unsupported":
                raise self.fail(f"{self.channels[rank].name}: {error['message']}", error["hint"])
        for error in error_by_rank.values():
            raise Unsupported(error["message"], hint=error["hint"])
        return [answer_by_rank[rank].get("value") for rank in ranks]

    def fail(self, reason: str, hint: str = "") -> CollectiveError:
        """End all ranks, and return the error with the reason."""
        if not self.failure:
            self.failure = reason
            for channel in self.channels:
                channel.abort(reason)
        return CollectiveError(self.failure, hint=hint)

    def close(self) -> None:
        """End all ranks, and wait for them."""
        if not self.failure:
            for channel in self.channels:
                channel.send({"number": 0, REQUEST: CLOSE, "arguments": {}})
        for channel in self.channels:
            channel.close()

    def _collect(self, ranks: set[int]) -> dict[int, Message]:
        """Return the answers of ranks to the last request. Raises CollectiveError if one does not answer."""
        answer_by_rank: dict[int, Message] = {}
        ended_ranks: list[int] = []
        deadline_s = time.monotonic() + self._timeout_s
        while ranks - answer_by_rank.keys():
            try:
                rank, message = self._answers.get(timeout=max(deadline_s - time.monotonic(), 0))
            except queue.Empty:
                break
            if message is None:
                ended_ranks.append(rank)
            elif message["number"] in (0, self._request_number):
                answer_by_rank[rank] = message
            else:
                continue  # This is the answer to an earlier request, which was interrupted.
            if message is None or message.get("error", {}).get("kind") == "failed":
                # The other ranks may be waiting for the failed rank in a collective operation.
                deadline_s = min(deadline_s, time.monotonic() + _FAILURE_GRACE_S)
        if ended_ranks:
            raise self.fail(f"{self._name(ended_ranks)} ended")
        missing_ranks = sorted(ranks - answer_by_rank.keys())
        if missing_ranks and not any("error" in answer for answer in answer_by_rank.values()):
            timeout_text = f"{self._timeout_s:g} s"
            raise self.fail(f"{self._name(missing_ranks)} did not answer within {timeout_text}")
        return answer_by_rank | {rank: {} for rank in missing_ranks}

    def _name(self, ranks: Sequence[int]) -> str:
        return " and ".join(self.channels[rank].name for rank in sorted(set(ranks)))


class GroupTimer:
    """Times work on all ranks: the time of a sample is that of the slowest rank.

    ``gpu`` is the device of the first rank in this process; the properties of this device stand for those of
    all ranks.
    """

    def __init__(self, gpu: Gpu, group: RankGroup) -> None:
        self.gpu = gpu
        self.l2_bytes = l2_size_bytes(gpu.facts().fields)
        self.now_s = self._virtual_now_s if gpu.simulated else host_clock(gpu)
        self._virtual_s = (
            0.0  # Simulated ranks have separate clocks; this clock is the sum of all samples.
        )
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
        """Capture work in a graph on every rank."""
        group = self._group
        group.execute_pending_work()
        work(self.stream)
        graph_id = group.new_id()
        group.request("capture", graph_id=graph_id, work=group.take_pending_work())

        def destroy_graph() -> None:
            if not group.failure:
                group.request("destroy_graph", graph_id=graph_id)

        return CapturedWork(lambda _: group.launch_graph(graph_id), destroy_graph)

    def _virtual_now_s(self) -> float:
        return self._virtual_s

    def close(self) -> None:
        """Release the stream."""
        self.gpu.destroy_stream(self.stream)
