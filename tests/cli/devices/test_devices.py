from __future__ import annotations

import csv
import fcntl
import io
import json
import os
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from invocation import Cli

from cudakit.cli.failure import ExitCode

TWO = ("devices", "--gpu", "sim:h200x2")
NO_GPU = not any(Path(place).exists() for place in ("/dev/nvidiactl", "/dev/dxg"))
Golden = Callable[[str, str], None]

# --- the report ------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 160])
@pytest.mark.parametrize("model", ["h200x2", "a100-mig", "wsl", "jetson"])
def test_report_of_simulated_machine(
    model: str, width: int, cli: Cli, golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    run = cli("devices", "--gpu", f"sim:{model}", "--processes", "--topology")

    assert (run.exit_code, run.stderr) == (0, "")
    assert max(map(len, run.stdout.splitlines())) <= width
    golden(f"devices-{model}-{width}.txt", run.stdout)


def test_nvml_index_field_names_the_gpu_of_a_mig_instance(cli: Cli) -> None:
    run = cli("devices", "--gpu", "sim:a100-mig", "--fields", "nvml_index")

    assert [line.strip() for line in run.stdout.splitlines()[-3:]] == ["0", "0/0", "0/1"]


def test_long_report_names_the_gpu_of_a_mig_instance(cli: Cli) -> None:
    lines = cli("devices", "--gpu", "sim:a100-mig", "--long").stdout.splitlines()

    assert [line.split()[1] for line in lines if "nvml_index" in line] == ["0", "0/0", "0/1"]


def test_list_of_fields_explains_activity_and_bit_masks(cli: Cli) -> None:
    text = " ".join(cli("devices", "--list-fields").stdout.split())

    assert "only --watch and --fields show these fields. graphics_activity_percent" in text
    assert "bits: 1 POSIX file descriptor, 2 Win32, 4 Win32 KMT, 8 fabric" in text


def test_long_report_lists_every_field(cli: Cli, golden: Golden) -> None:
    golden("devices-long.txt", cli("devices", "--gpu", "sim", "--long").stdout)


def test_list_of_fields_needs_no_gpu(cli: Cli) -> None:
    run = cli("devices", "--list-fields")

    assert (run.exit_code, run.stderr) == (0, "")
    assert "power_draw_w" in run.stdout
    fields = json.loads(cli("devices", "--list-fields", "--json").stdout)["fields"]
    assert {"name": "uuid", "unit": ""}.items() <= fields[2].items()
    assert len(fields) > 300


@pytest.mark.parametrize("width", [60, 80])
def test_list_of_fields_has_each_name_on_one_line(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    fields = json.loads(cli("devices", "--list-fields", "--json").stdout)["fields"]
    lines = cli("devices", "--list-fields").stdout.splitlines()

    assert {field["name"] for field in fields} <= {line.split()[0] for line in lines if line}
    assert max(map(len, lines)) <= width


# --- for programs ----------------------------------------------------------------------------------


def test_json_has_a_reason_for_every_null(cli: Cli) -> None:
    result = json.loads(cli(*TWO, "--json", "--topology", "--processes").stdout)

    assert (result["schema"], result["simulated"]) == ("cudakit.devices/1", True)
    first, second = result["devices"]
    assert (first["cuda_index"], second["nvml_index"]) == (0, 1)
    assert first["fields"]["max_shared_memory_per_block_optin_bytes"] == 232448
    assert first["processes"][0]["name"] == "python train.py"
    assert result["pairs"][0]["path"] == "NV18"
    nulls = {name for name, value in first["fields"].items() if value is None}
    assert nulls == {name.removeprefix("fields.") for name in first["unavailable"]}
    assert first["unavailable"]["fields.fan_speed_percent"] == "not supported by this device"


def test_device_option_selects_devices(cli: Cli) -> None:
    for option in (("--device", "1"), ("--device", "cuda:1"), ("--device", "nvml:1")):
        result = json.loads(cli(*TWO, *option, "--json").stdout)

        assert [device["nvml_index"] for device in result["devices"]] == [1]


def test_fields_as_csv_are_raw_values(cli: Cli) -> None:
    run = cli(
        *TWO, "--fields", "cuda_index, name,power_limit_w,fan_speed_percent", "--format", "csv"
    )

    assert run.stdout == (
        "cuda_index,name,power_limit_w,fan_speed_percent\r\n"
        "0,NVIDIA H200,700.0,\r\n"
        "1,NVIDIA H200,700.0,\r\n"
    )
    assert run.stderr == "cudakit: these GPUs and CUDA_VISIBLE_DEVICES are simulated\n"


def test_csv_on_terminal_and_in_file_warns_once_that_devices_are_simulated(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = cli(*TWO, "--fields", "name", "--format", "csv", "-o", "names.csv")

    assert (
        run.stderr
        == "cudakit: these GPUs and CUDA_VISIBLE_DEVICES are simulated\nWrote names.csv\n"
    )


def test_summary_of_csv_file_says_once_that_devices_are_simulated(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = cli(*TWO, "-o", "devices.csv")

    assert run.stderr.lower().count("simulated") == 1
    assert run.stderr.startswith("Simulated GPUs")


def test_fields_as_json_have_a_row_for_each_device(cli: Cli) -> None:
    for spelling in (("--format", "json"), ("--json",)):
        result = json.loads(cli(*TWO, "--fields", "uuid,fan_speed_percent", *spelling).stdout)

        assert (result["schema"], result["simulated"]) == ("cudakit.devices.fields/1", True)
        assert [row["fan_speed_percent"] for row in result["devices"]] == [None, None]
        reasons = result["unavailable"]
        assert reasons["devices[0].fan_speed_percent"] == "not supported by this device"


def test_fields_are_a_table_by_default(cli: Cli) -> None:
    run = cli(*TWO, "--fields", "uuid,power_limit_w")

    assert run.stdout.startswith("Simulated GPUs")
    assert "700.0 W" in run.stdout


def test_field_of_activity_is_measured_if_selected(cli: Cli) -> None:
    (header, first, *_) = csv.reader(
        io.StringIO(cli(*TWO, "--fields", "sm_activity_percent", "--format", "csv").stdout)
    )

    assert header == ["sm_activity_percent"]
    assert 0 < float(first[0]) <= 100


# --- selecting -------------------------------------------------------------------------------------


def test_select_prints_only_the_value_of_the_variable(cli: Cli) -> None:
    run = cli(*TWO, "--select", "--count", "2", "--min-free-mem", "10GiB")

    first, second = run.stdout.rstrip("\n").split(",")
    assert first.startswith("GPU-")
    assert second.startswith("GPU-")
    assert run.stdout.count("\n") == 1
    assert (run.exit_code, run.stderr) == (
        0,
        "cudakit: these GPUs and CUDA_VISIBLE_DEVICES are simulated\n",
    )


def test_variable_of_this_machine_has_no_effect_on_simulated_devices(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    report_without_variable = cli(*TWO).stdout
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")

    assert "CUDA_VISIBLE_DEVICES is simulated too" in report_without_variable
    assert "hidden" not in cli(*TWO).stdout
    assert cli(*TWO, "--select", "--count", "2").stdout.count("GPU-") == 2


def test_select_as_json_has_selected_devices(cli: Cli) -> None:
    result = json.loads(cli(*TWO, "--select", "--device", "cuda:1", "--json").stdout)

    assert result["schema"] == "cudakit.devices.select/1"
    assert result["visible_devices"] == result["devices"][0]["uuid"]
    assert result["devices"][0]["cuda_index"] == 1


def test_select_without_enough_matches_exits_with_3_and_reasons(cli: Cli) -> None:
    run = cli(*TWO, "--select", "--max-util", "1%")

    assert (run.exit_code, run.stdout) == (ExitCode.ENVIRONMENT, "")
    assert ", but no device can be selected" in run.stderr
    assert run.stderr.count("): ") == 2


# --- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--device", "cuda:7"), "no device matches 'cuda:7'"),
        (("--device", "GPU-0000"), "2 devices match 'GPU-0000'"),
        (("--fields", "nmae"), "no field 'nmae'"),
        (("--list-fields", "--long"), "--list-fields lists all fields; remove the other options"),
        (("--device", "GPU-"), "2 devices match 'GPU-'"),
        (("--format", "csv"), "--format needs --fields"),
        (("--fields", ""), "name at least one field"),
        (("--fields", ","), "name at least one field"),
        (("--count", "2"), "need --select"),
        (("--min-free-mem", "1GiB"), "need --select"),
        (("--select", "--min-free-mem", "much"), "not a size"),
        (("--select", "--max-util", "10"), "10% or 1000%"),
        (("--select", "--max-util", "200%"), "'200%' is more than 100%"),
        (("--watch", "0"), "not a number of seconds"),
        (("--watch", "nan"), "not a number of seconds"),
        (("--watch", "1", "--long"), "--watch cannot be combined"),
        (("--gpu", "sim:gtx9999"), "no simulated GPU 'gtx9999'"),
        (("--gpu", "rocm"), "unknown GPU choice 'rocm'"),
    ],
)
def test_invalid_options_are_usage_errors_of_two_lines(
    arguments: tuple[str, ...], reason: str, cli: Cli
) -> None:
    run = cli("devices", "--gpu", "sim:h200x2", *arguments)

    assert (run.exit_code, run.stdout) == (2, "")
    first, second = run.stderr.splitlines()
    assert reason in first
    assert second.startswith("hint: ")


def test_json_and_another_format_exclude_each_other(cli: Cli) -> None:
    run = cli("devices", "--gpu", "sim", "--fields", "name", "--format", "csv", "--json")

    assert (run.exit_code, run.stderr) == (ExitCode.USAGE, "")
    assert "exclude each other" in json.loads(run.stdout)["error"]["message"]


def test_unknown_field_is_refused_before_the_gpu_query(cli: Cli) -> None:
    assert cli("devices", "--fields", "nmae").exit_code == ExitCode.USAGE


@pytest.mark.skipif(not NO_GPU, reason="there is a driver")
@pytest.mark.parametrize(
    "arguments", [(), ("--json",), ("--watch", "1"), ("--select",), ("--topology",)]
)
def test_missing_driver_exits_with_3_and_names_the_simulator(
    arguments: tuple[str, ...], cli: Cli
) -> None:
    run = cli("devices", *arguments)

    assert run.exit_code == ExitCode.ENVIRONMENT
    printed = run.stdout if "--json" in arguments else run.stderr
    for words in ("no CUDA driver found: libcuda.so.1 cannot be loaded", "--gpu sim"):
        assert words in printed
    if "--json" in arguments:
        assert json.loads(run.stdout)["error"]["exit_code"] == 3


# --- watch -----------------------------------------------------------------------------------------


def watching(
    command: list[str], *arguments: str, stdout: int = subprocess.PIPE
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*command, *TWO, "--watch", "0.1", *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "90", "PYTHONUNBUFFERED": ""},
    )


def ended(child: subprocess.Popen[bytes], *, lines: int) -> tuple[list[str], int, bytes]:
    """Read some lines, stop the command as Ctrl-C does, and return them, the code and stderr."""
    assert child.stdout is not None
    read = [child.stdout.readline().decode() for _ in range(lines)]
    child.send_signal(signal.SIGINT)
    _, stderr = child.communicate(timeout=20)
    return read, child.returncode, stderr


def test_watch_as_json_writes_a_line_per_read(command: list[str]) -> None:
    lines, code, stderr = ended(watching(command, "--json"), lines=3)

    reads = [json.loads(line) for line in lines]
    assert {read["schema"] for read in reads} == {"cudakit.devices/1"}
    assert reads[0]["time_ns"] < reads[1]["time_ns"] < reads[2]["time_ns"]
    assert reads[0]["devices"][0]["fields"]["sm_activity_percent"] > 0
    assert "warp_size" not in reads[0]["devices"][0]["fields"]
    assert (code, stderr) == (0, b"")


def test_watch_as_csv_has_one_header(command: list[str]) -> None:
    lines, code, _ = ended(
        watching(command, "--fields", "cuda_index,power_draw_w", "--format", "csv"), lines=5
    )

    assert lines[0] == "cuda_index,power_draw_w\r\n"
    assert [line.split(",")[0] for line in lines[1:]] == ["0", "1", "0", "1"]
    assert code == 0


@dataclass
class Terminal:
    """``--watch 0.2`` on a pseudo-terminal of 90 columns."""

    command: list[str]
    height: int = 50
    read: bytes = b""

    def __enter__(self) -> Terminal:
        self.master, self.slave = os.openpty()
        size = struct.pack("HHHH", self.height, 90, 0, 0)
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, size)
        self.before = termios.tcgetattr(self.slave)
        self.child = subprocess.Popen(
            [*self.command, *TWO, "--watch", "0.2"],
            stdin=self.slave,
            stdout=self.slave,
            stderr=subprocess.PIPE,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "90"},
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.child.kill()
        self.child.communicate()
        os.close(self.master)
        os.close(self.slave)

    @property
    def output(self) -> str:
        return self.read.decode(errors="ignore")

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def read_until(self, condition: Callable[[str], bool]) -> str:
        """Read until a condition holds for the text since the last redraw; return that text."""
        give_up = time.monotonic() + 20
        while time.monotonic() < give_up:
            readable, _, _ = select.select([self.master], [], [], 0.1)
            if readable:
                self.read += os.read(self.master, 65536)
            frame = self.output.rpartition("\x1b[J")[2]
            if condition(frame):
                return frame
        raise AssertionError(self.output[-2000:])

    def end(self) -> tuple[int, bytes]:
        """Return the exit code and stderr of the command, after reading its output to the end."""
        while self.child.poll() is None:
            self.read_until(lambda _: True)
        assert self.child.stderr is not None
        return self.child.returncode, self.child.stderr.read()


@pytest.fixture
def terminal(command: list[str]) -> Iterator[Terminal]:
    with Terminal(command) as opened:
        yield opened


def shown(text: str) -> Callable[[str], bool]:
    return lambda frame: text in frame and frame.rstrip().endswith("quit")


def test_each_report_on_a_terminal_replaces_the_last_one(terminal: Terminal) -> None:
    first = terminal.read_until(shown("keys:"))
    terminal.read = b""
    terminal.read_until(shown("keys:"))

    assert f"\x1b[{first.count(chr(10))}F\x1b[J" in terminal.output


def test_report_higher_than_the_terminal_begins_at_its_top_again(command: list[str]) -> None:
    with Terminal(command, height=5) as terminal:
        terminal.read_until(shown("keys:"))
        terminal.read = b""
        terminal.read_until(shown("keys:"))

        assert "\x1b[H\x1b[J" in terminal.output


def test_report_on_a_terminal_has_bars_and_history(terminal: Terminal) -> None:
    frame = terminal.read_until(shown("keys:"))

    assert "SM activity and memory, last 60 s" in frame
    assert "█" in frame
    assert "·▆" in frame


def test_keys_sort_filter_and_show_processes(terminal: Terminal) -> None:
    terminal.read_until(shown("sort (by index)"))
    terminal.press("s")
    terminal.read_until(shown("sort (by SM)"))
    terminal.press("p")
    terminal.read_until(shown("python train.py"))
    terminal.press("/nvml:1\r")
    frame = terminal.read_until(shown("filter (nvml:1)"))

    assert "cuda:0" not in frame
    assert "cuda:1" in frame


@pytest.mark.parametrize("how", ["q", "\x03"])
def test_quit_and_interrupt_restore_the_terminal(terminal: Terminal, how: str) -> None:
    terminal.read_until(shown("keys:"))
    assert not termios.tcgetattr(terminal.slave)[3] & termios.ECHO

    if how == "q":
        terminal.press("q")
    else:
        terminal.child.send_signal(signal.SIGINT)

    assert terminal.end() == (0, b"")
    assert termios.tcgetattr(terminal.slave) == terminal.before


def test_watch_without_keyboard_shows_no_keys(command: list[str]) -> None:
    lines, code, _ = ended(watching(command), lines=8)

    assert code == 0
    assert "keys:" not in "".join(lines)


def test_report_imports_no_numpy() -> None:
    script = (
        "import sys; from cudakit.cli import main; main(['devices', '--gpu', 'sim']);"
        "sys.exit('numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script], check=False, capture_output=True)

    assert done.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--select", "--long"], "--long has no effect with --select"),
        (["--select", "--processes"], "--processes has no effect with --select"),
        (["--select", "--fields", "name"], "--fields has no effect with --select"),
        (["--fields", "name", "--topology"], "--topology has no effect with --fields"),
    ],
)
def test_option_without_effect_is_refused(arguments: list[str], message: str, cli: Cli) -> None:
    run = cli("devices", "--gpu", "sim", *arguments)

    assert run.exit_code == ExitCode.USAGE
    assert message in run.stderr
