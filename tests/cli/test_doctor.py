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
from cudakit.devices.doctor.checks import SELF_TEST, THEMES

HERE = [check.id for members in THEMES.values() for check in members]
SELF_TESTS = [check.id for members in SELF_TEST.values() for check in members]

SIM = ("doctor", "--gpu", "sim")


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("CUDA_", "NCCL_", "CUBLAS", "PYTORCH_", "NVIDIA_", "TORCH_", "NUMBA_")):
            monkeypatch.delenv(name)


def parsed(text: str) -> Any:
    return json.loads(text)


# --- the machine that the tests run on -------------------------------------------------------------


def test_doctor_diagnoses_this_machine(cli: Cli) -> None:
    run = cli("doctor", "--json")
    result = parsed(run.stdout)

    assert run.stderr == ""
    assert result["schema"] == "cudakit.doctor/1"
    assert [check["id"] for check in result["checks"]] == HERE
    assert sum(result["counts"].values()) == len(HERE)
    assert run.exit_code == (ExitCode.FINDINGS if result["counts"]["fail"] else ExitCode.OK)
    assert not [check for check in result["checks"] if "internal error" in check["summary"]]


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


def test_report_of_simulated_gpu_says_that_the_machine_is_simulated(cli: Cli) -> None:
    first_note = cli(*SIM).stdout.splitlines()[2]

    assert first_note.startswith("i The machine is simulated too: ")


def test_self_test_of_simulated_gpu_is_listed_as_not_performed(cli: Cli) -> None:
    stdout = cli(*SIM, "--deep").stdout

    assert "i CK041, CK042, CK043, CK044 not performed: the GPU is simulated" in stdout
    assert "!" not in stdout


