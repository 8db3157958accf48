from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import pytest
from invocation import Cli

from cudakit.cli.failure import ExitCode
from cudakit.core.devices.diagnose.checks import SELF_TEST, THEMES

HERE = [check.id for members in THEMES.values() for check in members]
TRIALS = [check.id for members in SELF_TEST.values() for check in members]

SIM = ("doctor", "--gpu", "sim")


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("CUDA_", "NCCL_", "CUBLAS", "PYTORCH_", "NVIDIA_", "TORCH_", "NUMBA_")):
            monkeypatch.delenv(name)


def parsed(text: str) -> Any:
    return json.loads(text)


# --- the machine that the tests run on -------------------------------------------------------------


def test_this_machine_is_diagnosed(cli: Cli) -> None:
    run = cli("doctor", "--json")
    result = parsed(run.stdout)

    assert run.stderr == ""
    assert result["schema"] == "cudakit.doctor/1"
    assert [check["id"] for check in result["checks"]] == HERE
    assert sum(result["counts"].values()) == len(HERE)
    assert run.exit_code == (ExitCode.FINDINGS if result["counts"]["fail"] else ExitCode.OK)
    assert not [one for one in result["checks"] if "the check broke" in one["summary"]]


def test_machine_without_driver_fails_one_check(cli: Cli) -> None:
    result = parsed(cli("doctor", "--only", "CK001,CK003,CK005", "--json").stdout)

    if result["checks"][0]["status"] == "ok":
        pytest.skip("this machine has a driver")
    assert [check["status"] for check in result["checks"]] == ["fail", "unknown", "unknown"]


def test_doctor_imports_no_framework(command: list[str]) -> None:
    script = (
        "import sys; from cudakit.cli import main; code = main(['doctor', '-q']);"
        "loaded = {'torch', 'cupy', 'jax', 'cuda', 'numba'} & set(sys.modules);"
        "sys.exit(repr(loaded) if loaded else 0)"
    )

    done = subprocess.run([*command[:2], "-c", script], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


# --- a simulated machine ---------------------------------------------------------------------------


def test_simulated_gpu_is_ok_and_marked(cli: Cli) -> None:
    run = cli(*SIM)

    assert run.exit_code == ExitCode.OK
    assert run.stdout.startswith("Simulated: ")
    assert parsed(cli(*SIM, "--json").stdout)["simulated"] is True


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"])
def test_variables_that_choose_devices_do_not_affect_simulated_gpu(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    plain = cli(*SIM, "--json").stdout
    monkeypatch.setenv(name, "7")

    assert cli(*SIM, "--json").stdout == plain


def test_warning_is_finding_with_strict_only(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")

    assert cli(*SIM).exit_code == ExitCode.OK
    assert cli(*SIM, "--strict").exit_code == ExitCode.FINDINGS
    assert cli(*SIM, "--strict", "--skip", "CK020").exit_code == ExitCode.OK


def test_ids_ignore_case(cli: Cli) -> None:
    result = parsed(cli(*SIM, "--only", "ck020, CK024", "--json").stdout)

    assert [check["id"] for check in result["checks"]] == ["CK020", "CK024"]


def test_self_test_of_simulated_gpu_is_unknown(cli: Cli) -> None:
    result = parsed(cli(*SIM, "--deep", "--only", "CK041", "--json").stdout)

    assert result["checks"][0]["summary"] == "the GPU is simulated"


def test_report_has_versions_and_gpus_and_is_redacted(cli: Cli) -> None:
    run = cli(*SIM, "--report")

    assert "── Versions" in run.stdout
    assert "NVIDIA H200" in run.stdout
    assert "GPU-<uuid>" in run.stdout
    assert platform.node() not in run.stdout.split()


def test_report_as_json_is_redacted(cli: Cli) -> None:
    devices = parsed(cli(*SIM, "--report", "--json").stdout)["devices"]

    assert [device["uuid"] for device in devices] == ["GPU-<uuid>"]


def test_report_is_written_to_file(cli: Cli, tmp_path: Path) -> None:
    place = tmp_path / "report.txt"

    assert cli(*SIM, "--report", "-o", place).stdout == ""
    assert "── Well" in place.read_text(encoding="utf-8")
    assert cli(*SIM, "--report", "-o", place).exit_code == ExitCode.USAGE
    assert cli(*SIM, "--report", "-o", place, "--force").exit_code == ExitCode.OK


# --- without looking -------------------------------------------------------------------------------


def test_explain_needs_no_machine(cli: Cli) -> None:
    run = cli("doctor", "--explain", "ck012")

    assert run.exit_code == ExitCode.OK
    assert run.stdout.startswith("CK012: no copy of a CUDA library hides another\n")
    assert parsed(cli("doctor", "--explain", "CK012", "--json").stdout)["id"] == "CK012"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--only", "CK999"), "there is no check 'CK999'"),
        (("--skip", "driver"), "there is no check 'DRIVER'"),
        (("--explain", "CK000"), "there is no check 'CK000'"),
        (("--only", TRIALS[0]), "add --deep to allow it"),
        (("--gpu", "h200"), "no such GPU: 'h200'"),
        (("--gpu", "sim:abacus"), "no machine 'abacus' can be simulated"),
    ],
)
def test_invalid_arguments_are_usage_errors(
    cli: Cli, arguments: tuple[str, ...], words: str
) -> None:
    run = cli("doctor", *arguments)

    assert run.exit_code == ExitCode.USAGE
    assert words in run.stderr
    assert run.stdout == ""
