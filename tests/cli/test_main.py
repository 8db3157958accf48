from __future__ import annotations

import json
import os
import re
import subprocess
from importlib.metadata import version
from pathlib import Path

import click
import pytest
from invocation import Cli

from cudakit.cli import COMMANDS, load_command
from cudakit.cli.failure import ExitCode, report_error
from cudakit.cli.output import standard_output
from cudakit.errors import CudakitError, MissingDependency, SnapshotError, UsageError


def test_help_goes_to_stdout_and_lists_every_command(cli: Cli) -> None:
    for spelling in ("--help", "-h"):
        run = cli(spelling)

        assert run.exit_code == 0
        assert run.stderr == ""
        for name, line in COMMANDS.items():
            assert re.search(rf"^  {name} +{re.escape(line)}$", run.stdout, re.MULTILINE)


def test_version_is_that_of_the_installed_package(cli: Cli) -> None:
    assert cli("--version").stdout == f"cudakit {version('cudakit')}\n"


def test_missing_command_shows_help_on_stderr_and_fails(cli: Cli) -> None:
    run = cli()

    assert (run.exit_code, run.stdout) == (2, "")
    assert run.stderr.startswith("Usage: cudakit ")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_of_the_table_is_found_and_has_a_help(name: str, cli: Cli) -> None:
    run = cli(name, "--help")

    assert load_command(name).name == name
    assert run.exit_code == 0
    assert run.stdout.startswith(f"Usage: cudakit {name} ")


def test_unknown_command_is_a_usage_error_of_two_lines(cli: Cli) -> None:
    run = cli("memory")

    assert (run.exit_code, run.stdout) == (2, "")
    error, hint = run.stderr.splitlines()
    assert error.startswith("cudakit: error: no such command 'memory'")
    assert hint == "hint: see cudakit --help"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("doctor", "gpu"), "unexpected argument: gpu"),
        (
            ("bench", "nccl", "--ranks", "0", "--gpu", "sim"),
            "invalid value for '--ranks': 0 is not in the range 1 to 64",
        ),
        (("profile", "."), ". is a directory"),
        (("sanitize", "."), ". is a directory"),
        (("devices", "--gpu", "sim", "-o", "."), ". is a directory"),
        (
            (
                "bench",
                "gds",
                "--gpu",
                "sim",
                "--threads",
                "1",
                "--sizes",
                "8MiB",
                "--file-size",
                "4MiB",
            ),
            "the file of 4.00 MiB is too small: 1 thread with transfers of 8.00 MiB needs 16.0 MiB,"
            " two transfers per thread",
        ),
    ],
)
def test_error_is_a_plain_sentence_with_a_hint(
    arguments: tuple[str, ...], message: str, cli: Cli
) -> None:
    run = cli(*arguments)

    assert run.exit_code == 2
    error, hint = run.stderr.splitlines()
    assert error == f"cudakit: error: {message}"
    assert hint.startswith("hint: ")


def test_unknown_option_names_itself(cli: Cli) -> None:
    run = cli("--frobnicate")

    assert run.exit_code == 2
    assert "--frobnicate" in run.stderr


def test_json_prints_an_error_on_stdout_only(cli: Cli) -> None:
    run = cli("memory", "--json")

    error = json.loads(run.stdout)["error"]
    assert error["kind"] == "UsageError"
    assert error["exit_code"] == run.exit_code == 2
    assert "no such command 'memory'" in error["message"]
    assert run.stderr == ""


def test_json_flag_after_two_dashes_belongs_to_the_program(cli: Cli) -> None:
    assert cli("memory", "--", "train.py", "--json").stdout == ""


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (UsageError("no such device: 7"), ExitCode.USAGE),
        (click.BadParameter("7 is too many"), ExitCode.USAGE),
        (click.FileError("x.pkl", "is gone"), ExitCode.USAGE),
        (SnapshotError("x.pkl: not a snapshot"), ExitCode.USAGE),
        (MissingDependency("torch", purpose="recording"), ExitCode.ENVIRONMENT),
        (MemoryError(), ExitCode.ENVIRONMENT),
        (OSError(28, "No space left on device"), ExitCode.ENVIRONMENT),
        (CudakitError("the counters disagree"), ExitCode.INTERNAL),
        (ZeroDivisionError("division by zero"), ExitCode.INTERNAL),
    ],
)
def test_each_kind_of_error_has_its_exit_code_and_one_line(
    error: Exception, exit_code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report_error(error) == exit_code

    stdout, stderr = capsys.readouterr()
    first_line, *other_lines = stderr.splitlines()
    assert first_line.startswith("cudakit: error: ")
    assert all(line.startswith("hint: ") for line in other_lines)
    assert len(other_lines) <= 1
    assert stdout == ""


def test_internal_error_asks_for_a_report_and_has_a_traceback_with_debug(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report_error(KeyError("segments"))
    stderr = capsys.readouterr().err
    assert "internal error: KeyError: 'segments'" in stderr
    assert "CUDAKIT_DEBUG=1" in stderr

    monkeypatch.setenv("CUDAKIT_DEBUG", "1")
    try:
        raise KeyError("segments")
    except KeyError as error:
        report_error(error)
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_message_with_control_characters_stays_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report_error(SnapshotError("bad frame \x1b]0;owned\x07\nhint: rm -rf ~ \u202e\udc80"))

    stderr = capsys.readouterr().err
    assert stderr == (
        "cudakit: error: bad frame \\x1b]0;owned\\x07 hint: rm -rf ~ \\u202e\\udc80\n"
    )


def test_long_message_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    report_error(SnapshotError("x" * 5000, hint="y" * 5000))

    assert [len(line) for line in capsys.readouterr().err.splitlines()] == [516, 1006]


def test_interrupt_ends_with_130_and_no_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_error(KeyboardInterrupt(), open_json_output=standard_output) == 130

    stdout, stderr = capsys.readouterr()
    assert (stdout, stderr.strip()) == ("", "")


def test_error_caused_by_an_interrupt_counts_as_interrupt() -> None:
    with pytest.raises(IndexError) as failure:
        try:
            raise KeyboardInterrupt
        finally:
            [].pop()

    assert report_error(failure.value) == 130


def test_closed_pipe_ends_the_command_with_141(command: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed_pipe:
        done = subprocess.run(
            [*command, "--help"], check=False, stdout=closed_pipe, stderr=subprocess.PIPE
        )

    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_is_reported_in_one_line(command: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*command, "--help"], check=False, stdout=full, stderr=subprocess.PIPE
        )

    assert done.returncode == ExitCode.ENVIRONMENT
    assert done.stderr == b"cudakit: error: No space left on device\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_does_not_hide_an_earlier_error(command: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*command, "memory", "--json"], check=False, stdout=full, stderr=subprocess.PIPE
        )

    assert done.returncode == ExitCode.USAGE
    assert [line.split(b":")[0] for line in done.stderr.splitlines()] == [b"cudakit", b"hint"]


def test_closed_stdout_breaks_nothing(command: list[str]) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", 'exec "$@" >&-', "sh", *command, "--help"],
        check=False,
        stderr=subprocess.PIPE,
    )

    assert (done.returncode, done.stderr) == (0, b"")
