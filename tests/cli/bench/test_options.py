from __future__ import annotations

import re
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st
from invocation import Cli

from cudakit.bench.alloc import DRIVER_ALLOCATORS
from cudakit.bench.copy import DIRECTIONS
from cudakit.bench.graph import STEPS, TOPOLOGIES
from cudakit.bench.launch import CALLS
from cudakit.bench.memory import OPERATIONS
from cudakit.bench.report.notes import notes
from cudakit.cli.bench.options import parse_counts, parse_names, parse_sizes

MIB = 1 << 20


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("64KiB", (65536,)),
        ("1MiB, 3MiB,", (MIB, 3 * MIB)),
        ("1MiB..4MiB", (MIB, 2 * MIB, 4 * MIB)),
        ("3MiB..10MiB", (3 * MIB, 6 * MIB)),
        ("1MiB..1MiB", (MIB,)),
        ("4MiB,1MiB..8MiB", (4 * MIB, MIB, 2 * MIB, 8 * MIB)),
        ("0", (0,)),  # which the Spec refuses
    ],
)
def test_sizes_are_list_and_doubling_ranges(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_sizes(text) == sizes


@given(st.integers(1, 1 << 50), st.integers(0, 60))
def test_size_range_starts_at_low_and_stays_within_high(low: int, doublings: int) -> None:
    sizes = parse_sizes(f"{low}..{low << doublings}")

    assert sizes[0] == low
    assert sizes[-1] == low << doublings
    assert len(sizes) == doublings + 1


@pytest.mark.parametrize(
    "text", ["", ",", "1MiB..", "..1MiB", "2MiB..1MiB", "0..1MiB", "-1", "x", "1..2..3"]
)
def test_invalid_sizes_are_rejected(text: str) -> None:
    with pytest.raises(click.BadParameter, match=r"write for example|empty list"):
        parse_sizes(text)


def test_lists_have_no_duplicates() -> None:
    assert parse_names(" read,copy,,read ") == ("read", "copy")
    assert parse_counts("1, 10,1") == (1, 10)
    with pytest.raises(click.BadParameter):
        parse_counts("1,ten")


@pytest.mark.parametrize(
    ("command", "choices"),
    [
        ("memory", OPERATIONS),
        ("copy", DIRECTIONS),
        ("launch", CALLS),
        ("alloc", DRIVER_ALLOCATORS),
        ("graph", (*TOPOLOGIES, *STEPS)),
    ],
)
def test_help_names_all_choices_and_fits_80_columns(
    command: str, choices: tuple[str, ...], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    run = cli("bench", command, "--help")
    # A line may be broken behind a hyphen.
    text = "".join(run.stdout.split())

    assert run.exit_code == 0
    assert [name for name in choices if name not in text] == []
    assert max(map(len, run.stdout.splitlines())) <= 80


def test_options_in_remedies_exist(cli: Cli) -> None:
    source = Path(notes.__code__.co_filename).read_text(encoding="utf-8")
    named = set(re.findall(r"--[a-z]+", source))
    stdout = "".join(
        cli("bench", *command, "--help").stdout for command in (["memory"], ["copy"], ["suite"], [])
    )

    assert {"--timeout", "--budget", "--cache", "--quick"} <= named
    assert [option for option in named if f"{option} " not in stdout] == []


def test_bench_without_command_shows_help_with_exit_code_2(cli: Cli) -> None:
    run = cli("bench")

    assert (run.exit_code, run.stdout) == (2, "")
    assert "Commands:" in run.stderr
