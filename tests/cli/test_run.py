"""``cudakit run`` from end to end, on programs that use the simulated device."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from invocation import Cli, CliRun

HAS_DEVICE = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()

PROGRAM = """
import sys
from cudakit.gpu.open import open_gpu

gpu = open_gpu("sim")
upload, clearing = gpu.stream(), gpu.stream()
host, memory = gpu.host_malloc(1024), gpu.malloc(1024)
gpu.copy(memory, host, 1024, upload)
if "fixed" in sys.argv:
    gpu.sync_stream(upload)
gpu.fill(memory, 0, 1024, clearing)
gpu.sync()
"""

# To be run instead of the program proper, by what must not start it.
TELLTALE = "from pathlib import Path; Path('started').touch()"


@dataclass(frozen=True, slots=True)
class Here:
    """A directory with a program, and ways to run it."""

    path: Path
    cli: Cli
    command: list[str]

    def program(self, end: str = "", *, name: str = "program.py", text: str = PROGRAM) -> str:
        place = self.path / name
        place.write_text(text + end)
        return name

    def run(self, *arguments: str | Path) -> CliRun:
        """Run in this process, what the program prints excepted."""
        return self.cli("run", *arguments)

    def process(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        line = [*self.command, "run", *map(str, arguments)]
        return subprocess.run(line, capture_output=True, text=True, cwd=self.path, check=False)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli, command: list[str]) -> Here:
    monkeypatch.chdir(tmp_path)
    # For "python3" to be the one that has cudakit.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    return Here(tmp_path, cli, command)


# --- what is found, and the exit code ---------------------------------------------------------------


def test_race_is_reported_on_stderr_with_exit_code_1(here: Here) -> None:
    run = here.process("--sanitize", here.program("print('mine')"))

    assert (run.returncode, run.stdout) == (1, "mine\n")
    assert run.stderr.startswith("1 race between streams")
    assert "program.py:8" in run.stderr
    assert "record an event on stream 3" in run.stderr


def test_synchronized_program_has_no_races(here: Here) -> None:
    run = here.run("--sanitize", here.program(), "fixed")

    assert (run.exit_code, run.stdout) == (0, "")
    assert run.stderr.startswith("No races found")


def test_quiet_prints_the_verdict_and_a_line_for_each_race(here: Here) -> None:
    program = here.program()
    racing, clean = (
        here.run("--sanitize", "-q", program),
        here.run("--sanitize", "-q", program, "fixed"),
    )

    verdict, race = racing.stderr.splitlines()
    assert racing.exit_code == 1
    assert verdict.startswith("1 race between streams")
    assert race.startswith("✗ The memset on stream")
    assert (clean.exit_code, clean.stderr) == (0, "No races found, on a simulated device\n")


def test_exit_code_of_the_program_overrides_races(here: Here) -> None:
    run = here.run("--sanitize", here.program("sys.exit(3)"))

    assert run.exit_code == 3
    assert "1 race" in run.stderr


def test_program_killed_by_a_signal_ends_cudakit_by_the_same_signal(here: Here) -> None:
    end = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    run = here.process("--sanitize", "-o", "races.json", here.program(end))

    assert run.returncode == -signal.SIGTERM
    assert "1 race" in run.stderr
    assert json.loads((here.path / "races.json").read_text())["exit_status"] == 128 + 15


@pytest.mark.skipif(HAS_DEVICE, reason="needs a machine without a CUDA device")
@pytest.mark.parametrize("options", [(), ("-q",)])
def test_program_without_gpu_work_is_reported_as_unchecked_with_the_reason(
    here: Here, options: tuple[str, ...]
) -> None:
    run = here.run("--sanitize", *options, here.program(text="pass"))

    assert (run.exit_code, run.stdout) == (0, "")
    (line,) = run.stderr.splitlines()
    assert (
        "o GPU work was recorded, so nothing was checked (no CUDA driver found: " in line
    )  # No or no


@pytest.mark.skipif(HAS_DEVICE, reason="needs a machine without a CUDA device")
@pytest.mark.parametrize("text", ["pass", PROGRAM + "gpu.close()"])
@pytest.mark.parametrize("options", [(), ("-q",)])
def test_require_gpu_fails_without_work_of_a_real_gpu(
    here: Here, text: str, options: tuple[str, ...]
) -> None:
    program = here.program(text=text)
    run = here.run("--sanitize", "--require-gpu", "-o", "r.json", *options, program, "fixed")

    assert run.exit_code == 1
    assert "No work of a real GPU was recorded (--require-gpu)" in run.stderr
    (reason,) = json.loads((here.path / "r.json").read_text())["incomplete"]
    assert reason.startswith("no work of a real GPU was recorded")


def test_require_gpu_without_a_gpu_leaves_the_result_complete(here: Here) -> None:
    run = here.run("--sanitize", "--require-gpu", here.program(), "fixed")

    assert run.stderr.startswith(
        "Failed, because no work of a real GPU was recorded: no races found, on a simulated device\n"
    )


@pytest.mark.parametrize(
    ("options", "exit_code"),
    [
        (["--memory"], 125),
        (["--profile", "--log", "no/x"], 125),
        (["--sanitize", "absent.py"], 127),
    ],
)
def test_json_of_an_error_has_the_exit_code_of_the_process(
    here: Here, options: list[str], exit_code: int
) -> None:
    run = here.run("--json", *options, here.program())

    assert run.exit_code == exit_code
    assert json.loads(run.stderr)["error"]["exit_code"] == exit_code


def test_require_gpu_keeps_the_exit_code_of_the_program(here: Here) -> None:
    run = here.run("--sanitize", "--require-gpu", here.program(text="raise SystemExit(3)"))

    assert run.exit_code == 3
    assert "no work of a real GPU was recorded" in run.stderr


def test_lost_events_are_counted_and_fail_the_run(here: Here) -> None:
    # The process may not write larger files, as on a full disk.
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))\n"
    copies = "for _ in range(1000): gpu.copy(memory, host, 1024, upload)\ngpu.sync(); gpu.close()"
    program = here.program(f"{copies}\nprint('done')", text=limited + PROGRAM)
    run = here.process("--sanitize", "-o", "races.json", program, "fixed")

    assert (run.returncode, run.stdout) == (1, "done\n")
    assert run.stderr.startswith("No races found, result incomplete")
    (reason,) = json.loads((here.path / "races.json").read_text())["incomplete"]
    match = re.fullmatch(
        r"([\d,]+) events of process \d+ could not be recorded: File too large", reason
    )
    assert match
    assert int(match[1].replace(",", "")) > 900
    assert reason in run.stderr


def test_child_processes_are_checked_unless_no_follow(here: Here) -> None:
    child = here.program()
    parent = here.program(
        name="parent.py",
        text=f"import subprocess, sys; subprocess.run([sys.executable, {child!r}], check=True)",
    )

    assert here.run("--sanitize", parent).exit_code == 1
    assert here.run("--sanitize", "--no-follow", parent).exit_code == 0


# --- options ----------------------------------------------------------------------------------------


def test_output_format_follows_the_suffix(here: Here) -> None:
    files = [f"races.{suffix}" for suffix in ("json", "html", "sarif")]
    arguments = [part for file in files for part in ("-o", file)]
    run = here.run("--sanitize", *arguments, here.program())

    result, page, log = ((here.path / file).read_text() for file in files)
    assert run.exit_code == 1
    assert json.loads(result)["schema"] == "cudakit.sanitize/1"
    assert json.loads(result)["exit_status"] == 0
    assert json.loads(result)["simulated"] is True
    assert [race["kind"] for race in json.loads(result)["races"]] == ["write_after_write"]
    assert page.startswith("<!DOCTYPE html>")
    assert json.loads(log)["version"] == "2.1.0"


def test_json_goes_to_stderr_instead_of_the_report(here: Here) -> None:
    run = here.process("--sanitize", "--json", here.program("print('mine')"))

    assert (run.returncode, run.stdout) == (1, "mine\n")
    assert json.loads(run.stderr)["schema"] == "cudakit.sanitize/1"


@pytest.mark.parametrize("options", [["--json"], ["--sanitize", "--json", "--frobnicate"]])
def test_json_of_an_error_goes_to_stderr(here: Here, options: list[str]) -> None:
    run = here.run(*options, here.program(text=TELLTALE))

    assert (run.exit_code, run.stdout) == (125, "")
    assert json.loads(run.stderr)["error"]["kind"] == "UsageError"


def test_json_behind_the_program_is_its_own_argument(here: Here) -> None:
    run = here.run("--sanitize", "--frobnicate", here.program(text=TELLTALE), "--json")

    assert run.stderr.startswith("cudakit: error: ")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_races_are_printed_if_the_output_file_fails(here: Here) -> None:
    (here.path / "races.json").symlink_to("/dev/full")
    run = here.process("--sanitize", "-q", "-o", "races.json", here.program())

    assert run.returncode == 3
    assert "record an event on stream 3" in run.stderr
    assert "cannot write races.json: No space left on device" in run.stderr


def test_arguments_after_the_program_belong_to_the_program(here: Here) -> None:
    words = ["-o", "x.json", "--sanitize", "-q", "--", "-m", "--help"]
    program = here.program(text=f"import sys; assert sys.argv[1:] == {words!r}")

    assert here.run("--sanitize", program, *words).exit_code == 0
    assert here.run("--sanitize", "--", program, *words).exit_code == 0


def test_module_code_and_command_can_be_run(here: Here) -> None:
    here.program(name="module.py")

    assert here.run("--sanitize", "-q", "-m", "module", "-q").exit_code == 1
    assert here.run("--sanitize", "-q", "-m", "module", "fixed").exit_code == 0
    assert here.run("--sanitize", "-q", "-c", "import module").exit_code == 1
    assert here.run("--sanitize", "-q", "python3", "module.py").exit_code == 1


def test_suppressed_race_is_reported_and_does_not_fail(here: Here) -> None:
    run = here.run("--sanitize", "--suppress", "site:program.py", here.program())

    assert run.exit_code == 0
    assert "1 race suppressed" in run.stderr


def test_launch_blocking_is_reported(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    done = here.run("--sanitize", here.program(), "fixed")
    assert done.exit_code == 0
    assert "CUDA_LAUNCH_BLOCKING is set" in done.stderr


def test_stop_on_first_stops_the_program(here: Here) -> None:
    program = here.program("import time; time.sleep(100)")
    run = here.run("--sanitize", "--stop-on-first", "-o", "races.json", program)

    assert run.exit_code == 1
    assert "stopped at the first race" in run.stderr
    assert json.loads((here.path / "races.json").read_text())["stopped"] is True


def test_isolated_python_is_reported_even_quietly(here: Here) -> None:
    run = here.run("--sanitize", "-q", "python3", "-I", "-c", "pass")

    assert run.exit_code == 0
    assert "python3 -I" in run.stderr
    assert "The program is not recorded" in run.stderr


# --- what fails before the program starts ----------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--sanitize finds races, --memory records"),
        (["--memory", "-o", "races.json"], "-o and --json write the races"),
        (["--memory", "--stop-on-first"], "--stop-on-first needs --sanitize"),
        (["--memory", "--log", "races.log"], "--log needs --sanitize or --profile"),
        (
            ["--profile", "--show", "possible", "--suppress", "site:a"],
            "--show and --suppress need --sanitize",
        ),
        (["--profile", "--sanitize"], "--profile and --sanitize exclude each other"),
        (["--profile", "--memory"], "--profile with --memory needs --no-driver"),
        (["--sanitize", "--delay", "3", "--paused"], "--delay and --paused need --profile"),
        (["--profile", "--duration", "0"], "'0' is not a number of seconds above 0"),
        (["--sanitize", "-o", "races.xyz"], "this report has no format with this suffix"),
        (["--sanitize", "-o", "races"], "this report has no format with this suffix"),
        (["--sanitize", "-o", "there.json"], "there.json exists"),
        (["--sanitize", "-o", "nowhere/races.json"], "cannot write"),
        (["--sanitize", "--snapshot", "a.pickle"], "--snapshot needs --memory"),
        (["--memory", "--snapshot", "there.json"], "there.json exists"),
        (["--memory", "--snapshot", "nowhere/x.pickle"], "the directory nowhere does not exist"),
        (["--sanitize", "--suppress", "nonsense"], "not a suppression"),
        (["--sanitize", "--frobnicate"], "--frobnicate"),
        (["--sanitize", "-m", "-c"], "exclude each other"),
    ],
)
def test_invalid_command_line_ends_with_125_and_starts_nothing(
    here: Here, options: list[str], message: str
) -> None:
    (here.path / "there.json").write_text("mine")
    run = here.run(*options, here.program(text=TELLTALE))

    assert (run.exit_code, run.stdout) == (125, "")
    assert message in run.stderr
    assert run.stderr.startswith("cudakit: error: ")
    assert run.stderr.count("\n") == 2
    assert {place.name for place in here.path.iterdir()} == {"there.json", "program.py"}


@pytest.mark.parametrize(
    ("word", "code"),
    [("nowhere.py", 127), ("no-such-command", 127), ("./broken", 127), ("./folder", 126)],
)
def test_missing_or_not_executable_program_has_shell_exit_codes(
    here: Here, word: str, code: int
) -> None:
    (here.path / "folder").mkdir()
    here.program(name="broken", text="#!/no/such/interpreter\n")
    (here.path / "broken").chmod(0o755)
    run = here.run("--sanitize", "-o", "races.json", word, "--json")

    assert (run.exit_code, run.stdout) == (code, "")
    assert run.stderr.startswith("cudakit: error: ")
    assert not (here.path / "races.json").exists()


def test_force_replaces_a_file(here: Here) -> None:
    (here.path / "races.json").write_text("mine")

    assert here.run("--sanitize", "-f", "-o", "races.json", here.program()).exit_code == 1
    assert json.loads((here.path / "races.json").read_text())["races"]


# --- if CUDA cannot be recorded -----------------------------------------------------------------------


@pytest.fixture
def _another_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make CUDA unrecordable, as if another tool were in the process."""
    monkeypatch.setenv("CUDA_INJECTION64_PATH", "another-tool.so")


