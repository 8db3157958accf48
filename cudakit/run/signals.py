"""Signals between whoever started cudakit and the program that it runs.

Both are in the same process group, as the program would be without cudakit: what a terminal sends reaches
the program by itself, and is not passed on a second time. What is sent to cudakit alone is passed on.
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

# Sent by the kernel, in our case its terminal (asm-generic/siginfo.h).
_SI_KERNEL = 0x80
_FROM_TERMINALS = frozenset({Signals.SIGINT, Signals.SIGQUIT, Signals.SIGTSTP, Signals.SIGWINCH})
_PASSED_ON = _FROM_TERMINALS | {
    Signals.SIGTERM,
    Signals.SIGHUP,
    Signals.SIGUSR1,
    Signals.SIGUSR2,
    Signals.SIGCONT,
}


class Reception:
    """Receives signals in the place of their default actions, while it is entered.

    ``mask`` is the mask of signals from before, for programs that are started meanwhile. Signals that were
    ignored stay ignored, as ``nohup`` wants it.
    """

    def __init__(self) -> None:
        self.mask: set[Signals] = set()
        self._handled = {
            number for number in _PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN
        }
        self._handlers: dict[Signals, Any] = {}
        self._elsewhere: deque[Signals] = deque()

    def __enter__(self) -> Reception:
        awaited = self._handled | {Signals.SIGCHLD}
        self._handlers = {number: signal.signal(number, self._note) for number in awaited}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
        self.mask = {Signals(number) for number in before if number in set(Signals)}
        return self

    def __exit__(self, *_: object) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def received(self, seconds: float) -> Iterator[Signals]:
        """Wait for a signal, or a change of a child; yield what is to be passed on."""
        while self._elsewhere:
            number = self._elsewhere.popleft()
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
        # Another thread, one of a library, took it while this one was busy: who sent it is not known.
        self._elsewhere.append(Signals(number))


def _is_in_foreground() -> bool:
    """Say whether a terminal sends its signals to this process group."""
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
