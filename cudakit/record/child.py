"""The program as a child process: start, job control and exit status."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Iterable, Mapping
from signal import Signals

from cudakit.record.command import Command, CommandNotExecutable, CommandNotFound

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
        self.process = _spawn(command, environment, mask)

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


def _spawn(command: Command, environment: Mapping[str, str], mask: Iterable[Signals]) -> int:
    try:
        return _posix_spawn(command.program, command.argv, environment, mask)
    except FileNotFoundError as error:
        raise CommandNotFound(
            f"{command.program}: the file or its interpreter does not exist"
        ) from error
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise CommandNotExecutable(f"{command.program}: {error.strerror}") from error
    # The program is a script without a shebang line. Run it with sh, as shells and execvp do.
    argv = ("/bin/sh", command.program, *command.argv[1:])
    return _posix_spawn(argv[0], argv, environment, mask)


def _posix_spawn(
    program: str, argv: tuple[str, ...], environment: Mapping[str, str], mask: Iterable[Signals]
) -> int:
    return os.posix_spawn(program, argv, environment, setsigmask=mask, setsigdef=_IGNORED_BY_PYTHON)


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
