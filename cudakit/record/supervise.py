"""Run a program in the foreground, and read the records that its processes write."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from signal import Signals
from tempfile import TemporaryDirectory, gettempdir

from cudakit.record.child import Child
from cudakit.record.command import Command
from cudakit.record.protocol import (
    AgentMessage,
    AgentMessageKind,
    AgentMessages,
    Settings,
    child_environment,
)
from cudakit.record.signals import SignalRelay
from cudakit.trace.spool import SPOOL_PREFIX, Batch, Losses, Spool, delete_abandoned

_SECONDS_BETWEEN_READS = 0.05
_SECONDS_TO_END = 5.0  # time between SIGTERM and SIGKILL


def supervise(
    command: Command,
    *,
    settings: Settings,
    on_batch: Callable[[Batch], bool],
    on_message: Callable[[AgentMessage], None] = lambda _: None,
    on_stop: Callable[[], None] = lambda: None,
    environment: Mapping[str, str] | None = None,
    seconds_to_end: float = _SECONDS_TO_END,
) -> int:
    """Run a command in the foreground, and pass its records to ``on_batch`` while it runs.

    ``on_batch`` gets the batches of each process. If ``on_batch`` returns True, the program is stopped: with
    SIGTERM, and after ``seconds_to_end`` with SIGKILL. ``on_stop`` is called after the SIGTERM, unless the
    program had already ended. ``on_message`` gets the messages of agents. Returns the exit status as
    subprocess does: -N if signal N ended the program (``end_like_program``, ``shell_status``). Does not wait
    for processes that outlive the program. An exception of ``on_batch`` is raised after the program has
    ended. Must be called in the main thread. Raises CommandNotFound and CommandNotExecutable.
    """
    delete_abandoned(Path(gettempdir()))
    with TemporaryDirectory(prefix=SPOOL_PREFIX, ignore_cleanup_errors=True) as directory_name:
        directory = Path(directory_name)
        child_env = child_environment(
            os.environ if environment is None else environment, settings, directory
        )
        with (
            closing(Losses(directory)) as losses,
            Spool(directory, discard=True) as spool,
            SignalRelay() as relay,
        ):
            child = Child(command, child_env, mask=relay.mask)
            reader = _SpoolReader(spool, AgentMessages(directory), on_batch, on_message)
            _wait_for_exit(child, relay, reader, on_stop, seconds_to_end)
            for loss in losses.read_all():
                on_message(AgentMessage(loss.process, AgentMessageKind.INCOMPLETE, str(loss)))
    if reader.failure:
        raise reader.failure
    return child.status or 0


class _SpoolReader:
    """Reads a spool, and passes records to ``on_batch`` and messages to ``on_message``."""

    def __init__(
        self,
        spool: Spool,
        messages: AgentMessages,
        on_batch: Callable[[Batch], bool],
        on_message: Callable[[AgentMessage], None],
    ) -> None:
        self.is_stopped = False  # whether ``on_batch`` has asked to stop the program
        self.failure: Exception | None = None  # the first exception of a callback
        self._spool = spool
        self._messages = messages
        self._on_batch = on_batch
        self._on_message = on_message

    def read(self, after_batch: Callable[[], None]) -> None:
        """Pass on the new records and messages; call ``after_batch`` after each batch."""
        try:
            for batch in self._spool.batches():
                # After a stop or a failure, batches are read and dropped, so that the spool does not grow.
                if not self.is_stopped and not self.failure:
                    self.is_stopped = self._on_batch(batch)
                after_batch()
            self._pass_on_messages()
        except Exception as failure:  # noqa: BLE001 an error of cudakit must not disturb the program
            self.failure = self.failure or failure

    def _pass_on_messages(self) -> None:
        for message in self._messages.read_new():
            self._on_message(message)
        while self._spool.error_messages:
            self._on_message(
                AgentMessage(0, AgentMessageKind.INCOMPLETE, self._spool.error_messages.pop())
            )


def _wait_for_exit(
    child: Child,
    relay: SignalRelay,
    reader: _SpoolReader,
    on_stop: Callable[[], None],
    seconds_to_end: float,
) -> None:
    """Relay signals and read the spool, until the program has ended and all its records are read."""
    deadline: float | None = None

    def relay_signals(seconds: float = 0.0) -> None:
        for signal_number in relay.wait_for_signals(seconds):
            child.send(signal_number)

    while child.poll() is None:
        relay_signals(_SECONDS_BETWEEN_READS)
        reader.read(relay_signals)
        if reader.is_stopped and deadline is None and child.poll() is None:
            child.send(Signals.SIGTERM)
            on_stop()
            deadline = time.monotonic() + seconds_to_end
        if deadline is not None and time.monotonic() > deadline:
            child.send(Signals.SIGKILL)
    reader.read(lambda: None)
