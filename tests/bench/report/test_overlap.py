from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cudakit.bench.report.overlap import overlap_answers
from cudakit.bench.result import CopyOverlap
from cudakit.report.document import Note, Ratio, Table, Text
from cudakit.units import Unavailable

PINNED = CopyOverlap(
    direction="h2d",
    size_bytes=256 << 20,
    copies=1,
    gemms=27,
    copy_s=4.8e-3,
    gemm_s=5e-3,
    both_s=5.144e-3,
    overlap=0.97,
    copy_during_gemm_s=4.85e-3,
    gemm_during_copy_s=5.15e-3,
    copy_slowdown=0.0104,
    gemm_slowdown=0.03,
    copy_bytes_per_s=55e9,
    gemm_flop_per_s=750e12,
)
BLOCKED = Unavailable("the host is blocked")
PAGEABLE = replace(PINNED, direction="pageable-h2d", overlap=0.01, gemm_slowdown=BLOCKED)


def notes(*overlaps: CopyOverlap) -> list[Note]:
    return [node for node in overlap_answers(overlaps) if isinstance(node, Note)]


def test_answer_has_overlap_and_slowdowns() -> None:
    (note,) = notes(PINNED)

    assert note == Note(
        "ok",
        "A copy from pinned host memory to the device overlaps 97% with a GEMM; the GEMM runs 3% slower, "
        "the copy 1% slower.",
    )


@pytest.mark.parametrize(
    ("changes", "level", "end"),
    [
        ({"copy_slowdown": 0.001, "gemm_slowdown": -0.004}, "ok", "GEMM; both run at full speed."),
        ({"gemm_slowdown": -0.02}, "ok", "the GEMM runs 2% faster, the copy 1% slower."),
        ({"copy_slowdown": 0.0}, "ok", "the GEMM runs 3% slower, the copy at full speed."),
        ({"gemm_slowdown": BLOCKED}, "ok", "with a GEMM; the copy runs 1% slower."),
        ({"overlap": 0.7}, "info", "the copy 1% slower."),
        ({"overlap": 0.3}, "warn", "the copy 1% slower."),
        ({"direction": "d2d"}, "ok", "the copy 1% slower."),
    ],
)
def test_answer_describes_changes(changes: dict[str, Any], level: str, end: str) -> None:
    (note,) = notes(replace(PINNED, **changes))

    assert note.level == level
    assert note.text.endswith(end)


def test_pageable_memory_is_explained_once() -> None:
    first, second, reason = notes(PAGEABLE, replace(PAGEABLE, direction="pageable-d2h"))

    assert (first.level, second.level) == ("warn", "warn")
    assert first.text.endswith("overlaps 1% with a GEMM that is launched after it.")
    assert "blocks the host" in reason.text
    assert "cudakit.pin" in reason.remedies[0]


def test_pageable_memory_that_overlaps_is_not_a_problem() -> None:
    (note,) = notes(replace(PAGEABLE, overlap=0.95))

    assert note.level == "ok"


def test_several_sizes_are_named() -> None:
    first, second = notes(PINNED, replace(PINNED, size_bytes=1 << 20))

    assert "A copy of 256 MiB from" in first.text
    assert "A copy of 1.00 MiB from" in second.text


def test_missing_overlap_is_an_error_with_its_reason() -> None:
    (note,) = notes(replace(PINNED, overlap=Unavailable("wrong results")))

    assert note.level == "error"
    assert note.text.endswith("the overlap with a GEMM is unknown: wrong results.")


def test_table_has_a_row_per_direction() -> None:
    (table,) = (node for node in overlap_answers([PINNED, PAGEABLE]) if isinstance(node, Table))

    assert [row[0] for row in table.rows] == [Text("h2d"), Text("pageable-h2d")]
    assert table.rows[0][5:8] == (Ratio(0.97), Ratio(0.0104), Ratio(0.03))
    assert table.rows[1][7] == Text("-")


def test_other_benches_have_no_answer() -> None:
    assert list(overlap_answers([])) == []
