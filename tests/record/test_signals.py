"""Signals sent to the supervisor, or by a terminal to supervisor and program."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from cudakit.record.supervise import shell_status

SUPERVISOR = """
import sys
from cudakit.record.supervise import end_like_program
from cudakit.record.command import resolve
from cudakit.record.protocol import Settings
from cudakit.record.supervise import supervise
command = resolve(sys.argv[1:], python=sys.executable)
sys.exit(end_like_program(supervise(command, settings=Settings(), on_batch=lambda _: False)))
"""

WAITS = "import time; print('ready', flush=True); time.sleep(60)"
COUNTS = """
import signal, sys, time
count = 0
def handler(*_):
    global count
    count += 1
for name in sys.argv[1].split(","):
    signal.signal(getattr(signal, name), handler)
print("ready", flush=True)
while not count:
    time.sleep(0.01)
time.sleep(0.3)
print("received", count, flush=True)
sys.exit(9)
"""


def supervisor(script: str, *arguments: str) -> list[str]:
    return [sys.executable, "-P", "-c", SUPERVISOR, "-c", script, *arguments]


def started(script: str, *arguments: str, ignored: int = 0) -> subprocess.Popen[str]:
    def set_ignored() -> None:
        """Set what the child process inherits: the tests themselves may run under nohup."""
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        if ignored:
            signal.signal(ignored, signal.SIG_IGN)

    process = subprocess.Popen(
        supervisor(script, *arguments),
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=set_ignored,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"])
def test_signal_is_relayed_and_ends_both_processes(name: str) -> None:
    number = signal.Signals[name]
    script = WAITS if name != "SIGINT" else f"import signal; signal.signal(2, 0); {WAITS}"
    with started(
        f"import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); {script}"
    ) as process:
        process.send_signal(number)

    assert process.returncode == -number


def test_program_handles_a_relayed_signal_once() -> None:
    with started(COUNTS, "SIGTERM") as process:
        process.send_signal(signal.SIGTERM)
        stdout = process.stdout.read() if process.stdout else ""

    assert (process.returncode, stdout) == (9, "received 1\n")


def test_supervisor_survives_signals_that_the_program_survives() -> None:
    with started(COUNTS, "SIGUSR1,SIGWINCH,SIGCONT") as process:
        process.send_signal(signal.SIGWINCH)
        process.wait()

    assert process.returncode == 9


def test_ignored_signal_stays_ignored() -> None:
    script = "import signal, time; print('ready', flush=True); time.sleep(0.4); print(signal.getsignal(1))"
    with started(script, ignored=signal.SIGHUP) as process:
        process.send_signal(signal.SIGHUP)
        stdout = process.stdout.read() if process.stdout else ""

    assert (process.returncode, stdout) == (0, "1\n")


def in_a_terminal(argv: list[str], act: Callable[[int], None]) -> str:
    """Run a program in its own terminal; ``act`` types into it after "ready" was printed."""
    process, terminal = pty.fork()
    if not process:
        os.execv(argv[0], argv)  # noqa: S606
    output = until(terminal, "ready")
    act(terminal)
    output += until(terminal, None)
    os.waitpid(process, 0)
    os.close(terminal)
    return output


def until(terminal: int, word: str | None) -> str:
    output = ""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and (word is None or word not in output):
        if not select.select([terminal], [], [], 0.1)[0]:
            continue
        try:
            output += os.read(terminal, 1000).decode()
        except OSError:  # all processes have closed the terminal
            break
    return output


LISTENS = """
import os, sys
from cudakit.record.signals import SignalRelay
with SignalRelay() as relay:
    print("ready", flush=True)
    if sys.argv[1:]:
        os.kill(os.getpid(), int(sys.argv[1]))
    for number in relay.wait_for_signals(0.5):
        print("passes on", number.name, flush=True)
"""


@pytest.mark.parametrize("key", [b"\x03", b"\x1c", b"\x1a"], ids=["interrupt", "quit", "stop"])
def test_terminal_signal_is_not_relayed(key: bytes) -> None:
    argv = [sys.executable, "-P", "-c", LISTENS]

    assert "passes on" not in in_a_terminal(argv, lambda terminal: type_keys(terminal, key))


@pytest.mark.parametrize("name", ["SIGINT", "SIGQUIT", "SIGTSTP", "SIGTERM"])
def test_signal_to_the_supervisor_alone_is_relayed(name: str) -> None:
    argv = [sys.executable, "-P", "-c", LISTENS, str(signal.Signals[name].value)]

    assert f"passes on {name}" in in_a_terminal(argv, lambda _: None)


@pytest.mark.parametrize(("key", "name"), [(b"\x03", "SIGINT"), (b"\x1c", "SIGQUIT")])
def test_control_key_reaches_the_program(key: bytes, name: str) -> None:
    output = in_a_terminal(supervisor(COUNTS, name), lambda terminal: type_keys(terminal, key))

    assert "received 1" in output


def type_keys(terminal: int, keys: bytes) -> None:
    os.write(terminal, keys)


# A minimal shell with job control: it reports that its job stopped, and continues it.
SHELL = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
def job():
    os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpgrp())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
process = subprocess.Popen(sys.argv[1:], preexec_fn=job)
_, status = os.waitpid(process.pid, os.WUNTRACED)
os.tcsetpgrp(0, os.getpgrp())
print("stopped", os.WIFSTOPPED(status), flush=True)
os.tcsetpgrp(0, process.pid)
os.killpg(process.pid, signal.SIGCONT)
_, status = os.waitpid(process.pid, 0)
os.tcsetpgrp(0, os.getpgrp())
print("ended", os.waitstatus_to_exitcode(status), flush=True)
"""


def test_supervisor_stops_and_continues_with_the_program() -> None:
    output = in_a_terminal(
        [sys.executable, "-c", SHELL, *supervisor(COUNTS, "SIGCONT")],
        lambda terminal: type_keys(terminal, b"\x1a"),
    )

    assert "stopped True" in output
    assert "ended 9" in output


def test_shell_status_of_a_signal_is_128_plus_its_number() -> None:
    assert [shell_status(status) for status in (0, 3, -15)] == [0, 3, 143]
