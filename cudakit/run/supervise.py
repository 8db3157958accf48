"""Run a program as it runs without cudakit, and read the records that its processes write."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from signal import Signals
from tempfile import TemporaryDirectory, gettempdir

from cudakit.run.child import Child
from cudakit.run.command import Command
from cudakit.run.protocol import (
    AgentMessage,
    AgentMessageKind,
    AgentMessages,
    Settings,
    child_environment,
)
from cudakit.run.signals import SignalRelay
from cudakit.trace.losses import PREFIX, Losses, delete_abandoned
from cudakit.trace.spool import Batch, Spool

_SECONDS_BETWEEN_READS = 0.05
_SECONDS_TO_END = 5.0  # time between SIGTERM and SIGKILL


def supervise(
    command: Command,
    *,
    settings: Settings,
    consume: Callable[[Batch], bool],
    notify: Callable[[AgentMessage], None] = lambda _: None,
    stopping: Callable[[], None] = lambda: None,
    environment: Mapping[str, str] | None = None,
    seconds_to_end: float = _SECONDS_TO_END,
) -> int:
    """Run a command in the foreground, and pass its records to ``consume`` while it runs.

    ``consume`` gets the batches of each process. It returns True to stop the program: with SIGTERM, and after
    ``seconds_to_end`` with SIGKILL. ``stopping`` is called after the SIGTERM, unless the program had already
    ended. ``notify`` gets the messages of agents. Returns the exit status as subprocess does: -N if signal N
    ended the program (``end_like_program``, ``shell_status``). Does not wait for processes that outlive the
    program. An exception of ``consume`` is raised after the program has ended. Must be called in the main
    thread. Raises CommandNotFound and CommandNotExecutable.
    """
    delete_abandoned(Path(gettempdir()))
    with TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as name:
        directory = Path(name)
        child_env = child_environment(
            os.environ if environment is None else environment, settings, directory
        )
        with (
            closing(Losses(directory)) as losses,
            Spool(directory, discard=True) as spool,
            SignalRelay() as relay,
        ):
            child = Child(command, child_env, mask=relay.mask)
            reader = _SpoolReader(spool, AgentMessages(directory), consume, notify)
            _wait_for_exit(child, relay, reader, stopping, seconds_to_end)
            for loss in losses.read_all():
                notify(AgentMessage(loss.process, AgentMessageKind.INCOMPLETE, str(loss)))
    if reader.failure:
        raise reader.failure
    return child.status or 0


class _SpoolReader:
    """Reads a spool, and passes records to ``consume`` and messages to ``notify``."""

    def __init__(
        self,
        spool: Spool,
        messages: AgentMessages,
        consume: Callable[[Batch], bool],
        notify: Callable[[AgentMessage], None],
    ) -> None:
        self.is_stopped = False  # whether ``consume`` has asked to stop the program
        self.failure: Exception | None = None  # the first exception of a callback
        self._spool = spool
        self._messages = messages
        self._consume = consume
        self._notify = notify

    def read(self, after_batch: Callable[[], None]) -> None:
        """Pass on the new records and messages; call ``after_batch`` after each batch."""
        try:
            for batch in self._spool.batches():
                # After a stop or a failure, batches are read and dropped, so that the spool does not grow.
                if not self.is_stopped and not self.failure:
                    self.is_stopped = self._consume(batch)
                after_batch()
            self._pass_on_messages()
        except Exception as failure:  # noqa: BLE001 an error of cudakit must not disturb the program
            self.failure = self.failure or failure

    def _pass_on_messages(self) -> None:
        for message in self._messages.read_new():
            self._notify(message)
        while self._spool.damaged:
            self._notify(AgentMessage(0, AgentMessageKind.INCOMPLETE, self._spool.damaged.pop()))


def _wait_for_exit(
    child: Child,
    relay: SignalRelay,
    reader: _SpoolReader,
    stopping: Callable[[], None],
    seconds_to_end: float,
) -> None:
    """Relay signals and read the spool, until the program has ended and all its records are read."""
    deadline: float | None = None

    def relay_signals(seconds: float = 0.0) -> None:
        for signal_number in relay.pending(seconds):
            child.send(signal_number)

    while child.poll() is None:
        relay_signals(_SECONDS_BETWEEN_READS)
        reader.read(relay_signals)
        if reader.is_stopped and deadline is None and child.poll() is None:
            child.send(Signals.SIGTERM)
            stopping()
            deadline = time.monotonic() + seconds_to_end
        if deadline is not None and time.monotonic() > deadline:
            child.send(Signals.SIGKILL)
    reader.read(lambda: None)
