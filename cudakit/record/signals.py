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
