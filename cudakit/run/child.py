"""The program as a child process: start, job control and exit status."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Iterable, Mapping
from signal import Signals

from cudakit.run.command import Command, CommandNotExecutable, CommandNotFound

# Stop signals of a terminal. SIGSTOP from elsewhere is meant for the program alone.
_JOB_CONTROL = frozenset({Signals.SIGTSTP, Signals.SIGTTIN, Signals.SIGTTOU})
# Ignored by Python; reset for the program.
_IGNORED_BY_PYTHON = (Signals.SIGPIPE, Signals.SIGXFSZ)


class Child:
    """A program that runs in the foreground, with the standard streams and the open files of this one."""

    def __init__(
        self, command: Command, environment: Mapping[str, str], *, mask: Iterable[Signals]
    ) -> None:
        self.status: int | None = None  # as of subprocess: -N if signal N ended it
        self.process = _spawn(command, environment, mask)

    def poll(self) -> int | None:
        """Return the status if the program has ended; stop with a program that a terminal stopped."""
        while self.status is None:
            process, status = os.waitpid(self.process, os.WNOHANG | os.WUNTRACED)
            if not process:
                break
            if not os.WIFSTOPPED(status):
                self.status = os.waitstatus_to_exitcode(status)
            elif os.WSTOPSIG(status) in _JOB_CONTROL:
                os.kill(os.getpid(), Signals.SIGSTOP)
        return self.status

    def send(self, number: Signals) -> None:
        """Send a signal, unless the program has ended."""
        if self.status is None:
            os.kill(self.process, number)


def _spawn(command: Command, environment: Mapping[str, str], mask: Iterable[Signals]) -> int:
    try:
        return _posix_spawn(command.program, command.argv, environment, mask)
    except FileNotFoundError as error:
        raise CommandNotFound(f"{command.program} or its interpreter is not there") from error
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise CommandNotExecutable(f"{command.program}: {error.strerror}") from error
    # A script without a shebang line: run by sh, as shells and execvp do.
    argv = ("/bin/sh", command.program, *command.argv[1:])
    return _posix_spawn(argv[0], argv, environment, mask)


def _posix_spawn(
    program: str, argv: tuple[str, ...], environment: Mapping[str, str], mask: Iterable[Signals]
) -> int:
    return os.posix_spawn(program, argv, environment, setsigmask=mask, setsigdef=_IGNORED_BY_PYTHON)


def finish(status: int) -> int:
    """End as the program ended: return its exit code, or die by the signal that killed it.

    Buffers must be flushed before. If the signal does not kill this process, the exit code is 128 plus its
    number, as in a shell.
    """
    if status >= 0:
        return status
    number = -status
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most))  # a core dump of this process is useless
    if number not in (Signals.SIGKILL, Signals.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    return shell_status(status)


def shell_status(status: int) -> int:
    """Return a status as in a shell: 128 plus the number of the signal that ended the program."""
    return status if status >= 0 else 128 - status
