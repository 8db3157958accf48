"""Runs a program as it runs without cudakit, and reads meanwhile what the agent in it records."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from signal import Signals
from tempfile import TemporaryDirectory

from cudakit.run.child import Child
from cudakit.run.command import Command
from cudakit.run.protocol import About, Notice, Notices, Settings, child_environment
from cudakit.run.signals import Reception
from cudakit.trace.spool import Batch, Spool

_SECONDS_BETWEEN_READS = 0.05
_SECONDS_TO_END = 5.0


def supervise(
    command: Command,
    *,
    settings: Settings,
    consume: Callable[[Batch], bool],
    notify: Callable[[Notice], None] = lambda _: None,
    environment: Mapping[str, str] | None = None,
    seconds_to_end: float = _SECONDS_TO_END,
) -> int:
    """Run a command in the foreground, and hand over what is recorded while it runs.

    ``consume`` is given what each process records, and returns True to end the program: by SIGTERM, and
    some seconds later by SIGKILL. ``notify`` is given what agents have to say. Returns the status as
    subprocess has it: -N where signal N ended the program (``finish``, ``shell_status``). Processes that
    outlive the program are not waited for. What ``consume`` raises is raised when the program has ended.
    Must be called in the main thread. Raises CommandNotFound and CommandNotExecutable.
    """
    with TemporaryDirectory(prefix="cudakit-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        told = child_environment(
            os.environ if environment is None else environment, settings, directory
        )
        with Spool(directory, discard=True) as spool, Reception() as reception:
            child = Child(command, told, mask=reception.mask)
            reading = _Reading(spool, Notices(directory), consume, notify)
            _accompany(child, reception, reading, seconds_to_end)
    if reading.failure:
        raise reading.failure
    return child.status or 0


class _Reading:
    """What is read of a spool, and by whom."""

    def __init__(
        self,
        spool: Spool,
        notices: Notices,
        consume: Callable[[Batch], bool],
        notify: Callable[[Notice], None],
    ) -> None:
        self.enough = False
        self.failure: Exception | None = None
        self._spool = spool
        self._notices = notices
        self._consume = consume
        self._notify = notify

    def read(self, between: Callable[[], None]) -> None:
        """Hand over what came; ``between`` is called after each batch, for this may take long."""
        try:
            for batch in self._spool.batches():
                # Where it is not wanted, it is read all the same: the spool must not grow.
                if not self.enough and not self.failure:
                    self.enough = self._consume(batch)
                between()
            self._tell()
        except Exception as failure:  # noqa: BLE001 the program does not suffer from it
            self.failure = self.failure or failure

    def _tell(self) -> None:
        for notice in self._notices.new():
            self._notify(notice)
        while self._spool.damaged:
            self._notify(Notice(0, About.FAILED, self._spool.damaged.pop()))


def _accompany(
    child: Child, reception: Reception, reading: _Reading, seconds_to_end: float
) -> None:
    """Pass on signals and read, until the program has ended and everything is read."""
    deadline: float | None = None

    def pass_on(seconds: float = 0.0) -> None:
        for number in reception.received(seconds):
            child.send(number)

    while child.poll() is None:
        pass_on(_SECONDS_BETWEEN_READS)
        reading.read(pass_on)
        if reading.enough and deadline is None:
            child.send(Signals.SIGTERM)
            deadline = time.monotonic() + seconds_to_end
        if deadline is not None and time.monotonic() > deadline:
            child.send(Signals.SIGKILL)
    reading.read(lambda: None)
