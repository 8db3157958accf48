"""Run a program in the foreground, and read the records that its processes write."""

from __future__ import annotations

import errno
import os
import resource
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from signal import Signals
from tempfile import TemporaryDirectory, gettempdir
from types import FrameType
from typing import Any

from cudakit.record.command import Command, CommandNotExecutable, CommandNotFound
from cudakit.record.protocol import (
    AgentMessage,
    AgentMessageKind,
    AgentMessages,
    Settings,
    child_environment,
)
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
            for loss in losses.read_all():
                on_message(AgentMessage(loss.process, AgentMessageKind.INCOMPLETE, str(loss)))
    if reader.failure:
        raise reader.failure
    return child.status or 0


@dataclass(slots=True)
class _SpoolReader:
    """Reads a spool, and passes records to ``on_batch`` and messages to ``on_message``."""

    spool: Spool
    messages: AgentMessages
    on_batch: Callable[[Batch], bool]
    on_message: Callable[[AgentMessage], None]
    is_stopped: bool = False  # whether ``on_batch`` has asked to stop the program
    failure: Exception | None = None  # the first exception of a callback

    def read(self, after_batch: Callable[[], None]) -> None:
        """Pass on the new records and messages; call ``after_batch`` after each batch."""
        try:
            for batch in self.spool.batches():
                # After a stop or a failure, batches are read and dropped, so that the spool does not grow.
                if not self.is_stopped and not self.failure:
                    self.is_stopped = self.on_batch(batch)
                after_batch()
            for message in self.messages.read_new():
                self.on_message(message)
            while self.spool.error_messages:
                error = self.spool.error_messages.pop()
                self.on_message(AgentMessage(0, AgentMessageKind.INCOMPLETE, error))
        except Exception as failure:  # noqa: BLE001 an error of cudakit must not disturb the program
            self.failure = self.failure or failure


# --- The program as a child process: start, job control and exit status ----------------------------

# Stop signals that a terminal sends. SIGSTOP is not one of them; if a user sends it to the program, only the
# program stops.
_JOB_CONTROL = frozenset({Signals.SIGTSTP, Signals.SIGTTIN, Signals.SIGTTOU})
# Signals that Python ignores. The program gets their default actions, as it does without cudakit.
_IGNORED_BY_PYTHON = (Signals.SIGPIPE, Signals.SIGXFSZ)


class Child:
    """A program in the foreground, with the standard streams and inheritable files of this process."""

    def __init__(
        self, command: Command, environment: Mapping[str, str], *, mask: Iterable[Signals]
    ) -> None:
        # Exit status of the program, as in subprocess: -N if signal N ended it; None while it runs.
        self.status: int | None = None
        spawn = partial(os.posix_spawn, setsigmask=mask, setsigdef=_IGNORED_BY_PYTHON)
        try:
            self.process = spawn(command.program, command.argv, environment)
        except FileNotFoundError as error:
            raise CommandNotFound(
                f"{command.program}: the file or its interpreter does not exist"
            ) from error
        except OSError as error:
            if error.errno != errno.ENOEXEC:
                raise CommandNotExecutable(f"{command.program}: {error.strerror}") from error
            # The program is a script without a shebang line. Run it with sh, as shells and execvp do.
            argv = ("/bin/sh", command.program, *command.argv[1:])
            self.process = spawn(argv[0], argv, environment)

    def poll(self) -> int | None:
        """Return the status if the program has ended. If a terminal stopped it, stop this process, too."""
        while self.status is None:
            pid, wait_status = os.waitpid(self.process, os.WNOHANG | os.WUNTRACED)
            if not pid:
                break
            if not os.WIFSTOPPED(wait_status):
                self.status = os.waitstatus_to_exitcode(wait_status)
            elif os.WSTOPSIG(wait_status) in _JOB_CONTROL:
                os.kill(os.getpid(), Signals.SIGSTOP)
        return self.status

    def send(self, signal_number: Signals) -> None:
        """Send a signal, unless the program has ended."""
        if self.status is None:
            os.kill(self.process, signal_number)


