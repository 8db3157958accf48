from __future__ import annotations

import json
from pathlib import Path

import pytest
from invocation import Cli

from cudakit.cli.failure import ExitCode


@pytest.mark.parametrize(
    ("arguments", "title"),
    [
        (("700",), "CUDA_ERROR_ILLEGAL_ADDRESS (CUDA error 700)"),
        (("cudaErrorMemoryAllocation",), "CUDA_ERROR_OUT_OF_MEMORY (CUDA error 2)"),
        (("cudaErrorInsufficientDriver",), "cudaErrorInsufficientDriver (CUDA error 35)"),
        (("13",), "13: 2 explanations"),
        (("21",), "cudaErrorInvalidMemcpyDirection (CUDA error 21)"),
        (("cudaErrorMissingConfiguration",), "cudaErrorMissingConfiguration (CUDA error 52)"),
        (("Xid", "79"), "Xid 79"),
        (("Xid 79",), "Xid 79"),
        (("79",), "Xid 79"),
        (("ck12",), "CK012 checks that LD_LIBRARY_PATH shadows no CUDA library"),
        (("CUBLAS_STATUS_ALLOC_FAILED",), "CUBLAS_STATUS_ALLOC_FAILED (cuBLAS status 3)"),
        (("NCCL_DEBUG",), "NCCL_DEBUG (environment variable of NCCL)"),
    ],
)
def test_explain_finds_each_kind_of_term(cli: Cli, arguments: tuple[str, ...], title: str) -> None:
    run = cli("explain", *arguments)

    assert (run.exit_code, run.stderr) == (ExitCode.OK, "")
    assert run.stdout.splitlines()[0] == title


@pytest.mark.parametrize(
    ("term", "line"),
    [
        ("CK027", "CK027 checks that no GPU has uncorrectable memory errors"),
        ("Xid 79", "Xid 79: the GPU has fallen off the bus"),
        ("NCCL_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME: network interfaces for sockets"),
        ("NCCL_COMM_BLOCKING", "NCCL_COMM_BLOCKING=1: calls block until they are complete"),
        (
            "NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS",
            "NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS=0: no warnings about small grids",
        ),
    ],
)
def test_quiet_explanation_is_one_line(cli: Cli, term: str, line: str) -> None:
    assert cli("explain", term, "-q").stdout == f"{line}\n"


def test_number_with_two_meanings_explains_both(cli: Cli) -> None:
    result = json.loads(cli("explain", "46", "--json").stdout)

    assert result["schema"] == "cudakit.explain/1"
    assert [topic["kind"] for topic in result["topics"]] == ["CUDA error", "Xid"]


@pytest.mark.parametrize(
    ("check_id", "command"),
    [("CK012", "doctor --only CK012"), ("CK041", "doctor --only CK041 --deep")],
)
def test_action_of_check_is_command_that_prints_the_remedy(
    cli: Cli, check_id: str, command: str
) -> None:
    (topic,) = json.loads(cli("explain", check_id, "--json").stdout)["topics"]

    assert topic["action"].startswith(f"cudakit {command} prints what to do")
    assert cli(*command.split(), "--gpu", "sim", "--json").exit_code != ExitCode.USAGE


def test_several_terms_have_a_section_each(cli: Cli) -> None:
    run = cli("explain", "700", "719", "-o", "-")

    assert run.stdout.splitlines()[0] == "2 explanations"
    assert "CUDA_ERROR_LAUNCH_FAILED (CUDA error 719)" in run.stdout


def test_unknown_term_is_usage_error_with_suggestion(cli: Cli) -> None:
    run = cli("explain", "CUDA_ERROR_OUT_OF_MEMROY")

    assert (run.exit_code, run.stdout) == (ExitCode.USAGE, "")
    assert "did you mean CUDA_ERROR_OUT_OF_MEMORY" in run.stderr


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("illegal", "memory", "access"), "CUDA_ERROR_ILLEGAL_ADDRESS or Xid 137"),
        (("OOM",), "CUDA_ERROR_OUT_OF_MEMORY"),
        (("CUBLAS 13",), "CUBLAS_STATUS_EXECUTION_FAILED"),
    ],
)
def test_words_of_a_message_suggest_the_names_of_errors(
    cli: Cli, words: tuple[str, ...], names: str
) -> None:
    assert f"hint: did you mean {names}?" in cli("explain", *words).stderr


def test_explanation_is_written_to_file(cli: Cli, tmp_path: Path) -> None:
    place = tmp_path / "explained.md"

    run = cli("explain", "700", "-o", place)

    assert run.stdout == ""
    assert "a kernel accessed an invalid memory address" in place.read_text(encoding="utf-8")