@pytest.mark.skipif(HAS_DEVICE, reason="needs a machine without a CUDA device")
@pytest.mark.usefixtures("_another_tool")
def test_without_gpu_simulated_devices_are_checked(here: Here) -> None:
    run = here.run("--sanitize", "-q", here.program())

    assert run.exit_code == 1
    assert "not recorded" not in run.stderr


@pytest.mark.gpu
@pytest.mark.usefixtures("_another_tool")
def test_with_gpu_missing_recorder_is_refused_with_a_hint(here: Here) -> None:
    run = here.run("--sanitize", here.program(text=TELLTALE))

    assert run.exit_code == 125
    assert "hint: " in run.stderr
    assert not (here.path / "started").exists()


@pytest.mark.gpu
@pytest.mark.usefixtures("_another_tool")
def test_on_missing_run_runs_and_reports_it(here: Here) -> None:
    run = here.run("--sanitize", "-q", "--on-missing", "run", here.program(text=TELLTALE))

    assert run.exit_code == 0
    assert "CUDA is not recorded" in run.stderr
    assert (here.path / "started").exists()


# --- how accesses are known ---------------------------------------------------------------------------


@pytest.mark.skipif(HAS_DEVICE, reason="needs a machine without a CUDA device")
@pytest.mark.parametrize("accesses", ["auto", "exact", "arguments"])
def test_accesses_of_simulated_devices_are_exact_in_every_mode(here: Here, accesses: str) -> None:
    run = here.run("--sanitize", "--accesses", accesses, "-o", "races.json", here.program())

    assert run.exit_code == 1
    assert "accesses are inferred" not in run.stderr
    (race,) = json.loads((here.path / "races.json").read_text())["races"]
    assert race["confidence"] == "certain"


