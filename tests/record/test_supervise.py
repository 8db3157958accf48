""""""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from record.programs import RECORDING, plain, supervised

from cudakit.record.command import Command, CommandNotExecutable, CommandNotFound
from cudakit.record.protocol import AgentMessage, AgentMessageKind, Settings
from cudakit.record.supervise import shell_status, supervise
from cudakit.trace.kinds import EventKind
from cudakit.trace.spool import Batch

RECORDS = """
import os, signal, sys, time
from cudakit.gpu.api import LEGACY
from cudakit.gpu.sim import Sim
gpu = Sim()
def fill(count):
    ptr = gpu.malloc(64)
    for _ in range(count):
        gpu.fill(ptr, 1, 64, LEGACY)
    gpu.sync()
"""


class Counted:
    """A consumer that counts fills, in each process."""

    def __init__(self, limit: int = 1 << 60) -> None:
        self.fills: dict[int, int] = {}
        self.seen_s: list[float] = []
        self._limit = limit

    def __call__(self, batch: Batch) -> bool:
        fills = int((batch.records["kind"] == EventKind.FILL).sum())
        self.fills[batch.process] = self.fills.get(batch.process, 0) + fills
        self.seen_s.append(time.monotonic())
        return self.total >= self._limit

    @property
    def total(self) -> int:
        return sum(self.fills.values())


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Use a temporary directory of its own, which must be empty after the test."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    yield directory
    assert list(directory.iterdir()) == []


def test_records_reach_the_consumer(tmp_path: Path) -> None:
    on_batch = Counted()

    completed = supervised(["-c", RECORDS + "fill(20)"], cwd=tmp_path, on_batch=on_batch)

    assert (completed.status, completed.stderr) == (0, "")
    assert list(on_batch.fills.values()) == [20]


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os._exit(4)", 4),
        ("sys.exit(3)", 3),
    ],
)
def test_records_survive_every_end_of_the_program(tmp_path: Path, end: str, status: int) -> None:
    on_batch = Counted()

    completed = supervised(["-c", RECORDS + f"fill(20); {end}"], cwd=tmp_path, on_batch=on_batch)

    assert completed.status == status
    assert on_batch.total == 20


def test_records_reach_the_consumer_while_the_program_runs(tmp_path: Path) -> None:
    on_batch = Counted()
    script = RECORDS + "fill(1); print(time.monotonic()); sys.stdout.flush(); time.sleep(0.4)"

    completed = supervised(["-c", script], cwd=tmp_path, on_batch=on_batch)

    assert on_batch.seen_s[-1] - float(completed.stdout) < 0.3


FORKS = "pid = os.fork(); fill(3); pid and os.waitpid(pid, 0)"
STARTS = """
import subprocess
fill(3)
subprocess.run([sys.executable, "-P", "-c", "from cudakit.gpu.sim import Sim; g = Sim(); "
    "g.fill(g.malloc(8), 1, 8, g.stream())"], check=True)
"""


@pytest.mark.parametrize("follow", [True, False])
def test_child_processes_are_recorded_unless_follow_is_off(tmp_path: Path, *, follow: bool) -> None:
    on_batch = Counted()

    completed = supervised(
        ["-c", RECORDS + STARTS],
        cwd=tmp_path,
        on_batch=on_batch,
        settings=Settings(sanitize=True, follow=follow),
    )

    assert (completed.status, completed.stderr) == (0, "")
    assert sorted(on_batch.fills.values()) == ([1, 3] if follow else [3])


def test_forked_process_is_recorded(tmp_path: Path) -> None:
    on_batch = Counted()

    supervised(["-c", RECORDS + FORKS], cwd=tmp_path, on_batch=on_batch)

    assert sorted(on_batch.fills.values()) == [3, 3]


@pytest.mark.parametrize("pythonpath", ["", "/mine"])
def test_unfollowed_children_see_the_original_environment(tmp_path: Path, pythonpath: str) -> None:
    script = """
import os
print({n: os.environ[n] for n in os.environ if n == "PYTHONPATH" or n.startswith("CUDAKIT")})
"""
    variables = {"PYTHONPATH": pythonpath} if pythonpath else {}

    outcome = supervised(["-c", script], cwd=tmp_path, settings=Settings(follow=False), **variables)

    assert outcome == plain(["python", "-c", script], cwd=tmp_path, **variables)


def test_consumer_stops_the_program(tmp_path: Path) -> None:
    script = RECORDS + "fill(5)\nwhile True: fill(1); time.sleep(0.01)"

    stops: list[bool] = []
    completed = supervised(
        ["-c", script],
        cwd=tmp_path,
        on_batch=Counted(limit=5),
        on_stop=lambda: stops.append(True),
    )

    assert (completed.status, stops) == (-signal.SIGTERM, [True])


def test_program_that_ended_before_the_stop_was_not_stopped(tmp_path: Path) -> None:
    stops: list[bool] = []

    def on_batch(batch: Batch) -> bool:
        os.waitid(os.P_PID, batch.process, os.WEXITED | os.WNOWAIT)
        return True

    completed = supervised(
        ["-c", RECORDS + "fill(5)"],
        cwd=tmp_path,
        on_batch=on_batch,
        on_stop=lambda: stops.append(True),
    )

    assert (completed.status, stops) == (0, [])


def test_program_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    script = RECORDS + "signal.signal(signal.SIGTERM, signal.SIG_IGN); fill(5); time.sleep(60)"

    completed = supervised(
        ["-c", script], cwd=tmp_path, on_batch=Counted(limit=5), seconds_to_end=0.2
    )

    assert completed.status == -signal.SIGKILL


