from __future__ import annotations

import csv
import fcntl
import io
import json
import os
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
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
def test_the_report_of_a_machine(
    model: str, width: int, cli: Cli, golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    run = cli("devices", "--gpu", f"sim:{model}", "--processes", "--topology")

    assert (run.exit_code, run.stderr) == (0, "")
    assert max(map(len, run.stdout.splitlines())) <= width
    golden(f"devices-{model}-{width}.txt", run.stdout)


def test_everything_that_is_known(cli: Cli, golden: Golden) -> None:
    golden("devices-long.txt", cli("devices", "--gpu", "sim", "--long").stdout)


def test_the_list_of_fields_needs_no_gpu(cli: Cli) -> None:
    run = cli("devices", "--list-fields")

    assert (run.exit_code, run.stderr) == (0, "")
    assert "power_draw_w" in run.stdout
    fields = json.loads(cli("devices", "--list-fields", "--json").stdout)["fields"]
    assert {"name": "uuid", "unit": ""}.items() <= fields[2].items()
    assert len(fields) > 300


# --- for programs ----------------------------------------------------------------------------------


def test_json_is_the_result_with_reasons_for_every_null(cli: Cli) -> None:
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


def test_ids_restrict_the_devices(cli: Cli) -> None:
    result = json.loads(cli(*TWO, "--id", "nvml:1", "--json").stdout)

    assert [device["nvml_index"] for device in result["devices"]] == [1]


def test_fields_as_csv_are_raw_numbers_under_their_names(cli: Cli) -> None:
    run = cli(
        *TWO, "--fields", "cuda_index, name,power_limit_w,fan_speed_percent", "--format", "csv"
    )

    assert run.stdout == (
        "cuda_index,name,power_limit_w,fan_speed_percent\r\n"
        "0,NVIDIA H200,700.0,\r\n"
        "1,NVIDIA H200,700.0,\r\n"
    )
    assert run.stderr == "these GPUs are simulated\n"


def test_fields_as_json_have_a_row_for_each_device(cli: Cli) -> None:
    for spelling in (("--format", "json"), ("--json",)):
        result = json.loads(cli(*TWO, "--fields", "uuid,fan_speed_percent", *spelling).stdout)

        assert (result["schema"], result["simulated"]) == ("cudakit.devices.fields/1", True)
        assert [row["fan_speed_percent"] for row in result["devices"]] == [None, None]
        reasons = result["unavailable"]
        assert reasons["devices[0].fan_speed_percent"] == "not supported by this device"


def test_fields_are_a_table_where_nothing_else_is_asked_for(cli: Cli) -> None:
    run = cli(*TWO, "--fields", "uuid,power_limit_w")

    assert run.stdout.startswith("Simulated GPUs")
    assert "700.0 W" in run.stdout


def test_a_field_of_activity_is_read_for_the_one_who_names_it(cli: Cli) -> None:
    (header, first, *_) = csv.reader(
        io.StringIO(cli(*TWO, "--fields", "sm_activity_percent", "--format", "csv").stdout)
    )

    assert header == ["sm_activity_percent"]
    assert 0 < float(first[0]) <= 100


# --- selecting -------------------------------------------------------------------------------------


def test_select_prints_a_value_for_the_variable_and_nothing_else(cli: Cli) -> None:
    run = cli(*TWO, "--select", "--count", "2", "--min-free-mem", "10GiB")

    first, second = run.stdout.rstrip("\n").split(",")
    assert first.startswith("GPU-")
    assert second.startswith("GPU-")
    assert run.stdout.count("\n") == 1
    assert (run.exit_code, run.stderr) == (0, "these GPUs are simulated\n")


def test_select_says_in_json_what_it_chose(cli: Cli) -> None:
    result = json.loads(cli(*TWO, "--select", "--id", "cuda:1", "--json").stdout)

    assert result["schema"] == "cudakit.devices.select/1"
    assert result["visible_devices"] == result["devices"][0]["uuid"]
    assert result["devices"][0]["cuda_index"] == 1


def test_select_that_finds_too_few_ends_with_3_and_says_why_of_each(cli: Cli) -> None:
    run = cli(*TWO, "--select", "--max-util", "1%")

    assert (run.exit_code, run.stdout) == (ExitCode.ENVIRONMENT, "")
    assert "only 0 of 2 match" in run.stderr
    assert run.stderr.count("): ") == 2


# --- what cannot be --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--id", "cuda:7"), "no device matches 'cuda:7'"),
        (("--id", "GPU-0000"), "2 devices match 'GPU-0000'"),
        (("--fields", "nmae"), "no field 'nmae'"),
        (("--format", "csv"), "--format needs --fields"),
        (("--fields", "name", "--format", "csv", "--json"), "exclude each other"),
        (("--count", "2"), "need --select"),
        (("--min-free-mem", "1GiB"), "need --select"),
        (("--select", "--min-free-mem", "much"), "not a size"),
        (("--select", "--max-util", "10"), "ambiguous"),
        (("--watch", "0"), "not a number of seconds"),
        (("--watch", "nan"), "not a number of seconds"),
        (("--watch", "1", "--long"), "--watch cannot be combined"),
        (("--gpu", "sim:gtx9999"), "no machine 'gtx9999'"),
        (("--gpu", "rocm"), "no such GPU: 'rocm'"),
    ],
)
def test_what_cannot_be_carried_out_is_a_usage_error_of_two_lines(
    arguments: tuple[str, ...], reason: str, cli: Cli
) -> None:
    run = cli("devices", "--gpu", "sim:h200x2", *arguments)

    assert (run.exit_code, run.stdout if "--json" not in arguments else "") == (2, "")
    first, second = run.stderr.splitlines()
    assert reason in first
    assert second.startswith("hint: ")


