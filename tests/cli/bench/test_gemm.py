"""``cudakit bench gemm`` from its command line to its report, on the simulated device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from invocation import Cli

from cudakit.cli.failure import ExitCode

ON_SIM = ("bench", "gemm", "--gpu", "sim")


def answer(cli: Cli, *arguments: str) -> dict[str, Any]:
    run = cli(*ON_SIM, *arguments, "--json")
    assert (run.exit_code, run.stderr) == (0, "")
    result: dict[str, Any] = json.loads(run.stdout)
    return result


def axes(cli: Cli, *arguments: str) -> list[dict[str, Any]]:
    return [case["axes"] for case in answer(cli, *arguments)["results"]]


def test_default_shapes_are_reported(cli: Cli) -> None:
    run = cli(*ON_SIM)

    assert (run.exit_code, run.stderr) == (0, "")
    assert run.stdout.startswith("Simulated: bench gemm, NVIDIA H200\n")
    assert "Results verified for all 3 cases." in run.stdout
    assert max(map(len, run.stdout.splitlines())) <= 100


def test_result_has_method_library_and_time(cli: Cli) -> None:
    (case,) = answer(cli, "64", "--seed", "7", "--fill", "normal")["results"]

    assert case["axes"] == {"dtype": "bf16", "m": 64, "n": 64, "k": 64, "layout": "tn"}
    assert (case["verified"], case["contender"], case["operation"]) == (True, "cudakit", "FLOP")
    assert (case["method"]["fill"], case["method"]["seed"]) == ("normal", 7)
    # The default L2 state is hot on a simulated device.
    assert (case["method"]["mode"], case["method"]["cache"]) == ("batch", "hot")
    assert case["settings"].keys() >= {"library", "version", "workspace_bytes", "algorithm"}
    assert case["operations"] == 2 * 64**3


def test_shapes_from_arguments_and_files_are_combined(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "shapes.csv"
    file.write_text("m,n,k,batch\n16,8,4,3\n")
    combinations = axes(
        cli, "8", "4x8x16", "--shapes", str(file), "--dtype", "fp32,fp64", "--layout", "nn,tt"
    )

    assert len(combinations) == 3 * 2 * 2
    assert combinations[0] == {"dtype": "fp32", "m": 8, "n": 8, "k": 8, "layout": "nn"}
    assert combinations[-1] == {
        "dtype": "fp64",
        "m": 16,
        "n": 8,
        "k": 4,
        "layout": "tt",
        "batch": 3,
    }


def test_fast_accumulation_is_a_setting_of_fp8_only(cli: Cli) -> None:
    cases = answer(cli, "32", "--dtype", "bf16,fp8_e4m3", "--fast-accumulate")["results"]

    assert [case["settings"]["asked"] for case in cases] == ["", "fast accumulation"]


def test_options_select_measured_gemms(cli: Cli) -> None:
    options = ("--batch", "2", "--padding", "8", "--epilogue", "relu-bias", "--output-type", "fp32")
    more = ("--workspace", "1MiB", "--deterministic", "--no-reduced-precision")
    (case,) = answer(cli, "32", *options, *more, "--mode", "host", "--cache", "flush")["results"]

    usual = {"dtype": "bf16", "m": 32, "n": 32, "k": 32, "layout": "tn"}
    special = {"batch": 2, "padding": 8, "epilogue": "relu-bias", "output": "fp32"}
    assert case["axes"] == usual | special
    assert case["settings"]["workspace_bytes"] == 1 << 20
    assert case["settings"]["asked"] == "deterministic, no reduced precision"
    assert (case["method"]["mode"], case["method"]["cache"]) == ("host", "flush")


def test_fast_accumulation_needs_fp8(cli: Cli) -> None:
    (case,) = answer(cli, "32", "--dtype", "fp8_e4m3", "--fast-accumulate")["results"]
    refused = cli(*ON_SIM, "32", "--dtype", "bf16", "--fast-accumulate")

    assert case["settings"]["asked"] == "fast accumulation"
    assert refused.exit_code == ExitCode.USAGE
    assert "--fast-accumulate needs a data type of fp8" in refused.stderr


def test_quiet_lines_name_all_parameters_of_each_case(cli: Cli) -> None:
    lines = cli(*ON_SIM, "16", "32", "--dtype", "fp16", "-q").stdout.splitlines()

    assert lines[2].startswith("dtype fp16, m 16, n 16, k 16, layout tn, time ")
    assert lines[3].startswith("dtype fp16, m 32, n 32, k 32, layout tn, time ")


def test_use_of_tuned_algorithms_is_reported(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "tuned.json"
    cli(*ON_SIM, "32", "--tune", "-o", file)

    run = cli(*ON_SIM, "32", "--tuned", file)

    assert f"{file} has no algorithm faster than the default for 1 GEMM" in run.stderr


def test_repeated_gemm_is_measured_once(cli: Cli) -> None:
    assert len(axes(cli, "16", "16x16x16", "--dtype", "bf16,bf16")) == 1


def test_dtype_all_verifies_eight_types(cli: Cli) -> None:
    results = answer(cli, "32", "--dtype", "all")["results"]

    assert [case["axes"]["dtype"] for case in results] == [
        *("fp64", "fp32", "tf32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "int8")
    ]
    assert all(case["verified"] for case in results)


def test_baseline_is_interleaved_and_reported(cli: Cli) -> None:
    measured, baseline = answer(cli, "32", "--vs", "cublas")["results"]
    report = cli(*ON_SIM, "32", "--vs", "cublas").stdout

    assert (measured["contender"], baseline["contender"]) == ("cudakit", "cublas")
    assert measured["method"]["interleaved"] == ["cudakit", "cublas"]
    assert measured["axes"] == baseline["axes"]
    assert "vs cublas" in report
    assert "100.0% ± " in report


@pytest.mark.parametrize("vs", [["torch,cupy"], ["torch", "--vs", "cupy"]])
def test_unsupported_baselines_have_reason(cli: Cli, vs: list[str]) -> None:
    measured, *baselines = answer(cli, "32", "--vs", *vs)["results"]

    assert measured["verified"]
    assert [baseline["contender"] for baseline in baselines] == ["torch", "cupy"]
    for baseline in baselines:
        assert baseline["median_s"] is None
        assert "real GPU" in baseline["unavailable"]["median_s"]


def test_supported_combinations_are_measured(cli: Cli) -> None:
    run = cli(*ON_SIM, "32", "--dtype", "bf16,int8", "--epilogue", "bias")

    assert run.exit_code == 0
    assert "Results verified for 1 of 2 cases (1 not run)." in run.stdout
    assert "Not run: int8: int8 supports only epilogue none" in run.stdout


def test_single_unsupported_combination_is_an_error(cli: Cli) -> None:
    run = cli(*ON_SIM, "32", "--dtype", "int8", "--epilogue", "bias")

    assert (run.exit_code, run.stdout) == (ExitCode.USAGE, "")
    assert "supports only epilogue none" in run.stderr
    assert "hint: " in run.stderr


@pytest.mark.parametrize("fill", ["zeros", "ones"])
def test_constant_data_has_warning(cli: Cli, fill: str) -> None:
    (warning,) = answer(cli, "16", "--fill", fill)["warnings"]

    assert warning.startswith(f"{fill} draw less power")


def test_every_format_is_written(cli: Cli, tmp_path: Path) -> None:
    places = [tmp_path / f"gemm.{end}" for end in ("json", "csv", "md", "html", "nvbench.json")]
    options = [word for place in places for word in ("-o", str(place))]
    run = cli(*ON_SIM, "16", "32", "--dtype", "bf16,int8", "--epilogue", "bias,none", *options)

    assert (run.exit_code, run.stdout) == (0, "")
    texts = {place.suffixes[0]: place.read_text() for place in places}
    assert texts[".csv"].count("\n") == 1 + 2 * 2 * 2
    assert "| int8 |" in texts[".md"]
    assert "Roofline" in texts[".html"]
    assert len(json.loads(texts[".nvbench"])["benchmarks"][0]["states"]) == 8
    compared = cli("bench", "compare", str(places[0]), str(places[0]))
    assert compared.exit_code == 0
    assert "6 same" in compared.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("0",), "dimension of 0"),
        (("4x4",), "4096x1024x8192"),
        (("--shapes", "missing.txt"), "missing.txt does not exist"),
        (("--preset", "gpt5"), "llama3-70b"),
        (("4", "--dtype", "bf17"), "unknown data type 'bf17'"),
        (("4", "--dtype", "all,bf16"), "unknown data type 'all'"),
        (("4", "--layout", "nx"), "unknown layout 'nx'"),
        (("4", "--epilogue", "tanh"), "unknown epilogue 'tanh'"),
        (("4", "--output-type", "fp64"), "bf16 GEMMs have no output type 'fp64'"),
        (("4", "--accumulate", "fp16"), "bf16 GEMMs have no accumulator type 'fp16'"),
        (("4", "--batch", "0"), "--batch is 0"),
        (("4", "--padding", "-1"), "--padding is -1"),
        (("4", "--workspace", "many"), "not a size"),
        (("4", "--vs", "tensorflow"), "choose from cublaslt, cublas, torch, cupy"),
        (("4", "--library", "cublas", "--vs", "cublas"), "compared with itself"),
        (("4", "--library", "torch"), "'cublaslt'"),
        (("4", "--fill", "noise"), "'uniform'"),
        (("4", "--mode", "batch", "--cache", "flush"), "cannot be flushed"),
        (("--preset", "llama3-8b"), "too large for a simulated device"),
        (("1000000",), "a shape of 2048 would fit"),
    ],
)
def test_invalid_options_error_has_hint(arguments: tuple[str, ...], message: str, cli: Cli) -> None:
    run = cli(*ON_SIM, *arguments)

    assert (run.exit_code, run.stdout) == (ExitCode.USAGE, "")
    assert message in run.stderr


def test_help_names_presets(cli: Cli) -> None:
    from cudakit.bench.gemm import PRESETS

    stdout = cli("bench", "gemm", "--help").stdout

    assert all(name in stdout for name in PRESETS)
