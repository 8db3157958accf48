"""``--tune`` and ``--tuned`` on the simulated device."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest

from cudakit.bench.gemm import GemmSpec
from cudakit.cli.bench.tune import TuneOptions, tune_options, use_tuned
from cudakit.cli.bench.tune import tune as search
from cudakit.cli.failure import ExitCode
from cudakit.cli.options import output_options
from cudakit.cli.output import COMMON_FORMATS, OutputOptions
from cudakit.errors import CudakitError, InputError, UsageError
from cudakit.gpu.api.gemm import Gemm, GemmSettings

# The heuristics of the simulated library choose an algorithm for it that takes a third longer than the best.
GAINS = Gemm(dtype="fp32", m=256, n=768, k=256)
EQUAL = Gemm(dtype="bf16", m=64, n=64, k=64)


@dataclass
class Run:
    """The outcome of a command line."""

    exit_code: int
    stdout: str
    stderr: str
    measured: list[GemmSpec]


def run(*arguments: str | Path, gemms: tuple[Gemm, ...] = (GAINS,), **changes: Any) -> Run:
    measured: list[GemmSpec] = []
    spec = GemmSpec(gemms=gemms, mode="isolated", cache="hot", **changes)

    @click.command()
    @tune_options
    @output_options(COMMON_FORMATS)
    def command(*, tuning: TuneOptions, output: OutputOptions) -> int:
        if tuning.search:
            return search(spec, "sim", output, tuning)
        measured.append(use_tuned(spec, tuning.tuned_path, "sim") if tuning.tuned_path else spec)
        return 0

    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        code = command.main(list(map(str, arguments)), standalone_mode=False)
    return Run(code, stdout.getvalue(), stderr.getvalue(), measured)


def tune(*arguments: str | Path, **options: Any) -> Run:
    return run("--tune", "--tune-iterations", "20", *arguments, **options)


def test_tuning_writes_a_file_that_later_runs_use(tmp_path: Path) -> None:
    place = tmp_path / "tuned.json"
    done = tune("-o", place, gemms=(GAINS, EQUAL))

    assert done.exit_code == ExitCode.OK
    assert done.stdout == ""
    assert done.stderr.startswith("Simulated: bench gemm --tune, NVIDIA H200\n")
    assert done.stderr.endswith(f"Wrote {place}\n")
    written = json.loads(place.read_text())
    assert (written["schema"], written["simulated"]) == ("cudakit.tuned/1", True)
    used = run("--tuned", place, gemms=(GAINS, EQUAL))
    ((gemm, algorithm),) = used.measured[0].algorithms.items()
    assert gemm == GAINS
    assert algorithm.tile == written["products"][0]["winner"]["tile"]


def test_name_of_an_nvbench_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no format with this suffix"):
        tune("-o", tmp_path / "tuned.nvbench.json")


def test_json_equals_file(tmp_path: Path) -> None:
    place = tmp_path / "tuned.json"
    done = tune("-o", place, "--json")

    assert done.stdout == place.read_text()
    product = json.loads(done.stdout)["products"][0]
    assert product["significant"] is True
    assert product["gain_interval"][0] > 0
    assert product["limits"] == {"time_s": 30.0, "iterations": 20}
    assert product["tried"] <= product["candidates"]


def test_tuning_continues_from_file(tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    tune("-o", first)
    tune("--tuned", first, "-o", second, gemms=(GAINS, EQUAL))
    products = [json.loads(place.read_text())["products"] for place in (first, second)]

    assert products[1][0] == products[0][0]
    assert [product["gemm"]["m"] for product in products[1]] == [GAINS.m, EQUAL.m]


def test_algorithms_of_other_settings_are_not_used(tmp_path: Path) -> None:
    place = tmp_path / "tuned.json"
    tune("-o", place)
    used = run("--tuned", place, settings=GemmSettings(deterministic=True))

    assert used.measured[0].algorithms == {}
    assert f"{place} has no algorithm with these settings for 1 GEMM; the default" in used.stderr


def test_gemms_without_tuned_algorithm_are_counted(
    tmp_path: Path,
) -> None:
    place = tmp_path / "tuned.json"
    tune("-o", place, gemms=(EQUAL,))

    assert "with these settings" not in run("--tuned", place, gemms=(EQUAL,)).stderr
    some = run("--tuned", place, gemms=(GAINS, EQUAL))
    assert f"{place} has no algorithm with these settings for 1 GEMM" in some.stderr


def test_gemm_without_tuned_file_has_no_warning() -> None:
    assert run().measured[0].algorithms == {}


def test_tuning_reports_are_written_as_files(tmp_path: Path) -> None:
    places = [tmp_path / f"tuned.{end}" for end in ("md", "html")]
    tune("-o", places[0], "-o", places[1], gemms=(EQUAL,))

    assert "No significant gain" in places[0].read_text()
    assert "No significant gain" in places[1].read_text()


def damaged(change: Callable[[Any], None]) -> Callable[[Path], None]:
    def damage(place: Path) -> None:
        plain = json.loads(place.read_text())
        change(plain)
        place.write_text(json.dumps(plain))

    return damage


def elsewhere(plain: Any) -> None:
    plain["machine"]["gpu"] = "NVIDIA H100"


def test_tuning_of_other_gpu_is_rejected(tmp_path: Path) -> None:
    place = tmp_path / "tuned.json"
    tune("-o", place, gemms=(EQUAL,))
    damaged(elsewhere)(place)

    for arguments in (("--tuned", place), ("--tune", "--tuned", place)):
        with pytest.raises(InputError, match="GPU: tuned NVIDIA H100, here NVIDIA H200"):
            run(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tune-time", "3"), "needs --tune"),
        (("--tune-iterations", "30"), "needs --tune"),
        (("--export", "x.csv"), "needs --tune"),
        (("--tune", "--torch-validators", "x.csv"), "needs --export"),
        (("--tune", "--tune-time", "0"), "must be a number above 0"),
        (("--tune", "--tune-iterations", "5"), "it must be at least 20"),
        (("--tune", "-o", "tuned.csv"), "this report has no format with this suffix"),
        (("--tune", "--tuned", "none.json"), "none.json does not exist"),
        (("--tuned", "none.json"), "none.json does not exist"),
        (("--tune", "--export", "x.csv"), "torch cannot use the algorithms"),
    ],
)
def test_invalid_tuning_options_leave_no_file(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((UsageError, InputError), match=message) as caught:
        run(*arguments)

    assert caught.value.exit_code == ExitCode.USAGE
    assert list(tmp_path.iterdir()) == []


def test_hint_on_too_few_samples_names_the_option() -> None:
    with pytest.raises(InputError) as caught:
        run("--tune", "--tune-iterations", "5")

    assert caught.value.hint.startswith("use --tune-iterations 20 or more")


def test_existing_file_is_replaced_only_with_force(tmp_path: Path) -> None:
    place = tmp_path / "tuned.json"
    place.write_text("mine")
    with pytest.raises(CudakitError, match="exists"):
        tune("-o", place, gemms=(EQUAL,))

    assert place.read_text() == "mine"
    assert tune("-o", place, "-f", gemms=(EQUAL,)).exit_code == ExitCode.OK
