"""``bench nccl`` on simulated devices: one process, and several processes that find each other by TCP."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from invocation import Cli

SIM = ("bench", "nccl", "--gpu", "sim", "--sizes", "1KiB,64KiB")
BRIEF = ("--samples", "3", "--timeout", "0.2")
# The variables of each launcher: rank, number of ranks, rank on the host.
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
END_TIMEOUT_S = 40


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def environment(
    rank: int, ranks: int, port: int, launcher: tuple[str, str, str] = TORCHRUN
) -> dict[str, str]:
    places = dict(zip(launcher, map(str, (rank, ranks, rank)), strict=True))
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {**os.environ, **places, **address, "PYTHONUNBUFFERED": "1"}


def start(
    *arguments: str | Path,
    rank: int,
    ranks: int,
    port: int,
    launcher: tuple[str, str, str] = TORCHRUN,
    **variables: str,
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "cudakit", *map(str, arguments)],
        env=environment(rank, ranks, port, launcher) | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_ranks(
    ranks: int, *arguments: str | Path, launcher: tuple[str, str, str] = TORCHRUN
) -> list[tuple[int, str, str]]:
    """Run a command on all ranks; return the exit code and the output of each."""
    port = free_port()
    processes = [
        start(*arguments, rank=rank, ranks=ranks, port=port, launcher=launcher)
        for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=END_TIMEOUT_S) for process in processes]
    return [
        (process.returncode, *output) for process, output in zip(processes, outputs, strict=True)
    ]


def test_report_has_both_bandwidths_and_is_labelled_as_simulated(cli: Cli) -> None:
    run = cli(*SIM, *BRIEF)

    assert (run.exit_code, run.stderr) == (0, "")
    assert run.stdout.startswith("Simulated: bench nccl, NVIDIA H200\n")
    for text in ("algbw", "busbw", "% of peak", "Results verified for all 24 cases.", "0-1 NV18"):
        assert text in run.stdout
    assert max(map(len, run.stdout.splitlines())) <= 100


def test_json_has_ranks_rates_and_variables(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    run = cli(*SIM, *BRIEF, "--operations", "all-reduce", "--json")
    result = json.loads(run.stdout)

    assert result["schema"] == "cudakit.bench/1"
    assert len(result["collectives"]["ranks"]) == 2
    assert result["collectives"]["variables"] == {"NCCL_NVLS_ENABLE": "0"}
    for case, rate in zip(result["results"], result["collectives"]["rates"], strict=True):
        assert (
            rate["busbw_bytes_per_s"] == rate["algbw_bytes_per_s"]
        )  # the factor of two ranks is 1
        assert rate["algbw_bytes_per_s"] == pytest.approx(
            case["axes"]["size_bytes"] / case["median_s"]
        )


def test_graph_option_selects_the_mode(cli: Cli) -> None:
    run = cli(*SIM, *BRIEF, "--operations", "broadcast", "--graph", "--json")
    methods = [case["method"]["mode"] for case in json.loads(run.stdout)["results"]]

    assert methods == ["graph"] * 4
    assert "exclude each other" in cli(*SIM, "--graph", "--mode", "host").stderr


def test_written_files_are_readable_and_comparable(cli: Cli, tmp_path: Path) -> None:
    files = [
        tmp_path / f"nccl.{suffix}" for suffix in ("json", "html", "csv", "md", "nvbench.json")
    ]
    options = [word for file in files for word in ("-o", str(file))]
    sizes = ("--sizes", "1KiB..64KiB:4", "--operations", "all-reduce")
    assert cli(*SIM, *BRIEF, *sizes, *options).exit_code == 0

    assert "By size" in files[1].read_text()
    assert files[2].read_text().count("\n") >= 8
    comparison = cli("bench", "compare", files[0], files[0])
    assert comparison.exit_code == 0
    assert "same" in comparison.stdout


def test_peak_of_gpus_without_nvlink_is_that_of_pcie(cli: Cli) -> None:
    options = ("--sizes", "1KiB", "--operations", "all-reduce", "--json")
    run = cli("bench", "nccl", "--gpu", "sim:t4x4-slow", *BRIEF, *options)
    limit = json.loads(run.stdout)["results"][0]["limit"]

    assert limit["bound"] == "link"
    assert limit["link_bytes_per_s"] == pytest.approx(15.75e9, rel=1e-3)


def test_number_of_ranks_of_one_process_is_an_option(cli: Cli) -> None:
    run = cli(*SIM, *BRIEF, "--ranks", "4", "--operations", "all-reduce", "--json")
    collectives = json.loads(run.stdout)["collectives"]

    assert [rank["device"] for rank in collectives["ranks"]] == [0, 1, 0, 1]
    assert {rate["bus_factor"] for rate in collectives["rates"]} == {1.5}


@pytest.mark.parametrize(
    "launcher", [TORCHRUN, SLURM, OPEN_MPI], ids=["torchrun", "srun", "mpirun"]
)
def test_processes_measure_together_and_only_rank_0_writes(
    launcher: tuple[str, str, str], tmp_path: Path
) -> None:
    file = tmp_path / "nccl.json"
    arguments = (*SIM, *BRIEF, "--operations", "all-gather,all-to-all", "-o", file)
    first, *others = run_ranks(3, *arguments, launcher=launcher)

    assert first[0] == 0, first
    assert f"Wrote {file}" in first[2]
    assert others == [(0, "", "")] * 2
    result = json.loads(file.read_text())
    assert len({rank["process"] for rank in result["collectives"]["ranks"]}) == 3
    assert all(case["verified"] for case in result["results"])
    assert {case["axes"]["ranks"] for case in result["results"]} == {3}


def test_processes_find_each_other_by_a_file(tmp_path: Path) -> None:
    arguments = (*SIM, *BRIEF, "--operations", "reduce", "--rendezvous", tmp_path / "ranks", "-q")
    outputs = run_ranks(2, *arguments)

    assert [code for code, _, _ in outputs] == [0, 0], outputs
    assert not list(tmp_path.iterdir())


def test_missing_rank_is_named_within_seconds() -> None:
    begin_s = time.monotonic()
    process = start(*SIM, "--rank-timeout", "1", rank=0, ranks=3, port=free_port())
    _, stderr = process.communicate(timeout=END_TIMEOUT_S)

    assert process.returncode == 3
    assert "ranks 1 and 2 of 3 did not connect" in stderr
    assert time.monotonic() - begin_s < 30


def test_rank_with_other_options_ends_all_ranks() -> None:
    port = free_port()
    processes = [
        start("bench", "nccl", "--gpu", "sim", "--sizes", size, rank=rank, ranks=2, port=port)
        for rank, size in enumerate(("1KiB", "2KiB"))
    ]
    errors = [process.communicate(timeout=END_TIMEOUT_S)[1] for process in processes]

    assert [process.returncode for process in processes] == [2, 3]
    assert "has --sizes = 2048, rank 0 has 1024" in errors[0]
    assert "rank 1 stopped" in errors[1]


def start_long_measurement(
    rendezvous: Path, file: Path, *, ranks: int
) -> list[subprocess.Popen[str]]:
    """Start a measurement of many cases, and return when its ranks have measured for some seconds."""
    sizes = ("--sizes", "4B..256KiB", "--dtype", "fp32,bf16,fp16", "--samples", "30")
    arguments = (*SIM, *sizes, "--rendezvous", rendezvous, "-o", file)
    processes = [start(*arguments, rank=rank, ranks=ranks, port=1) for rank in range(ranks)]
    deadline_s = time.monotonic() + END_TIMEOUT_S
    # Rank 0 removes the file when all ranks are connected.
    for is_there in (True, False):
        while rendezvous.exists() != is_there and time.monotonic() < deadline_s:
            time.sleep(0.002)
    time.sleep(4)
    return processes


@pytest.mark.parametrize("victim", [0, 2])
def test_killed_rank_ends_the_others_and_keeps_the_completed_cases(
    victim: int, tmp_path: Path
) -> None:
    file = tmp_path / "nccl.json"
    processes = start_long_measurement(tmp_path / "ranks", file, ranks=3)
    processes[victim].send_signal(signal.SIGKILL)
    begin_s = time.monotonic()
    outputs = [process.communicate(timeout=END_TIMEOUT_S) for process in processes]

    assert time.monotonic() - begin_s < 30
    for rank, process in enumerate(processes):
        if rank != victim:
            assert process.returncode == 3, outputs[rank]
    assert (
        outputs[1][1].strip().splitlines()[-1].startswith("cudakit: error: rank 1 stopped: rank ")
    )
    if victim:
        result: dict[str, Any] = json.loads(file.read_text())
        assert result["complete"] is False
        assert result["results"]
        assert "rank 2" in result["failure"]
        assert "Ended after" in outputs[0][1]


def test_interrupt_of_rank_0_keeps_the_completed_cases(tmp_path: Path) -> None:
    file = tmp_path / "nccl.json"
    processes = start_long_measurement(tmp_path / "ranks", file, ranks=2)
    processes[0].send_signal(signal.SIGTERM)
    outputs = [process.communicate(timeout=END_TIMEOUT_S) for process in processes]

    assert [process.returncode for process in processes] == [130, 0], outputs
    assert json.loads(file.read_text())["complete"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ranks", "0"), "--ranks"),
        (("--operations", "gossip"), "unknown operation 'gossip'"),
        (("--dtype", "fp4"), "unknown data type 'fp4'"),
        (("--places", "nowhere"), "unknown place 'nowhere'"),
        (("--vs", "gloo"), "unknown library 'gloo'"),
        (("--sizes", "1MiB..1KiB"), "not an ascending range"),
        (("--sizes", "1KiB..1MiB:1"), "is not a whole number of at least 2"),
        (("--rank-timeout", "0"), "--rank-timeout"),
        (("--rendezvous", "node0:29500"), "--rendezvous needs a process of torchrun"),
    ],
)
def test_invalid_option_is_one_error(cli: Cli, arguments: tuple[str, ...], message: str) -> None:
    run = cli("bench", "nccl", "--gpu", "sim", *arguments)

    assert run.exit_code in (2, 3)
    assert message in run.stderr
    assert len(run.stderr.splitlines()) <= 2


def test_baseline_that_cannot_run_is_left_out(cli: Cli) -> None:
    options = ("--operations", "all-reduce", "--sizes", "1KiB", "--places", "in-place")
    run = cli("bench", "nccl", "--gpu", "sim", *options, "--vs", "torch")

    assert (run.exit_code, run.stderr) == (0, "")
    assert "Not run: nccl by torch: torch needs a real GPU" in run.stdout
    assert "Results verified for 1 of 2 cases (1 not run)." in run.stdout


def test_other_number_of_ranks_than_started_is_an_error(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment(0, 2, 1).items():
        if name in TORCHRUN:
            monkeypatch.setenv(name, value)

    assert "--ranks is 3, but torchrun started 2 ranks" in cli(*SIM, "--ranks", "3").stderr
