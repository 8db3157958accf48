"""Invalid options and files of ``cudakit bench`` give one line, a hint, and exit code 2."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from invocation import Cli

from cudakit.cli.failure import ExitCode

ON_SIM = ("--gpu", "sim")
MEMORY = ("memory", "--sizes", "64KiB", "--operations", "copy")


def error_of(cli: Cli, *arguments: str | Path) -> str:
    """Run a command that must fail with one line and at most one hint, and return the line."""
    run = cli("bench", *map(str, arguments))
    assert (run.exit_code, run.stdout) == (ExitCode.USAGE, "")
    line, *hint = run.stderr.splitlines()
    assert line.startswith("cudakit: error: ")
    assert [text[:6] for text in hint] in ([], ["hint: "])
    assert len(line) < 300
    return line


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--budget", "0", "--budget is 0; it must be a number above 0"),
        ("--budget", "inf", "--budget is inf"),
        ("--budget", "x", "'x' is not a number of seconds"),
        ("--timeout", "x", "'x' is not a number of seconds"),
        ("--timeout", "nan", "--timeout is nan"),
        ("--precision", "0", "--precision is 0"),
        ("--precision", "-1%", "is not a percentage"),
        ("--warmup", "-1", "--warmup is -1; it must be from 0 to 3,600"),
        ("--warmup", "inf", "--warmup is inf"),
        ("--warmup", "nan", "--warmup is nan"),
        ("--rounds", "0", "from 1 to 1,000"),
        ("--samples", "0", "from 1 to 1,000,000"),
        ("--samples", "99999999999999999999", "is 99,999,999,999,999,999,999; it"),
        ("--seed", "18446744073709551616", "to 18,446,744,073,709,551,615"),
    ],
)
def test_invalid_numbers_are_rejected(option: str, value: str, message: str, cli: Cli) -> None:
    assert message in error_of(cli, *MEMORY, *ON_SIM, option, value)


@pytest.mark.parametrize("empty", ["", ",", " , "])
@pytest.mark.parametrize(
    ("bench", "option"),
    [
        ("memory", "--operations"),
        ("memory", "--sizes"),
        ("copy", "--directions"),
        ("launch", "--calls"),
        ("alloc", "--allocators"),
        ("graph", "--nodes"),
        ("graph", "--steps"),
        ("gemm", "--dtype"),
        ("gemm", "--layout"),
        ("gemm", "--vs"),
    ],
)
def test_empty_list_is_rejected(bench: str, option: str, empty: str, cli: Cli) -> None:
    message = error_of(cli, bench, *ON_SIM, option, empty)

    assert option in message
    assert "is an empty list" in message


@pytest.mark.parametrize("size", ["9" * 5000, "9" * 400 + ".5", "0.5", "5"])
def test_invalid_size_ranges_are_rejected(size: str, cli: Cli) -> None:
    run = cli("bench", "memory", *ON_SIM, "--sizes", size)

    assert (run.exit_code, run.stdout) == (ExitCode.USAGE, "")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"m,n,k\n", "contains no shapes"),
        (bytes(range(256)), "is not a file of shapes: it is not text"),
        ("m,n,k\n8,8,8\n".encode("utf-16"), "is not a file of shapes: it is not text"),
        (b"9" * 5000 + b" 4 4\n", "is not a shape"),
        (b"4 " * 100_000, "is not a shape"),
        (b"4,4,4\x1b[31m\n", "is not a shape"),
        (b"m,m,n,k\n1,2,3,4\n", "it lacks m"),
        (b"4 -4 4\n", "is not a shape"),
        (b"4 4 4 0\n", "has a dimension of 0"),
        ("\N{ARABIC-INDIC DIGIT FOUR} 4 4\n".encode(), "is not a shape"),
        (b"\n".join(b"4 4 %d" % k for k in range(1, 10_002)), "10,001 cases are too many"),
    ],
)
def test_invalid_shape_files_are_rejected(
    content: bytes, message: str, cli: Cli, tmp_path: Path
) -> None:
    file = tmp_path / "shapes"
    file.write_bytes(content)

    assert message in error_of(cli, "gemm", *ON_SIM, "--shapes", file)


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs /dev/zero")
@pytest.mark.parametrize(
    "arguments",
    [
        ("gemm", *ON_SIM, "--shapes", "/dev/zero"),
        ("gemm", "8", *ON_SIM, "--tuned", "/dev/zero"),
        ("compare", "/dev/zero", "/dev/zero"),
    ],
)
def test_endless_file_is_rejected(arguments: tuple[str, ...], cli: Cli) -> None:
    assert "/dev/zero is larger than 256 MiB" in error_of(cli, *arguments)


def test_shape_with_thousands_of_digits_is_rejected(cli: Cli) -> None:
    assert "9..." in error_of(cli, "gemm", *ON_SIM, "9" * 5000)


@pytest.mark.parametrize(
    "options",
    [
        ("-o", "a.json", "-o", "a.json"),
        ("-o", "a.json", "-o", "./a.json", "--force"),
        ("-o", ""),
        ("-o", "a.json", "-o", "b.xyz"),
    ],
)
def test_invalid_outputs_leave_no_file(
    options: tuple[str, ...], cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    error_of(cli, *MEMORY, *ON_SIM, *options)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tune", "--export", "a.txt"), "cannot write a.txt: this report has no format"),
        (("--tune", "--export", "-"), "no format with this suffix"),
        (("--tune", "--export", ""), "no format with this suffix"),
        (("--tuned", "a.json", "--library", "cublas"), "--tuned has algorithms of cublaslt"),
        (("--tune", "--tune-time", "inf"), "must be a number above 0"),
    ],
)
def test_contradictory_tuning_options_are_rejected(
    options: tuple[str, ...], message: str, cli: Cli
) -> None:
    assert message in error_of(cli, "gemm", "8", *ON_SIM, *options)


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="only Linux says what is free")
@pytest.mark.parametrize(
    "arguments",
    [("alloc", "--allocators", "pinned"), ("copy", "--directions", "pageable-d2h")],
)
def test_copy_larger_than_host_memory_is_rejected(arguments: tuple[str, ...], cli: Cli) -> None:
    assert "of host memory" in error_of(cli, *arguments, *ON_SIM, "--sizes", "1EiB")


def test_simulated_buffers_larger_than_the_limit_of_the_process_are_rejected() -> None:
    limit_kib = 4 << 20
    command = (sys.executable, "-m", "cudakit", "bench", "memory", *ON_SIM, "--operations", "read")
    run = subprocess.run(
        ("/bin/sh", "-c", f'ulimit -v {limit_kib}; exec "$@"', "sh", *command, "--sizes", "4GiB"),
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode == 2
    assert "the host, which simulates the device, has only " in run.stderr


@pytest.mark.parametrize("direction", ["pageable-h2d", "h2d,pageable-d2h"])
def test_pageable_copies_in_graph_mode_are_rejected(direction: str, cli: Cli) -> None:
    message = error_of(cli, "copy", *ON_SIM, "--mode", "graph", "--directions", direction)

    assert "a graph cannot contain them" in message


def test_default_directions_in_graph_mode_are_not_pageable(cli: Cli) -> None:
    run = cli("bench", "copy", *ON_SIM, "--mode", "graph", "--sizes", "4KiB", "--json")

    directions = [case["axes"]["direction"] for case in json.loads(run.stdout)["results"]]
    assert directions == ["h2d", "d2h", "both", "d2d"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    from invocation import run_cli

    file = tmp_path_factory.mktemp("saved") / "a.json"
    assert run_cli("bench", *MEMORY, *ON_SIM, "-q", "-o", str(file)).exit_code == 0
    return file.read_text()


@pytest.mark.parametrize("value", ["1" + "0" * 400, "1e400", "NaN", "-Infinity", "9" * 5000])
@pytest.mark.parametrize("key", ["median_s", "samples_s", "warmup_s"])
def test_result_with_unrepresentable_number_is_damaged(
    key: str, value: str, saved: str, cli: Cli, tmp_path: Path
) -> None:
    text, count = re.subn(rf'("{key}": \[?\s*)[^],\s]+', rf"\g<1>{value}", saved, count=1)
    assert count
    file = tmp_path / "b.json"
    file.write_text(text)

    message = error_of(cli, "compare", file, file)
    assert "is damaged" in message or "number in its JSON is too long" in message


def test_fail_on_amount_without_percent_is_ambiguous(saved: str, cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(saved)

    message = error_of(cli, "compare", file, file, "--fail-on", "slower:5")
    assert "'slower:5' is ambiguous" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ops", "--vs", "none,torch"), "--vs none excludes other libraries"),
        (("nccl", "--rank-timeout", "0"), "'0' is not a number of seconds above 0"),
    ],
)
def test_options_that_exclude_each_other_are_refused(
    cli: Cli, arguments: tuple[str, ...], message: str
) -> None:
    assert message in error_of(cli, *arguments, *ON_SIM)
