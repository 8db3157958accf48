"""Baselines: which races equal a known one, and damaged files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sanitize.sample_races import PREFETCH, TRAIN_STEP, exact_operation, found_race, kernel, side

from cudakit.errors import InputError, UsageError
from cudakit.sanitize.baseline import (
    Baseline,
    BaselineMatcher,
    Suppression,
    format_baseline,
    identify,
    load_baseline,
    parse_pattern,
    suppressions,
)
from cudakit.sanitize.races import FoundRace, RaceKind, Side

ROOT = Path("/home/user")
RACE = found_race()


def with_lines_moved(side: Side, lines: int) -> Side:
    return replace(
        side, stack=tuple(replace(frame, line=frame.line + lines) for frame in side.stack)
    )


def in_checkout(side: Side, directory: str) -> Side:
    return replace(
        side,
        stack=tuple(
            replace(frame, filename=frame.filename.replace("/home/user", directory))
            for frame in side.stack
        ),
    )


def baseline_of(*races: FoundRace, root: Path = ROOT) -> BaselineMatcher:
    return BaselineMatcher(
        "races.json", Baseline(tuple(identify(race, root=root) for race in races)), root=root
    )


@given(lines=st.integers(1, 1000), address=st.integers(0, 2**48), process=st.integers(1, 2**22))
def test_race_is_known_after_lines_addresses_and_process_have_changed(
    lines: int, address: int, process: int
) -> None:
    later = replace(
        RACE,
        current=with_lines_moved(RACE.current, lines),
        previous=with_lines_moved(RACE.previous, lines),
        address=address,
        process=process,
    )

    assert baseline_of(RACE).find(later)


def test_race_is_known_in_another_checkout() -> None:
    elsewhere = replace(
        RACE,
        current=in_checkout(RACE.current, "/builds/1"),
        previous=in_checkout(RACE.previous, "/builds/1"),
    )
    known = Baseline((identify(RACE, root=ROOT),))

    assert BaselineMatcher("races.json", known, root=Path("/builds/1")).find(elsewhere)
    assert not BaselineMatcher("races.json", known, root=ROOT).find(elsewhere)


@pytest.mark.parametrize(
    "other",
    [
        replace(RACE, kind=RaceKind.WRITE_AFTER_WRITE),
        replace(RACE, current=replace(RACE.current, operation="copy of another kind")),
        replace(RACE, current=RACE.previous, previous=RACE.current),
        replace(RACE, current=replace(RACE.current, stack=RACE.current.stack[-1:])),
    ],
    ids=["kind", "operation", "order of the sides", "functions"],
)
def test_race_that_differs_is_new(other: FoundRace) -> None:
    assert not baseline_of(RACE).find(other)


def test_baseline_file_has_each_race_once_in_a_fixed_order(tmp_path: Path) -> None:
    other = replace(RACE, kind=RaceKind.WRITE_AFTER_WRITE)
    path = tmp_path / "races.json"

    text = format_baseline([RACE, other, RACE], root=ROOT)
    path.write_text(text)

    assert text == format_baseline([other, RACE], root=ROOT)
    assert len(load_baseline(str(path)).races) == 2
    assert "/home/user" not in text


def test_rewritten_baseline_keeps_known_races_that_occurred() -> None:
    matcher = baseline_of(RACE)
    use = matcher.use([identify(RACE, root=ROOT)], 3)

    text = format_baseline([], use, root=ROOT)

    assert (use.count, use.absent) == (3, 0)
    assert len(json.loads(text)["races"]) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\xff\xfe", "is not a baseline of races: it is not text"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[]", "no schema"),
        (b'{"schema": "cudakit.sanitize.baseline/2", "races": []}', "baseline/2"),
        (
            b'{"schema": "cudakit.sanitize/1", "races": []}',
            "is a saved report of races, not a baseline of races",
        ),
        (b'{"schema": "cudakit.sanitize.baseline/1"}', "is damaged"),
        (b'{"schema": "cudakit.sanitize.baseline/1", "races": [{"kind": "x"}]}', "is damaged"),
    ],
)
def test_damaged_baseline_is_one_error(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "races.json"
    path.write_bytes(content)

    with pytest.raises(InputError, match=message):
        load_baseline(str(path))


def test_missing_baseline_is_an_error() -> None:
    with pytest.raises(InputError, match=r"races\.json does not exist"):
        load_baseline("/nonexistent/races.json")


# --- Suppressions: matching and syntax -------------------------------------------------------------

KERNEL = side(kernel())
COPY = side(exact_operation())


@pytest.mark.parametrize(
    "pattern",
    [
        "kernel:*vectorized_elementwise*",  # the demangled name
        "kernel:at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float>, …>",  # the short name
        "kernel:_ZN2at6native29*",  # the mangled name
        "site:train.py",
        "site:/home/user/train/train.py",
        "site:train/*.py",
        "site:train.py:step",
        "site:*:st*",
        "site:torch/nn/modules/linear.py:forward",
    ],
)
def test_pattern_matches_kernel_or_frame_of_a_side(pattern: str) -> None:
    assert parse_pattern(pattern).covers(KERNEL)


@pytest.mark.parametrize(
    "pattern",
    ["kernel:add", "kernel:vectorized*", "site:rain.py", "site:train.py:ste", "site:other.py"],
)
def test_pattern_covers_only_matching_races(pattern: str) -> None:
    assert not parse_pattern(pattern).covers(KERNEL)


def test_pattern_needs_to_match_one_side_only() -> None:
    assert parse_pattern("kernel:*elementwise*").covers(COPY, KERNEL)
    assert not parse_pattern("kernel:*").covers(COPY)
    assert (PREFETCH, TRAIN_STEP) == (1, 2)


@pytest.mark.parametrize(
    "pattern", ["", "loader.py", "kernel:", "kernel", "site:", "site::f", "site:a.py:", "race:x"]
)
def test_invalid_pattern_is_refused_in_one_line(pattern: str) -> None:
    with pytest.raises(UsageError) as caught:
        suppressions([pattern])

    assert caught.value.message == f"--suppress: {pattern!r} is not a suppression pattern"
    assert "kernel:GLOB" in caught.value.hint


def test_suppression_file_has_one_pattern_per_line_and_comments(tmp_path: Path) -> None:
    file = tmp_path / "known.txt"
    file.write_text(
        "# ours\n\nkernel:nccl*  # by design\nsite:a.py:{lambda()#1}\n", encoding="utf-8"
    )

    assert suppressions(["site:b.py", f"@{file}"]) == (
        Suppression("site:b.py", "--suppress", file="b.py"),
        Suppression("kernel:nccl*", f"{file}:3", kernel="nccl*"),
        Suppression("site:a.py:{lambda()#1}", f"{file}:4", file="a.py", function="{lambda()#1}"),
    )


def test_error_names_the_invalid_line(tmp_path: Path) -> None:
    file = tmp_path / "known.txt"
    file.write_text("kernel:a\nnonsense\n", encoding="utf-8")

    with pytest.raises(UsageError, match=r"known\.txt:2: 'nonsense' is not a suppression"):
        suppressions([f"@{file}"])


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "does not exist"), (b"\xff\xfe", "is not a file of suppressions: it is not text")],
)
def test_error_names_the_unreadable_file(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    file = tmp_path / "known.txt"
    if content is not None:
        file.write_bytes(content)

    with pytest.raises((InputError, UsageError), match=f"{file}'? {reason}"):
        suppressions([f"@{file}"])


def test_endless_file_of_suppressions_is_rejected() -> None:
    with pytest.raises(InputError, match="/dev/zero is larger than 256 MiB"):
        suppressions(["@/dev/zero"])
