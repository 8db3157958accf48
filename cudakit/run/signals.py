"""Relay signals to the program that cudakit runs.

Both processes are in one process group, so signals of a terminal reach the program directly and are not
relayed. Signals that were sent to cudakit alone are relayed.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Iterator
from signal import Signals
from types import FrameType
from typing import Any

# Origin of signals from the kernel, such as those of its terminal driver (asm-generic/siginfo.h).
_SI_KERNEL = 0x80
_FROM_TERMINALS = frozenset({Signals.SIGINT, Signals.SIGQUIT, Signals.SIGTSTP, Signals.SIGWINCH})
_RELAYED = _FROM_TERMINALS | {
    Signals.SIGTERM,
    Signals.SIGHUP,
    Signals.SIGUSR1,
    Signals.SIGUSR2,
    Signals.SIGCONT,
}


class SignalRelay:
    """Inside the ``with`` block, receives signals in place of their default actions.

    ``mask`` is the previous signal mask, for programs started in the block. Ignored signals stay ignored, as
    ``nohup`` requires.
    """

    def __init__(self) -> None:
        self.mask: set[Signals] = set()
        self._handled = {
            number for number in _RELAYED if signal.getsignal(number) is not signal.SIG_IGN
        }
        self._handlers: dict[Signals, Any] = {}
        self._from_other_threads: deque[Signals] = deque()

    def __enter__(self) -> SignalRelay:
        awaited = self._handled | {Signals.SIGCHLD}
        self._handlers = {number: signal.signal(number, self._note) for number in awaited}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
        self.mask = {Signals(number) for number in before if number in set(Signals)}
        return self

    def __exit__(self, *_: object) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def pending(self, seconds: float) -> Iterator[Signals]:
        """Yield the signals to relay until a child changes state, or for a number of seconds."""
        while self._from_other_threads:
            number = self._from_other_threads.popleft()
            if number in self._handled and not (number in _FROM_TERMINALS and _is_in_foreground()):
                yield number
        deadline = time.monotonic() + seconds
        awaited = self._handled | {Signals.SIGCHLD}
        while info := signal.sigtimedwait(awaited, max(deadline - time.monotonic(), 0)):
            if info.si_signo == Signals.SIGCHLD:
                return
            if info.si_code != _SI_KERNEL:
                yield Signals(info.si_signo)

    def _note(self, number: int, _: FrameType | None) -> None:
        # The signal was delivered to a thread of a library, which has not blocked it: the sender is unknown.
        self._from_other_threads.append(Signals(number))


def _is_in_foreground() -> bool:
    """Return whether this process group is the foreground group of its terminal."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