def test_failing_consumer_does_not_harm_the_program(tmp_path: Path) -> None:
    def on_batch(_: Batch) -> bool:
        raise ZeroDivisionError

    marker = tmp_path / "done"
    script = RECORDS + f"fill(1); time.sleep(0.2); open({str(marker)!r}, 'w').close()"

    with pytest.raises(ZeroDivisionError):
        supervised(["-c", script], cwd=tmp_path, on_batch=on_batch)
    assert marker.exists()


def test_supervisor_does_not_wait_for_surviving_children(tmp_path: Path) -> None:
    on_batch, started = Counted(), tmp_path / "pid"
    script = RECORDS + (
        "fill(2)\n"
        "if child := os.fork():\n"
        f"    open({str(started)!r}, 'w').write(str(child))\n"
        "else:\n"
        "    while True: fill(1); time.sleep(0.001)\n"
    )

    supervised(["-c", script], cwd=tmp_path, on_batch=on_batch)

    os.kill(int(started.read_text()), signal.SIGKILL)  # raises if the process has ended
    assert on_batch.total >= 2


def test_program_without_gpu_work_writes_nothing_to_the_spool(
    tmp_path: Path, temporary: Path
) -> None:
    script = f"""
import os
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=10); memory.close(); memory.unlink()
(spool,) = os.listdir({str(temporary)!r})
print(os.listdir({str(temporary)!r} + "/" + spool), oct(os.stat({str(temporary)!r} + "/" + spool).st_mode))
"""
    completed = supervised(["-c", script], cwd=tmp_path)

    assert completed.stdout == "['losses'] 0o40700\n"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("open(f'{spool}/1-000000.trace', 'wb').write(b'x' * 99)", "is not a trace"),
        ("os.mkfifo(f'{spool}/1-000000.trace')", ""),
        ("os.mkfifo(f'{spool}/1.failed')", ""),
        ("open(f'{spool}/{9 * 10 ** 29}-000000.trace', 'wb').write(b'x' * 99)", ""),
    ],
)
def test_damaged_spool_is_reported_or_ignored(tmp_path: Path, code: str, reason: str) -> None:
    messages: list[AgentMessage] = []
    script = f"import os; spool = os.environ['CUDAKIT_SPOOL']; {code}"

    completed = supervised(["-c", script], cwd=tmp_path, on_message=messages.append)

    assert completed.status == 0
    assert [message.kind for message in messages] == [AgentMessageKind.INCOMPLETE] * bool(reason)
    assert all(reason in message.text for message in messages)


KILLED = """
import sys
from pathlib import Path
from cudakit.record.command import resolve
from cudakit.record.protocol import Settings
from cudakit.record.supervise import supervise
supervise(resolve(["-c", sys.argv[1]]), settings=Settings(sanitize=True), on_batch=lambda _: False)
"""


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


@pytest.mark.parametrize("end", ["gpu.close()", "os._exit(0)"])
def test_spool_of_a_killed_supervisor_is_deleted(tmp_path: Path, temporary: Path, end: str) -> None:
    script = RECORDS + (
        "fill(1)\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.02)\n"
        f"fill(3); {end}"
    )
    supervisor = subprocess.Popen(
        [sys.executable, "-P", "-c", KILLED, script],
        env={**os.environ, "TMPDIR": str(temporary)},
        start_new_session=True,
    )
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
    program = int((tmp_path / "pid").read_text())
    supervisor.kill()
    supervisor.wait()
    assert len(list(temporary.iterdir())) == 1

    (tmp_path / "go").touch()
    wait_until(lambda: not is_running(program))
    if end == "os._exit(0)":  # nothing runs at exit: the next supervisor deletes the spool
        assert len(list(temporary.iterdir())) == 1
        supervised(["-c", "pass"], cwd=tmp_path)
    assert list(temporary.iterdir()) == []


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("content", "error"),
    [("#!/no/such/interpreter\n", CommandNotFound), ("\x7fELF broken", CommandNotExecutable)],
)
def test_program_that_cannot_be_executed_is_refused(
    tmp_path: Path, content: str, error: type[Exception]
) -> None:
    path = tmp_path / "program"
    path.write_text(content)
    path.chmod(0o755 if error is CommandNotFound else 0o644)

    with pytest.raises(error):
        supervise(Command(str(path), (str(path),)), settings=RECORDING, on_batch=lambda _: False)


def test_signal_handlers_are_restored(tmp_path: Path) -> None:
    def handled() -> list[object]:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        return [mask, *(signal.getsignal(number) for number in signal.valid_signals())]

    earlier = handled()
    supervised(["-c", "pass"], cwd=tmp_path)

    assert handled() == earlier


def test_all_files_are_closed(tmp_path: Path) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    earlier = open_files()
    supervised(["-c", RECORDS + "fill(2)"], cwd=tmp_path, on_batch=Counted())

    assert open_files() == earlier


@pytest.mark.parametrize("option", ["-I", "-E", "-S"])
def test_isolated_python_runs_without_the_agent(tmp_path: Path, option: str) -> None:
    words = [sys.executable, option, "-c", "import sys; print(sys.flags, sys.argv); sys.exit(5)"]

    assert supervised(words, cwd=tmp_path) == plain(words, cwd=tmp_path)


# --- Signals sent to the supervisor, or by a terminal to supervisor and program --------------------

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


# Without threads of numpy, which do not block signals; the sender of a signal to such a thread is unknown.
LISTENS = """
import os, sys
os.environ["OPENBLAS_NUM_THREADS"] = "1"
from cudakit.record.supervise import SignalRelay
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
