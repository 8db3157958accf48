"""NCCL on real GPUs: on one, and on two if the machine has them."""

from __future__ import annotations

import json

import pytest
from invocation import Cli

from cudakit.errors import CudakitError
from cudakit.gpu.collectives import load_nccl
from cudakit.gpu.open import open_gpu

pytestmark = pytest.mark.gpu

BRIEF = ("--warmup", "0", "--rounds", "1", "--samples", "3", "--timeout", "0.2")


@pytest.fixture
def two_gpus() -> None:
    """Skip the test unless CUDA sees two GPUs."""
    try:
        open_gpu("cuda", 1).close()
    except CudakitError:
        pytest.skip("needs two GPUs")


def test_version_of_the_installed_nccl_is_read() -> None:
    gpu = open_gpu("cuda")
    try:
        library = gpu.collectives()
        assert int(library.version.split(".")[0]) >= 2
        assert "nccl" in library.path
    finally:
        gpu.close()


def test_two_calls_of_load_nccl_share_one_library() -> None:
    first, _ = load_nccl()
    second, path = load_nccl()

    assert first._handle == second._handle
    assert path.endswith("of this process")


def test_one_rank_measures_all_operations_and_reports_no_bus_bandwidth(cli: Cli) -> None:
    run = cli(
        "bench", "nccl", "--gpu", "cuda", "--ranks", "1", "--sizes", "64KiB", *BRIEF, "--json"
    )
    result = json.loads(run.stdout)

    assert run.exit_code == 0, run.stderr
    assert all(case["verified"] for case in result["results"])
    assert len(result["results"]) == 12
    assert {rate["busbw_bytes_per_s"] for rate in result["collectives"]["rates"]} == {None}


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("mode", ["batch", "graph", "isolated", "host"])
def test_two_ranks_compute_correct_values(cli: Cli, mode: str) -> None:
    options = ("--sizes", "4KiB,4MiB", "--dtype", "bf16", "--mode", mode, *BRIEF)
    run = cli("bench", "nccl", "--gpu", "cuda", "--ranks", "2", *options, "--json")
    result = json.loads(run.stdout)

    assert run.exit_code == 0, run.stderr
    assert all(case["verified"] for case in result["results"])
    assert {case["method"]["mode"] for case in result["results"]} == {mode}
    assert all(rate["busbw_bytes_per_s"] > 0 for rate in result["collectives"]["rates"])


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("dtype", ["fp64", "fp16", "int8", "int32", "fp8_e4m3", "fp8_e5m2"])
def test_every_data_type_is_summed_exactly(cli: Cli, dtype: str) -> None:
    options = ("--operations", "all-reduce,reduce-scatter", "--sizes", "1MiB", "--dtype", dtype)
    run = cli("bench", "nccl", "--gpu", "cuda", "--ranks", "2", *options, *BRIEF, "--json")

    assert run.exit_code == 0, run.stderr
    assert all(case["verified"] for case in json.loads(run.stdout)["results"])


@pytest.mark.usefixtures("two_gpus")
def test_torch_computes_the_same_operations_in_the_same_run(cli: Cli) -> None:
    pytest.importorskip("torch")
    options = ("--operations", "all-reduce,all-gather,all-to-all,send-receive", "--vs", "torch")
    run = cli("bench", "nccl", "--gpu", "cuda", "--sizes", "1MiB", *options, *BRIEF, "--json")
    cases = json.loads(run.stdout)["results"]
    operations = {
        case["axes"]["operation"]
        for case in cases
        if case["contender"] == "torch" and case["verified"]
    }

    assert run.exit_code == 0, run.stderr
    assert operations == {"all-reduce", "all-gather", "all-to-all", "send-receive"}
