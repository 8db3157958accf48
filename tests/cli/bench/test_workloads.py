"""Every bench from its command line to its report, on the simulated device."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
from pathlib import Path

import pytest
from invocation import Cli

from cudakit.cli.failure import ExitCode

# The line of progress, once samples exist: it shows 0% before the first one.
_SAMPLED = re.compile(rb"4\.00 KiB +[1-9]\d*%")
ON_SIM = ("--gpu", "sim", "--warmup", "0")
SMALL: dict[str, tuple[str, ...]] = {
    "memory": ("--operations", "copy,read", "--sizes", "4KiB..8KiB", "--mode", "isolated"),
    "copy": ("--directions", "h2d,d2h,both", "--sizes", "4KiB,8KiB"),
    "launch": ("--calls", "launch,event-record"),
    "alloc": ("--allocators", "driver,virtual", "--sizes", "1MiB"),
    "graph": ("--topologies", "chain", "--nodes", "1,4", "--steps", "launch,run"),
}
CASES = {"memory": 4, "copy": 6, "launch": 2, "alloc": 2, "graph": 4}
VERIFIED = {"memory", "copy"}


@pytest.mark.parametrize("bench", SMALL)
def test_simulated_bench_reports_table(bench: str, cli: Cli) -> None:
    run = cli("bench", bench, *ON_SIM, *SMALL[bench])

    assert (run.exit_code, run.stderr) == (0, "")
    assert run.stdout.startswith(f"Simulated: bench {bench}, NVIDIA H200\n")
    assert "all values are computed on the CPU" in run.stdout
    assert max(map(len, run.stdout.splitlines())) <= 100
    if bench in VERIFIED:
        assert f"Results verified for all {CASES[bench]} cases." in run.stdout


@pytest.mark.parametrize("bench", SMALL)
def test_json_has_samples_and_method(bench: str, cli: Cli) -> None:
    arguments = ("bench", bench, *ON_SIM, *SMALL[bench], "--json", "--seed", "7")
    result = json.loads(cli(*arguments).stdout)

    assert (result["schema"], result["bench"]) == ("cudakit.bench/1", bench)
    assert (result["simulated"], result["complete"]) == (True, True)
    assert len(result["results"]) == CASES[bench]
    for case in result["results"]:
        assert case["median_s"] > 0
        assert len(case["samples_s"]) >= 10
        assert case["verified"] or bench not in VERIFIED
        assert case["method"]["seed"] == 7
        assert case["environment"]["simulated"] is True
        assert case["environment"]["versions"].keys() >= {"driver", "CUDA", "cudakit", "python"}
        # Which only NVML knows, and the limit of copies depends on.
        assert case["environment"]["pcie"] == "5.0 x16"
        assert case["environment"]["command"] == ["cudakit", *arguments]


def test_options_select_measured_cases(cli: Cli) -> None:
    options = ("--mode", "isolated", "--cache", "flush", "--samples", "12", "--precision", "5%")
    more = ("--timeout", "3", "--no-blocker", "--operations", "write", "--sizes", "64KiB")
    run = cli("bench", "memory", "--gpu", "sim", *options, *more, "--json")

    (case,) = json.loads(run.stdout)["results"]
    method, rule = case["method"], case["method"]["rule"]
    assert case["axes"] == {"operation": "write", "size_bytes": 1 << 16}
    assert (method["mode"], method["cache"], method["blocker"]) == ("isolated", "flush", False)
    assert (rule["min_samples"], rule["precision"], rule["timeout_s"]) == (12, 0.05, 3.0)
    assert len(case["samples_s"]) >= 12


def test_written_files_can_be_compared(cli: Cli, tmp_path: Path) -> None:
    places = [tmp_path / f"run.{end}" for end in ("json", "csv", "md", "html", "nvbench.json")]
    options = [word for place in places for word in ("-o", place)]
    arguments = ("bench", "copy", *ON_SIM, *SMALL["copy"], *options)
    run = cli(*arguments)

    assert (run.exit_code, run.stdout) == (0, "")
    first, *_ = run.stderr.splitlines()
    assert first.startswith("Simulated: ")
    assert run.stderr.endswith("".join(f"Wrote {place}\n" for place in places))
    assert {place.name for place in tmp_path.iterdir()} == {place.name for place in places}
    second_run = cli(*arguments)
    assert (second_run.exit_code, second_run.stdout) == (ExitCode.USAGE, "")
    assert "-f replaces it" in second_run.stderr
    compared = cli("bench", "compare", places[0], places[0], "--fail-on", "slower")
    assert compared.exit_code == 0
    assert "6 same." in compared.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("memory", "--operations", "fly"), 2, "choose from read, write"),
        (("memory", "--sizes", "0"), 2, "64MiB"),
        (("memory", "--sizes", "1KiB.."), 2, "the range '1KiB..' lacks its first or last size"),
        (("memory", "--sizes", "100"), 2, "multiple of 16"),
        (("memory", "--sizes", "100TiB"), 2, "would fit"),
        (("memory", "--mode", "fast"), 2, "'isolated'"),
        (("copy", "--directions", "pageable"), 2, "pageable"),
        (("graph", "--nodes", "0"), 2, "--nodes is 0"),
        (("graph", "--nodes-of", "event"), 2, "unknown node type 'event'"),
        (("copy", "--overlap", "gemm", "--directions", "both"), 2, "--overlap cannot be measured"),
        (("suite", "--ray-timeout", "5"), 2, "--ray-timeout needs --ray"),
        (("suite", "--results", "nightly", "--quick"), 2, "--quick has no effect"),
        (("launch", "--precision", "0"), 2, "precision"),
        (("launch", "--precision", "5"), 2, "5% or 500%"),
        (("launch", "--timeout", "-1"), 2, "timeout"),
        (("launch", "--samples", "0"), 2, "samples"),
        (("launch", "-o", "run.xyz"), 2, "run.xyz"),
        (("launch", "--gpu", "sim:b9000"), 2, "b9000"),
        (("launch", "--gpu", "none"), 2, "auto, cuda"),
    ],
)
def test_invalid_options_error_has_hint(
    arguments: tuple[str, ...], code: int, message: str, cli: Cli
) -> None:
    gpu = () if "--gpu" in arguments else ("--gpu", "sim")
    run = cli("bench", *arguments, *gpu)

    assert (run.exit_code, run.stdout) == (code, "")
    assert message in run.stderr


@pytest.mark.skipif(
    any(Path(place).exists() for place in ("/dev/nvidiactl", "/dev/dxg")), reason="there is a GPU"
)
def test_missing_gpu_is_not_replaced_by_simulation(cli: Cli) -> None:
    run = cli("bench", "launch")

    assert (run.exit_code, run.stdout) == (ExitCode.ENVIRONMENT, "")
    assert "--gpu sim" in run.stderr


def test_files_are_complete_if_report_is_not_read(command: list[str], tmp_path: Path) -> None:
    target = tmp_path / "run.json"
    arguments = ["bench", "launch", *ON_SIM, *SMALL["launch"], "-o", str(target), "-o", "-"]
    with subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.close()
        child.wait(timeout=60)

    assert child.returncode == ExitCode.BROKEN_PIPE
    assert json.loads(target.read_text())["complete"] is True


def test_ctrl_c_keeps_results_so_far(command: list[str], tmp_path: Path) -> None:
    target = tmp_path / "run.json"
    terminal, side = pty.openpty()
    arguments = ["bench", "copy", "--gpu", "sim", "--directions", "d2h", "--sizes", "4KiB,64MiB"]
    # Thousands of slow copies, which do not end before the interrupt.
    slow = ["--samples", "100000", "--timeout", "1000", "-o", str(target), "-o", "-"]
    with subprocess.Popen(
        [*command, *arguments, *slow],
        stdout=subprocess.PIPE,
        stderr=side,
        env={**os.environ, "TERM": "xterm"},
        text=True,
    ) as child:
        os.close(side)
        shown = b""
        while not _SAMPLED.search(shown):
            shown += os.read(terminal, 4096)
        child.send_signal(signal.SIGINT)
        report = child.communicate(timeout=60)[0]
    os.close(terminal)

    assert child.returncode == ExitCode.INTERRUPTED
    assert "Interrupted after 1 case." in report
    result = json.loads(target.read_text())
    assert result["complete"] is False
    assert len(result["results"]) == 1


SMALL_COPIES = ("--sizes", "64KiB", "--warmup", "0")


def test_default_directions_include_peers(cli: Cli) -> None:
    run = cli("bench", "copy", "--gpu", "sim:h200x2", *SMALL_COPIES, "--json")

    cases = json.loads(run.stdout)["results"]
    peers = [case["axes"] for case in cases if "peer" in case["axes"]]
    assert [(axes["direction"], axes["peer"], axes["access"]) for axes in peers] == [
        ("peer", 1, "direct"),
        ("peer-both", 1, "direct"),
    ]
    assert all(case["verified"] and case["limit"] for case in cases)


def test_peer_directions_need_two_gpus(cli: Cli) -> None:
    run = cli("bench", "copy", "--gpu", "sim", "--directions", "peer", *SMALL_COPIES)

    assert (run.exit_code, run.stdout) == (ExitCode.USAGE, "")
    assert "needs two GPUs, but CUDA has only one\nhint: --gpu sim:h200x2 simulates" in run.stderr


def test_memory_of_l2_size_says_that_some_data_stays_in_the_cache(cli: Cli) -> None:
    run = cli("bench", "memory", "--gpu", "sim", "--operations", "read", "--sizes", "60MiB")

    assert "some or all data stays in the L2 cache" in " ".join(run.stdout.split())


def test_pageable_copies_have_host_time(cli: Cli) -> None:
    run = cli("bench", "copy", "--gpu", "sim", "--directions", "h2d,pageable-h2d", *SMALL_COPIES)

    assert run.exit_code == ExitCode.OK
    assert "pageable-h2d: host time" in run.stdout


def test_overlap_report_begins_with_an_answer_per_direction(cli: Cli) -> None:
    options = ("--overlap", "gemm", "--directions", "h2d,pageable-d2h", "--rounds", "1")
    run = cli("bench", "copy", *ON_SIM, *options)

    assert (run.exit_code, run.stderr) == (0, "")
    lines = run.stdout.splitlines()
    assert lines[0] == "Simulated: bench copy --overlap gemm, NVIDIA H200"
    assert lines[2].startswith("✓ A copy from pinned host memory to the device overlaps 100%")
    assert lines[3].startswith("! A copy from the device to pageable host memory overlaps 0%")
    assert "API synchronization behavior" in run.stdout
    assert "Results verified for both cases." in run.stdout
    text = " ".join(run.stdout.split())
    assert re.search(
        r"time alone of \d+ to \d+ copies and \d+( to \d+)? GEMMs, which take about the same", text
    )
    assert "method each sample has all copies, all GEMMs, or both" in text


def test_overlap_with_samples_keeps_its_own_time_limit(cli: Cli) -> None:
    options = ("--overlap", "gemm", "--directions", "h2d", "--samples", "12", "--json")
    result = json.loads(cli("bench", "copy", *ON_SIM, *options).stdout)

    rule = result["results"][0]["method"]["rule"]
    assert (rule["min_samples"], rule["precision"], rule["timeout_s"]) == (12, 0.02, 3.0)


def test_json_of_overlap_has_times_and_shares(cli: Cli) -> None:
    options = ("--overlap", "gemm", "--directions", "d2h", "--rounds", "1", "--json")
    result = json.loads(cli("bench", "copy", *ON_SIM, *options).stdout)

    (overlap,) = result["overlaps"]
    assert result["bench"] == "copy-overlap"
    assert result["simulated"] is True
    assert (overlap["direction"], overlap["size_bytes"]) == ("d2h", 256 << 10)
    assert overlap["overlap"] == pytest.approx(1.0)
    assert overlap["both_s"] == pytest.approx(max(overlap["copy_s"], overlap["gemm_s"]))
    assert {case["axes"]["measurement"] for case in result["results"]} == {
        "copy",
        "gemm",
        "both",
        "copy-during-gemm",
        "gemm-during-copy",
    }


@pytest.mark.parametrize("option", [("--mode", "batch"), ("--cache", "hot")])
def test_overlap_rejects_options_without_meaning(option: tuple[str, str], cli: Cli) -> None:
    run = cli("bench", "copy", "--gpu", "sim", "--overlap", "gemm", *option)

    assert run.exit_code == ExitCode.USAGE
    assert f"{option[0]} cannot be used with --overlap" in run.stderr


def test_caption_says_which_bytes_the_rate_counts(cli: Cli) -> None:
    copies = cli("bench", "copy", *ON_SIM, "--directions", "both,d2d", "--sizes", "1MiB").stdout
    memory = cli("bench", "memory", *ON_SIM, "--operations", "triad", "--sizes", "1MiB").stdout

    text = " ".join(copies.split())
    assert "Rate: for d2d of all bytes read and written; for both the sum of the two" in text
    assert "Rate: of all bytes read and written." in " ".join(memory.split())