def test_checks_of_packages_name_no_build_if_none_is_installed(cli: Cli) -> None:
    stdout = cli(*SIM, "--only", "CK009,CK010,CK038").stdout

    assert "no installed package needs CUDA" in stdout
    assert "no framework built for CUDA is installed" in stdout
    assert "CK038 not performed: the machine is simulated" in stdout


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"])
def test_variables_that_choose_devices_do_not_affect_simulated_gpu(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    plain = cli(*SIM, "--json").stdout
    monkeypatch.setenv(name, "7")

    assert cli(*SIM, "--json").stdout == plain


@pytest.mark.parametrize("name", ["NCCL_P2P_DISABLE", "CUDA_VISIBLE_DEVICE"])
def test_settings_of_process_are_not_those_of_simulated_machine(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "1")

    result = parsed(cli(*SIM, "--json").stdout)

    assert (result["status"], result["variables"]) == ("ok", [])


def test_versions_of_simulated_machine_are_its_own(cli: Cli) -> None:
    about = parsed(cli(*SIM, "--json").stdout)["about"]

    assert set(about) == {"driver", "NVML", "CUDA of the driver", "libcuda"}


def test_report_of_simulated_gpu_agrees_with_json_and_exit_code(cli: Cli) -> None:
    run = cli(*SIM)

    assert run.stdout.startswith("Simulated: no problems found\n")
    assert parsed(cli(*SIM, "--json").stdout)["status"] == "ok"


# --- environment variables, with or without a GPU ---------------------------------------------------


SETTINGS = ("doctor", "--only", "CK020,CK024")


def test_warning_is_finding_with_fail_on_only(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    option = ("--fail-on", "warning")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")

    assert cli(*SETTINGS).exit_code == ExitCode.OK
    assert cli(*SETTINGS, *option).exit_code == ExitCode.FINDINGS
    assert cli(*SETTINGS, *option, "--skip", "ck20").exit_code == ExitCode.OK


def test_problems_come_first_and_all_lists_the_rest(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")

    short, full = cli(*SETTINGS).stdout, cli(*SETTINGS, "--all").stdout

    assert short.startswith("1 warning\n")
    assert short.index("CK020") < short.index("CK024")
    assert "1 environment variable for CUDA programs is set: CUDA_LAUNCH_BLOCKING" in short
    assert "CK024 no misspelled environment variable" in full
    assert "Environment variables that are set" in full


def test_passed_checks_are_only_listed_with_all(cli: Cli) -> None:
    assert "CK024" not in cli("doctor", "--gpu", "sim").stdout
    assert "CK024" in cli("doctor", "--gpu", "sim", "--all").stdout


def test_each_selected_check_is_listed(cli: Cli) -> None:
    run = cli("doctor", "--gpu", "sim", "--only", "CK2,CK24")

    assert "CK002 not performed: the GPU is simulated" in run.stdout
    assert "CK024 no misspelled environment variable" in run.stdout
    assert "--all" not in run.stdout


def test_set_variables_are_in_json_with_effect_and_source(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

    (variable,) = parsed(cli(*SETTINGS, "--json").stdout)["variables"]

    assert (variable["name"], variable["value"], variable["library"]) == (
        "PYTORCH_NVML_BASED_CUDA_CHECK",
        "1",
        "PyTorch",
    )
    assert variable["source"] == "PyTorch documentation, CUDA Environment Variables"


def test_ids_ignore_case(cli: Cli) -> None:
    result = parsed(cli(*SIM, "--only", "ck020, CK024", "--json").stdout)

    assert [check["id"] for check in result["checks"]] == ["CK020", "CK024"]


def test_title_says_that_the_self_test_of_a_simulated_gpu_was_not_performed(cli: Cli) -> None:
    title = "Simulated: no problems found, CK041 to CK044 not performed"

    assert cli(*SIM, "--deep").stdout.splitlines()[0] == title
    assert cli(*SIM, "--deep", "-q").stdout.splitlines()[0] == title
    assert "CK041" not in cli(*SIM).stdout


def test_self_test_of_simulated_gpu_is_unknown(cli: Cli) -> None:
    run = cli(*SIM, "--deep", "--only", "CK041", "--json")
    result = parsed(run.stdout)

    assert result["checks"][0]["summary"] == "the GPU is simulated"
    assert (result["status"], run.exit_code) == ("unknown", ExitCode.ENVIRONMENT)


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
    assert "── Passed" in place.read_text(encoding="utf-8")
    assert cli(*SIM, "--report", "-o", place).exit_code == ExitCode.USAGE
    assert cli(*SIM, "--report", "-o", place, "--force").exit_code == ExitCode.OK


# --- without a machine -----------------------------------------------------------------------------


def test_explain_needs_no_machine(cli: Cli) -> None:
    run = cli("doctor", "--explain", "ck012")

    assert run.exit_code == ExitCode.OK
    assert run.stdout.startswith("CK012 checks that LD_LIBRARY_PATH shadows no CUDA library\n")
    document = parsed(cli("doctor", "--explain", "ck12", "--json").stdout)
    assert (document["schema"], document["id"]) == ("cudakit.doctor.explanation/1", "CK012")


def test_explain_of_doctor_explains_errors_too(cli: Cli) -> None:
    document = parsed(cli("doctor", "--explain", "700", "--json").stdout)

    assert document["schema"] == "cudakit.explain/1"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--only", "CK999"), "no check 'CK999'"),
        (("--skip", "driver"), "no check 'driver'"),
        (("--only", ","), "name at least one check"),
        (("--explain", "CK000"), "no explanation for 'CK000'"),
        (("--only", SELF_TESTS[0]), "add --deep to allow that"),
        (("--gpu", "h200"), "unknown GPU choice 'h200'"),
        (("--gpu", "sim:abacus"), "no simulated GPU 'abacus'"),
    ],
)
def test_invalid_arguments_are_usage_errors(
    cli: Cli, arguments: tuple[str, ...], words: str
) -> None:
    run = cli("doctor", *arguments)

    assert run.exit_code == ExitCode.USAGE
    assert words in run.stderr
    assert run.stdout == ""


def test_selection_without_any_check_is_an_error(cli: Cli) -> None:
    run = cli("doctor", "--only", "CK001", "--skip", "CK001")

    assert run.exit_code == ExitCode.USAGE
    assert "--skip excludes every check of --only" in run.stderr


def test_options_of_checks_are_refused_with_explain(cli: Cli) -> None:
    run = cli("doctor", "--explain", "CK001", "--only", "CK002")

    assert run.exit_code == ExitCode.USAGE
    assert "--explain performs no check; remove the other options" in run.stderr
