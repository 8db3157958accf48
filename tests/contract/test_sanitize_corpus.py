"""Each program of tests/sanitize_corpus gets the expected report: on a GPU by the command, elsewhere by logs.

The logs also contain the exact bytes that kernels accessed on a GPU.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import check_races
import numpy as np
import pytest
import race_logs
from check_races import CORPUS, Case, Run

from cudakit.gpu.compile import demangle
from cudakit.report import json as rendered
from cudakit.sanitize.detector import analyze_log
from cudakit.sanitize.findings import RaceCollector
from cudakit.sanitize.races import RaceKind
from cudakit.trace.kinds import AccessMode, EventKind, Precision
from cudakit.trace.run_log import LogReader
from cudakit.trace.trace_file import view

LOGS = CORPUS / "logs"
CHECK = check_races.ROOT / "scripts/check_races.py"
PROGRAMS = {case.label: case for case in check_races.cases() if case.script.parent == CORPUS}
HELPERS = {"cuda_kernels"}


def log_of(label: str) -> Path:
    """Return the log of a program, in the current format or in that of the last release."""
    log = LOGS / f"{label}.log"
    return log if log.exists() else log.with_suffix(".npz")


def differences(case: Case, log: Path) -> list[str]:
    """Return the differences between the report on a log and the expected one."""
    with LogReader(log) as reader:
        result = analyze_log(reader, RaceCollector(demangle=demangle))
    report: dict[str, Any] = json.loads(rendered.render(result))
    return list(check_races.wrong_races(case, Run(0, 0.0, "", report)))


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", sorted({case.name for case in PROGRAMS.values()}))
def test_command_reports_race_and_accepts_fixed_variant(name: str) -> None:
    result = subprocess.run(
        [sys.executable, str(CHECK), f"sanitize_corpus/{name}", "--accesses", "exact", "--all"],
        capture_output=True,
        text=True,
        check=False,
    )

    if "skipped" in result.stdout.splitlines()[0]:
        pytest.skip(result.stdout.splitlines()[0])
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("name", PROGRAMS)
def test_gpu_log_gives_expected_report(name: str) -> None:
    log = log_of(PROGRAMS[name].label)
    if not log.exists():
        pytest.skip(
            f"no log yet: on a GPU, check_races.py --keep {LOGS} sanitize_corpus/{PROGRAMS[name].name}"
        )

    assert differences(PROGRAMS[name], log) == []
    assert log.stat().st_size <= race_logs.MAX_LOG_BYTES, "too large for the repository"


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record a program of the simulated device, which traces exact accesses."""
    logs = tmp_path_factory.mktemp("logs")
    command = [sys.executable, str(CHECK), "sim_kernels", "--keep", str(logs)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return logs


def test_log_reproduces_report(simulated: Path) -> None:
    cases = {case.variant: case for case in check_races.cases() if case.name == "sim_kernels"}
    race, fixed_log = (simulated / f"sim_kernels_{variant}.log" for variant in ("race", "fixed"))

    assert differences(cases["race"], race) == []
    assert differences(cases["fixed"], fixed_log) == []
    assert differences(cases["race"], fixed_log) == ["MISSED"]
    (alarm,) = differences(cases["fixed"], race)
    assert alarm.startswith(
        "FALSE POSITIVE: 1 x certain write_after_write (kernel add after kernel"
    )


def test_unexpected_race_is_reported_as_wrong(simulated: Path) -> None:
    race = simulated / "sim_kernels_race.log"
    case = next(case for case in check_races.cases() if case.name == "sim_kernels")

    assert differences(replace(case, kernels=("add", "*")), race) == []
    (message,) = differences(replace(case, kernels=("add", "multiply|copy")), race)
    assert message.startswith("unexpected kernels: ")
    (message,) = differences(replace(case, kinds=("write_after_read",)), race)
    assert message.startswith("unexpected kind: ")


def test_clean_report_counts_only_with_exact_accesses(simulated: Path, tmp_path: Path) -> None:
    fixed_log = simulated / "sim_kernels_fixed.log"
    cases = {case.variant: case for case in check_races.cases() if case.name == "sim_kernels"}
    (chain,) = race_logs.load(fixed_log)
    accesses = chain.records["kind"] == EventKind.ACCESS
    assumed = view(chain.records[accesses], EventKind.ACCESS)
    assumed["precision"] = Precision.ASSUMED
    chain.records[accesses] = assumed.view(chain.records.dtype)
    race_logs.save(tmp_path / "assumed.log", [chain])

    exact = replace(cases["fixed"], exact=True)
    assert differences(exact, fixed_log) == []
    assert differences(exact, tmp_path / "assumed.log") == [
        "only 0.0% of the launches have exact accesses"
    ]


def test_log_contains_no_data_of_the_machine(simulated: Path) -> None:
    (chain,) = race_logs.load(simulated / "sim_kernels_race.log")

    assert {text for text in chain.strings if text} == {"add"}
    assert {frame.filename for stack in chain.stacks for frame in stack} == {"sim_kernels_race.py"}
    assert not chain.records["time_ns"].any()
    assert set(chain.records["thread"].tolist()) == {1}
    assert (simulated / "sim_kernels_race.log").stat().st_size < 2000


def test_every_program_is_listed_with_its_expected_report() -> None:
    assert {path.stem for path in CORPUS.glob("*.py")} - HELPERS == {
        case.name for case in PROGRAMS.values()
    }
    for name, case in PROGRAMS.items():
        assert name == f"{case.name}_{case.variant}"
        assert case.kinds
        assert case.kernels
        assert set(case.kinds) <= {kind.name.lower() for kind in RaceKind}


def test_every_log_belongs_to_program() -> None:
    assert {path.stem for path in LOGS.iterdir()} <= set(PROGRAMS)


def test_every_framework_has_three_program_pairs() -> None:
    counts = Counter(case.name.split("_")[0] for case in PROGRAMS.values())

    assert set(counts) == {"cupy", "cuda", "torch", "triton", "numba", "jax"}
    assert all(count >= 6 for count in counts.values())


@pytest.mark.parametrize("name", sorted({case.name for case in PROGRAMS.values()}))
def test_program_is_short_and_documents_both_variants(name: str) -> None:
    source = (CORPUS / f"{name}.py").read_text(encoding="utf-8")

    docstring = ast.get_docstring(ast.parse(source)) or ""
    assert re.fullmatch(r"race: [^\n].*\.\n\nfixed: [^\n].*\.", docstring, re.DOTALL)
    assert 10 <= len(source.splitlines()) <= 45
    assert 'race = sys.argv[1] == "race"' in source
    assert "# WRONG" in source


def test_fewer_races_are_required_without_exact_accesses() -> None:
    required = {
        accesses: {
            case.label
            for case in check_races.cases(accesses)
            if case.must_be_found and case.script.parent == CORPUS
        }
        for accesses in ("exact", "arguments")
    }

    assert required["exact"] == {name for name, case in PROGRAMS.items() if case.variant == "race"}
    assert required["arguments"] == {"cupy_fill_then_read_race", "cupy_async_pool_race"}


READ, WRITE = AccessMode.READ, AccessMode.WRITE

# Access mode, element bytes, stride in bytes, and element count.
Pieces = tuple[AccessMode, int, int, int]


def all_pieces(mode: AccessMode, size: int) -> Pieces:
    return (mode, size, 0, 1)


MUST_TOUCH: dict[tuple[str, str], set[Pieces]] = {
    ("cupy_chain_fixed", "cupy_fill"): {all_pieces(WRITE, 40000)},
    ("cupy_in_place_fixed", "cupy_add"): {all_pieces(READ, 40000), all_pieces(WRITE, 40000)},
    ("cupy_vector_tail_fixed", "fill_by_four"): {all_pieces(WRITE, 1001 * 4)},
    ("cupy_gather_fixed", "gather"): {
        all_pieces(READ, 256 * 4),
        (READ, 4, 3 * 4, 256),
        all_pieces(WRITE, 256 * 4),
    },
    ("cupy_columns_fixed", "fill_column"): {(WRITE, 4, 8 * 4, 256)},
    ("cupy_bytes_fixed", "fill_every_other"): {(WRITE, 1, 2, 256)},
    ("triton_mask_fixed", "fill"): {all_pieces(WRITE, 1000 * 4)},
    ("triton_descriptor_fixed", "double"): {
        (READ, 32 * 4, 128 * 4, 256),
        all_pieces(WRITE, 256 * 32 * 4),
    },
    # A complete matrix, the left half of each row of another matrix, and the target of a tensor map store.
    ("torch_matmul_fixed", "nvjet"): {
        all_pieces(READ, 4096 * 4096 * 2),
        (READ, 4096 * 2, 8192 * 2, 4096),
        all_pieces(WRITE, 4096 * 4096 * 2),
    },
}


def launch_accesses(log: str) -> Iterator[tuple[str, set[Pieces]]]:
    """Yield the name and the data accesses of each launch in a log, without its internal counters."""
    for chain in race_logs.load(log_of(log)):
        accesses = chain.records[chain.records["kind"] == EventKind.ACCESS]
        rows = view(accesses, EventKind.ACCESS)
        is_data_access = np.isin(rows["mode"], [READ, WRITE]) & np.isin(
            rows["precision"], [Precision.EXACT, Precision.SUMMARY]
        )
        launches = chain.records[chain.records["kind"] == EventKind.LAUNCH]
        for launch, name in zip(
            launches["seq"], view(launches, EventKind.LAUNCH)["name"], strict=True
        ):
            launch_rows = rows[is_data_access & (accesses["seq"] == launch)]
            yield chain.strings[name], {access_pieces(row) for row in launch_rows}


def access_pieces(row: np.void) -> Pieces:
    stride, count = int(row["stride_bytes"]), max(int(row["count"]), 1)
    size = int(row["hi"] - row["lo"]) - (count - 1) * stride
    return (AccessMode(int(row["mode"])), size, stride, count)


@pytest.mark.parametrize(("log", "kernel"), MUST_TOUCH)
def test_recorded_accesses_match_kernel_source(log: str, kernel: str) -> None:
    accesses = [accessed for name, accessed in launch_accesses(log) if kernel in name]

    assert accesses
    assert all(accessed == MUST_TOUCH[log, kernel] for accessed in accesses)
