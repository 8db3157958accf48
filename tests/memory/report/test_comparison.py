"""The text of the what-if report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cudakit.api.memory import replay_snapshots
from cudakit.memory.load import load
from cudakit.memory.report.comparison import what_if_report
from cudakit.memory.whatif import WhatIfSpec
from cudakit.report import console

ROOT = Path(__file__).parents[3]
SETTINGS = ("expandable_segments:True", "max_split_size_mb:128", "")


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use relative file names, because the report shows them."""
    monkeypatch.chdir(ROOT)


def read(*names: str, settings: tuple[str, ...] = SETTINGS, limit: int | None = None) -> str:
    result = replay_snapshots([load(name) for name in names], WhatIfSpec(settings, limit))
    return console.render(what_if_report(result), width=100, color=False)


def test_report_of_an_out_of_memory_error_equals_the_golden_file(
    golden: Callable[[str, str], None],
) -> None:
    golden("memviz-what-if-oom-100.txt", read("tests/data/oom.pkl.gz"))


def test_report_of_a_low_limit_equals_the_golden_file(golden: Callable[[str, str], None]) -> None:
    text = read("tests/data/train_python.pkl.gz", limit=780 << 20)

    golden("memviz-what-if-limit-100.txt", text)


def test_report_begins_with_the_success_of_a_higher_limit() -> None:
    sentence = "✓ With a memory limit of 2.45 GiB, no request fails with the recorded settings."
    low, high = (
        read("tests/data/fragmented_oom.pkl.gz", settings=("",), limit=limit)
        for limit in (2 << 30, 2509 << 20)
    )

    assert high.splitlines()[2] == sentence
    assert "no request fails" not in low


def test_memviz_what_if_report_of_several_files_has_a_part_per_file() -> None:
    text = read("tests/data/pools.pkl.gz", "tests/data/leak.pkl.gz", settings=("",))

    assert "under other settings" in text
    assert text.count("Driver calls and failures") == 2
    assert "tests/data/leak.pkl.gz: cuda:0" in text
