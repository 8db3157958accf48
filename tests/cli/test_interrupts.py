from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cudakit.cli.failure import ExitCode, held_interrupts


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_is_delivered_when_the_work_calls_deliver() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), held_interrupts() as deliver:
        deliver()
        press_ctrl_c()
        done.append("a step, whole")
        deliver()
        done.append("never")

    assert done == ["a step, whole"]


def test_second_ctrl_c_is_immediate() -> None:
    with held_interrupts():
        press_ctrl_c()
        with pytest.raises(KeyboardInterrupt):
            press_ctrl_c()


def test_delivered_ctrl_c_is_not_delivered_again() -> None:
    with held_interrupts() as deliver:
        press_ctrl_c()
        with pytest.raises(KeyboardInterrupt):
            deliver()
        deliver()


def somebody_elses(*_: object) -> None:
    """Handle a signal by doing nothing."""


@pytest.mark.parametrize("handler", [signal.SIG_IGN, somebody_elses])
def test_foreign_sigint_handler_stays_installed(handler: signal.Handlers) -> None:
    before = signal.signal(signal.SIGINT, handler)
    try:
        with held_interrupts() as deliver:
            press_ctrl_c()
            deliver()
            assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_sigint_handler_is_restored() -> None:
    with held_interrupts():
        pass

    with pytest.raises(KeyboardInterrupt):
        press_ctrl_c()


def test_other_thread_installs_no_handler() -> None:
    handlers: list[object] = []

    def work() -> None:
        with held_interrupts() as deliver:
            deliver()
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

    assert handlers == [signal.default_int_handler]


def test_interrupt_inside_exec_ends_with_130(tmp_path: Path) -> None:
    (tmp_path / "interrupted.py").write_text(
        "import sys\n"
        "from cudakit.cli.failure import report_error\n"
        "try:\n"
        "    exec('raise KeyboardInterrupt')\n"
        "except KeyboardInterrupt as error:\n"
        "    sys.exit(report_error(error))\n"
    )
    # CPython behaves so with ``python -m`` only, not with a script file.
    run = subprocess.run(
        [sys.executable, "-m", "interrupted"], cwd=tmp_path, capture_output=True, text=True
    )

    assert (run.returncode, run.stderr) == (ExitCode.INTERRUPTED, "\n")


PRESSED_AMID_IMPORTS = """
import signal, sys

class Pressing:
    def find_spec(self, name, path=None, target=None):
        if name == "cudakit.cli":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Pressing())
from cudakit.__main__ import main
sys.exit(main())
"""


def test_ctrl_c_during_import_ends_with_130_and_no_message() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRESSED_AMID_IMPORTS], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stdout, done.stderr) == (ExitCode.INTERRUPTED, "", "")