@pytest.mark.gpu
def test_missing_ptxas_refuses_only_explicit_exact_accesses(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDAKIT_PTXAS", "/no/such/ptxas")
    refused = here.run("--sanitize", "--accesses", "exact", here.program(text=TELLTALE))
    assert refused.exit_code == 125
    assert "CUDAKIT_PTXAS is '/no/such/ptxas'" in refused.stderr
    assert not (here.path / "started").exists()

    run = here.run("--sanitize", here.program(text=TELLTALE))
    assert run.exit_code == 0
    assert "accesses are inferred from kernel arguments: CUDAKIT_PTXAS is " in run.stderr
    assert (here.path / "started").exists()


# --- memory -----------------------------------------------------------------------------------------

# As much of torch as a snapshot needs.
TORCH = """
import types

memory = types.SimpleNamespace(
    _record_memory_history=lambda **options: None, _snapshot=dict
)
cuda = types.SimpleNamespace(
    memory=memory, _lazy_call=lambda call: call(), device_count=lambda: 0
)
_C = types.SimpleNamespace(_cuda_attach_out_of_memory_observer=lambda observer: None)
"""


def test_memory_names_the_snapshot_and_the_command_that_reads_it(here: Here) -> None:
    here.program(name="torch.py", text=TORCH)
    run = here.run("--memory", here.program(text="import torch"))

    snapshot = here.path / "cudakit-memory.pickle"
    assert (run.exit_code, run.stdout) == (0, "")
    assert run.stderr.endswith(f"cudakit memviz {snapshot}\n")
    assert snapshot.exists()


def test_races_and_memory_are_recorded_together(here: Here) -> None:
    here.program(name="torch.py", text=TORCH)
    run = here.run("--memory", "--snapshot", "a.pickle", "--sanitize", here.program("import torch"))

    assert run.exit_code == 1
    assert "1 race between streams" in run.stderr
    assert "cudakit memviz" in run.stderr
    assert (here.path / "a.pickle").exists()


def test_program_without_torch_reports_no_snapshot(here: Here) -> None:
    run = here.run("--memory", here.program(text="pass"))

    assert run.exit_code == 0
    assert "no GPU memory was recorded, so no snapshot was written (" in run.stderr


# --- the command line -------------------------------------------------------------------------------


def test_help_fits_80_columns(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = cli("run", "--help").stdout.splitlines()

    assert [line for line in lines if len(line) > 80] == []


def test_accesses_are_reported_as_ignored_on_simulated_devices(here: Here) -> None:
    run = here.run("--sanitize", "--accesses", "arguments", here.program(), "fixed")

    assert "--accesses has no effect on a simulated device" in run.stderr