def end_like_program(status: int) -> int:
    """Return the program's exit code, or end this process by the signal that ended the program.

    The caller must flush all buffers before. If the signal does not end this process, returns 128 plus the
    number of the signal, as a shell does.
    """
    if status >= 0:
        return status
    signal_number = -status
    # Only the core dump of the program is useful, so this process writes none.
    _, hard_limit = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard_limit))
    if signal_number not in (Signals.SIGKILL, Signals.SIGSTOP):
        signal.signal(signal_number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal_number})
    os.kill(os.getpid(), signal_number)
    return shell_status(status)


def shell_status(status: int) -> int:
    """Return a status as a shell does: 128 plus the number of the signal that ended the program."""
    return status if status >= 0 else 128 - status


# --- Relay signals to the program that cudakit runs ------------------------------------------------
#
# Both processes are in one process group, so signals of a terminal reach the program directly and are not
# relayed. Signals that were sent to cudakit alone are relayed.

# Code of a signal that the kernel sent, for example its terminal driver (asm-generic/siginfo.h).
_SI_KERNEL = 0x80
# Signals that a terminal can send.
_TERMINAL_SIGNALS = frozenset({Signals.SIGINT, Signals.SIGQUIT, Signals.SIGTSTP, Signals.SIGWINCH})
_RELAYED_SIGNALS = _TERMINAL_SIGNALS | {
    Signals.SIGTERM,
    Signals.SIGHUP,
    Signals.SIGUSR1,
    Signals.SIGUSR2,
    Signals.SIGCONT,
}


class SignalRelay:
    """Receives signals inside the ``with`` block, instead of their default actions.

    ``mask`` is the previous signal mask, for programs that are started in the block. Ignored signals stay
    ignored, as ``nohup`` requires.
    """

    def __init__(self) -> None:
        self.mask: set[Signals] = set()
        self._handled_signals = {
            signal_number
            for signal_number in _RELAYED_SIGNALS
            if signal.getsignal(signal_number) is not signal.SIG_IGN
        }
        self._handlers: dict[Signals, Any] = {}
        self._signals_of_other_threads: deque[Signals] = deque()

    def __enter__(self) -> SignalRelay:
        awaited_signals = self._handled_signals | {Signals.SIGCHLD}
        self._handlers = {
            signal_number: signal.signal(signal_number, self._receive)
            for signal_number in awaited_signals
        }
        previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, awaited_signals)
        self.mask = {Signals(number) for number in previous_mask if number in set(Signals)}
        return self

    def __exit__(self, *_: object) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)
        for signal_number, handler in self._handlers.items():
            signal.signal(signal_number, handler)

    def wait_for_signals(self, seconds: float) -> Iterator[Signals]:
        """Yield the signals to relay. Return when a child changes state, or after a number of seconds."""
        while self._signals_of_other_threads:
            signal_number = self._signals_of_other_threads.popleft()
            if signal_number in self._handled_signals and not (
                signal_number in _TERMINAL_SIGNALS and _is_in_foreground()
            ):
                yield signal_number
        deadline = time.monotonic() + seconds
        awaited_signals = self._handled_signals | {Signals.SIGCHLD}
        while signal_info := signal.sigtimedwait(
            awaited_signals, max(deadline - time.monotonic(), 0)
        ):
            if signal_info.si_signo == Signals.SIGCHLD:
                return
            if signal_info.si_code != _SI_KERNEL:
                yield Signals(signal_info.si_signo)

    def _receive(self, signal_number: int, _: FrameType | None) -> None:
        # The operating system delivered the signal to a library's thread, which does not block the signal.
        # The sender of such a signal is unknown.
        self._signals_of_other_threads.append(Signals(signal_number))


def _is_in_foreground() -> bool:
    """Return whether this process group is the foreground group of its terminal."""
    try:
        terminal_descriptor = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal_descriptor) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal_descriptor)