def test_an_unknown_field_is_refused_before_any_gpu_is_looked_for(cli: Cli) -> None:
    assert cli("devices", "--fields", "nmae").exit_code == ExitCode.USAGE


@pytest.mark.skipif(not NO_GPU, reason="there is a driver")
@pytest.mark.parametrize(
    "arguments", [(), ("--json",), ("--watch", "1"), ("--select",), ("--topology",)]
)
def test_without_any_driver_every_form_ends_with_3_and_names_the_simulator(
    arguments: tuple[str, ...], cli: Cli
) -> None:
    run = cli("devices", *arguments)

    assert run.exit_code == ExitCode.ENVIRONMENT
    first, second = run.stderr.splitlines()
    assert "libnvidia-ml.so.1" in first
    assert "libcuda.so.1" in first
    assert "--gpu sim" in second
    if "--json" in arguments:
        assert json.loads(run.stdout)["error"]["exit_code"] == 3


# --- again and again -------------------------------------------------------------------------------


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


def test_watching_with_json_writes_a_line_for_each_look_and_ends_well(command: list[str]) -> None:
    lines, code, stderr = ended(watching(command, "--json"), lines=3)

    looks = [json.loads(line) for line in lines]
    assert {look["schema"] for look in looks} == {"cudakit.devices/1"}
    assert looks[0]["time_ns"] < looks[1]["time_ns"] < looks[2]["time_ns"]
    assert looks[0]["devices"][0]["fields"]["sm_activity_percent"] > 0
    assert "warp_size" not in looks[0]["devices"][0]["fields"]
    assert (code, stderr) == (0, b"")


def test_watching_fields_as_csv_has_one_header(command: list[str]) -> None:
    lines, code, _ = ended(
        watching(command, "--fields", "cuda_index,power_draw_w", "--format", "csv"), lines=5
    )

    assert lines[0] == "cuda_index,power_draw_w\r\n"
    assert [line.split(",")[0] for line in lines[1:]] == ["0", "1", "0", "1"]
    assert code == 0


def test_on_a_terminal_each_look_takes_the_place_of_the_last(command: list[str]) -> None:
    first, second = two_looks(command, height=50)

    height = first.count(b"\n")
    assert first.endswith(b"\x1b[%dF" % height)
    assert b"tensor" in first
    assert second.count(b"\n") == height


def test_what_is_higher_than_the_terminal_begins_at_its_top_again(command: list[str]) -> None:
    first, _ = two_looks(command, height=5)

    assert first.endswith(b"\x1b[H")


def two_looks(command: list[str], *, height: int) -> tuple[bytes, bytes]:
    """Watch on a terminal until something is drawn over, twice; return what came before each."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, 90, 0, 0))
    child = watching(command, stdout=slave)
    os.close(slave)
    seen = b""
    give_up = time.monotonic() + 20
    while seen.count(b"\x1b[J") < 2 and time.monotonic() < give_up:
        seen += os.read(master, 4096)
    child.send_signal(signal.SIGINT)
    _, stderr = child.communicate(timeout=20)
    os.close(master)

    assert (child.returncode, stderr) == (0, b"")
    first, second, _ = seen.split(b"\x1b[J", 2)
    return first, second


def test_a_command_that_only_looks_imports_no_numpy() -> None:
    script = (
        "import sys; from cudakit.cli import main; main(['devices', '--gpu', 'sim']);"
        "sys.exit('numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script], check=False, capture_output=True)

    assert done.returncode == 0
