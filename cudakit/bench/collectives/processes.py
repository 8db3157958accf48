"""Ranks in other processes: the channel that rank 0 uses, and the main loop of the other processes."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Thread
from typing import Any

from cudakit.bench.collectives.group import Answers
from cudakit.bench.collectives.launch import Launch
from cudakit.bench.collectives.rank import CLOSE, REQUEST, Message, Rank
from cudakit.bench.collectives.rendezvous import Connection, join
from cudakit.errors import CollectiveError, InputError
from cudakit.gpu.api import Gpu

# Maximum time that a process waits after a failure for its rank to end, before the process exits.
_END_TIMEOUT_S = 3.0
# Key of the message that ends a rank early; its value is the reason.
_ENDED = "ended"


def process_facts(
    version: str, options: Mapping[str, str], variables: Mapping[str, str]
) -> Message:
    """Return the identity of this process, and the version and options that must be equal in all ranks."""
    return {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "version": version,
        "options": dict(options),
        "variables": nccl_variables(variables),
    }


def nccl_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that NCCL reads."""
    return {name: text for name, text in variables.items() if name.startswith("NCCL_")}


def check_same_options(rank_0_facts: Message, facts: Message, rank: int) -> None:
    """Raise InputError if a rank was started with another version or other options than rank 0."""
    if facts["version"] != rank_0_facts["version"]:
        raise InputError(
            f"rank {rank} on {facts['host']} has cudakit {facts['version']}, "
            f"rank 0 on {rank_0_facts['host']} has {rank_0_facts['version']}",
            hint="install the same version on all hosts",
        )
    rank_0_options, options = rank_0_facts["options"], facts["options"]
    for name in sorted(rank_0_options.keys() | options.keys()):
        rank_0_value, value = rank_0_options.get(name), options.get(name)
        if value != rank_0_value:
            raise InputError(
                f"rank {rank} on {facts['host']} has {name} = {value}, rank 0 has {rank_0_value}",
                hint="start all ranks with the same options",
            )


class RemoteChannel:
    """A rank in another process."""

    def __init__(self, connection: Connection, rank: int, answers: Answers, facts: Message) -> None:
        self.name = f"rank {rank} ({facts['host']}, process {facts['process']})"
        self._connection, self._rank, self._answers = connection, rank, answers
        self._reader_thread = Thread(target=self._read_messages, name=f"rank {rank}", daemon=True)
        self._reader_thread.start()

    def send(self, message: Message) -> None:
        with suppress(OSError):  # The thread that receives messages reports the end of the rank.
            self._connection.send(message)

    def abort(self, reason: str) -> None:
        self.send({_ENDED: reason})

    def close(self) -> None:
        self._reader_thread.join(_END_TIMEOUT_S)
        self._connection.close()

    def _read_messages(self) -> None:
        message: Message | None = {}
        while message is not None:
            try:
                message = self._connection.receive()
            except ValueError:
                message = None
            self._answers.put((self._rank, message))


def serve_rank(
    launch: Launch,
    rendezvous: str,
    facts: Message,
    open_gpu: Callable[[], Gpu],
    timeout_s: float,
) -> None:
    """Execute the requests of rank 0 in this process, until rank 0 ends the measurement.

    Raises CollectiveError if another rank fails or rank 0 ends.
    """
    connection = join(launch, rendezvous, facts, timeout_s)
    rank = Rank(open_gpu, launch.rank, launch.rank_count, _make_reply(connection))
    thread = Thread(target=rank.run, name="rank", daemon=True)
    thread.start()
    reason = ""
    while not reason:
        try:
            message = connection.receive()
        except ValueError as error:
            message = {_ENDED: f"rank 0 sent no message, but other data: {error}"}
        if message is None:
            reason = "rank 0 ended"
        elif _ENDED in message:
            reason = str(message[_ENDED])
        else:
            rank.inbox.put(message)
            if message.get(REQUEST) == CLOSE:
                thread.join(_END_TIMEOUT_S)
                connection.close()
                return
    rank.abort()
    rank.inbox.put({"number": 0, REQUEST: CLOSE, "arguments": {}})
    thread.join(_END_TIMEOUT_S)
    connection.close()
    raise CollectiveError(f"rank {launch.rank} stopped: {reason}")


def _make_reply(connection: Connection) -> Callable[[Message], Any]:
    def reply(message: Message) -> None:
        with suppress(OSError):  # The main thread reports the end of rank 0.
            connection.send(message)

    return reply
