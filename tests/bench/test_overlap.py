""""""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from cudakit.bench.case import Rule
from cudakit.bench.overlap import (
    DIRECTIONS,
    GEMM_DURING_COPY,
    MEASUREMENTS,
    OverlapSpec,
    OverlapWorkload,
    copy_overlaps,
    overlap_answers,
    overlap_share,
)
from cudakit.bench.pipeline import run
from cudakit.bench.result import BenchResult, CopyOverlap
from cudakit.bench.timer import MAX_QUEUED
from cudakit.errors import InputError
from cudakit.gpu.api import Gpu, Ptr, Stream
from cudakit.gpu.open import open_gpu
from cudakit.gpu.sim import Sim
from cudakit.report.document import Note, Ratio, Table, Text
from cudakit.units import Unavailable

KIB = 1 << 10
FAILED = Unavailable("it failed")


def measure(gpu: Gpu, *directions: str, **options: Any) -> BenchResult:
    return run(OverlapSpec(directions=directions, rounds=1, **options), gpu)


@pytest.mark.parametrize("direction", ["h2d", "d2h", "d2d"])
def test_copy_of_pinned_or_device_memory_overlaps_with_gemm(direction: str) -> None:
    with closing(Sim()) as gpu:
        free_bytes = gpu.memory_info().free_bytes
        result = measure(gpu, direction)

        assert gpu.memory_info().free_bytes == free_bytes
    (overlap,) = result.overlaps
    assert [case.axes["measurement"] for case in result.results] == list(MEASUREMENTS)
    assert all(case.verified for case in result.results)
    assert overlap.overlap == pytest.approx(1.0)
    assert overlap.copy_slowdown == pytest.approx(0.0)
    assert overlap.gemm_slowdown == pytest.approx(0.0)


@pytest.mark.parametrize("direction", ["pageable-h2d", "pageable-d2h"])
def test_copy_of_pageable_memory_does_not_overlap_with_later_gemm(direction: str) -> None:
    with closing(Sim()) as gpu:
        result = measure(gpu, direction)

    (overlap,) = result.overlaps
    assert GEMM_DURING_COPY not in [case.axes["measurement"] for case in result.results]
    assert overlap.overlap == pytest.approx(0.0)
    assert overlap.copy_slowdown == pytest.approx(0.0)
    assert isinstance(overlap.gemm_slowdown, Unavailable)
    assert "blocks the host" in overlap.gemm_slowdown.reason


def test_copies_and_gemms_take_about_the_same_time() -> None:
    with closing(Sim()) as gpu:
        overlaps = measure(gpu, "h2d", sizes_bytes=(256 * KIB, 512 * KIB)).overlaps

    assert [overlap.size_bytes for overlap in overlaps] == [256 * KIB, 512 * KIB]
    for overlap in overlaps:
        assert overlap.copy_s == pytest.approx(overlap.gemm_s, rel=0.25)


def test_limited_number_of_short_copies_has_a_shorter_time_of_both() -> None:
    with closing(Sim()) as gpu:
        (case,) = OverlapSpec(directions=("h2d",), sizes_bytes=(4 * KIB,)).cases(gpu)
        assert isinstance(case.workload, OverlapWorkload)
        repetitions = case.workload.repetitions
        repetitions.max_repetitions = 3
        (overlap,) = run(OverlapSpec(rounds=1), gpu, cases=(case,)).overlaps

    assert max(repetitions.copies, repetitions.gemms) <= 3
    assert not isinstance(overlap.gemm_slowdown, Unavailable)


def test_rates_are_those_of_all_copies_and_gemms() -> None:
    with closing(Sim()) as gpu:
        (to_device, within_device) = measure(gpu, "h2d", "d2d").overlaps

    for overlap, factor in ((to_device, 1), (within_device, 2)):
        assert not isinstance(overlap.copy_s, Unavailable)
        moved_bytes = factor * overlap.copies * overlap.size_bytes
        assert overlap.copy_bytes_per_s == pytest.approx(moved_bytes / overlap.copy_s)
    assert not isinstance(to_device.gemm_s, Unavailable)
    flop = to_device.gemms * 2 * 64**3
    assert to_device.gemm_flop_per_s == pytest.approx(flop / to_device.gemm_s)


class DeviceWithLostCopies(Sim):
    """A device on which copies of 256 KiB to the device do nothing."""

    def copy(self, dst: Ptr, src: Ptr, size_bytes: int, stream: Stream) -> None:
        if size_bytes != 256 * KIB or stream == 0:
            super().copy(dst, src, size_bytes, stream)


def test_copy_that_does_nothing_has_no_time() -> None:
    with closing(DeviceWithLostCopies()) as gpu:
        (overlap,) = measure(gpu, "h2d").overlaps

    assert isinstance(overlap.copy_s, Unavailable)
    assert isinstance(overlap.both_s, Unavailable)
    assert isinstance(overlap.overlap, Unavailable)
    assert not isinstance(overlap.gemm_s, Unavailable)


def test_measurement_fails_if_concurrent_work_ends_first() -> None:
    with closing(Sim()) as gpu:
        (case,) = OverlapSpec(directions=("h2d",), rounds=1).cases(gpu)
        assert isinstance(case.workload, OverlapWorkload)
        copies = MAX_QUEUED - 8  # Eight GEMMs are the most that fit in the queue beside them.
        case.workload.repetitions.copies, case.workload.repetitions.gemms = copies, 1
        (overlap,) = run(OverlapSpec(), gpu, cases=(case,)).overlaps

    assert isinstance(overlap.copy_slowdown, Unavailable)
    assert "the GEMMs ended before the copies" in overlap.copy_slowdown.reason
    assert overlap.gemm_slowdown == pytest.approx(0.0)


def test_concurrent_work_that_ends_first_is_made_longer() -> None:
    rule = Rule(min_samples=20, min_time_s=0.0, timeout_s=1.0)
    spec = OverlapSpec(directions=("h2d",), rounds=1, rule=rule)
    with closing(Sim()) as gpu:
        (case,) = spec.cases(gpu)
        assert isinstance(case.workload, OverlapWorkload)
        # A copy takes about as long as six GEMMs, and at first three run beside it.
        case.workload.repetitions.copies, case.workload.repetitions.gemms = 1, 1
        (overlap,) = run(spec, gpu, cases=(case,)).overlaps

    assert overlap.copy_slowdown == pytest.approx(0.0)


def test_missing_measurement_makes_figures_unavailable() -> None:
    with closing(Sim()) as gpu:
        results = measure(gpu, "h2d").results
    without_both = tuple(case for case in results if case.axes["measurement"] != "both")

    (overlap,) = copy_overlaps(without_both, ())

    assert overlap.both_s == Unavailable("the measurement both was not finished")
    assert overlap.overlap == overlap.both_s
    assert overlap.copy_slowdown == pytest.approx(0.0)


def test_failed_measurement_makes_slowdown_unavailable() -> None:
    with closing(Sim()) as gpu:
        results = measure(gpu, "h2d").results
    failed = tuple(
        replace(case, median_s=FAILED) if case.axes["measurement"] == "copy-during-gemm" else case
        for case in results
    )

    (overlap,) = copy_overlaps(failed, ())

    assert overlap.copy_slowdown == FAILED
    assert overlap.overlap == pytest.approx(1.0)


def test_interrupted_run_has_every_direction_with_the_reason_of_missing_figures() -> None:
    def interrupt_second_case(_: str, fraction: float) -> None:
        if fraction > 1 / 3:
            raise KeyboardInterrupt

    with closing(Sim()) as gpu:
        spec = OverlapSpec(directions=("h2d", "d2h", "pageable-h2d"), rounds=1)
        result = run(spec, gpu, interrupt_second_case)

    assert not result.complete
    assert [overlap.direction for overlap in result.overlaps] == ["h2d", "d2h", "pageable-h2d"]
    first_overlap, _, last_overlap = result.overlaps
    assert first_overlap.overlap == pytest.approx(1.0)
    reason = Unavailable("the run was interrupted before this case")
    assert (last_overlap.copy_s, last_overlap.overlap) == (reason, reason)
    assert isinstance(last_overlap.gemm_slowdown, Unavailable)


def test_every_direction_has_the_first_size_before_the_second_size() -> None:
    sizes_bytes = (256 * KIB, 512 * KIB)
    with closing(Sim()) as gpu:
        cases = OverlapSpec(directions=("h2d", "d2d"), sizes_bytes=sizes_bytes).cases(gpu)

    axes_of_cases = [case.workload.axes for case in cases]
    assert [(axes["direction"], axes["size_bytes"]) for axes in axes_of_cases] == [
        (direction, size_bytes) for size_bytes in sizes_bytes for direction in ("h2d", "d2d")
    ]


@pytest.mark.parametrize(
    ("copy_s", "gemm_s", "both_s", "share"),
    [
        (1.0, 1.0, 1.0, 1.0),
        (1.0, 1.0, 2.0, 0.0),
        (1.0, 3.0, 3.5, 0.5),
        (3.0, 1.0, 3.5, 0.5),
        (1.0, 1.0, 2.5, 0.0),
        (1.0, 1.0, 0.9, 1.0),
    ],
)
def test_overlap_is_the_saved_share_of_the_shorter_work(
    copy_s: float, gemm_s: float, both_s: float, share: float
) -> None:
    assert overlap_share(copy_s, gemm_s, both_s) == pytest.approx(share)


@pytest.mark.parametrize("missing", range(3))
def test_overlap_of_missing_time_is_unavailable(missing: int) -> None:
    times: list[Any] = [1.0, 1.0, 1.0]
    times[missing] = FAILED

    assert overlap_share(*times) == FAILED


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"directions": ("peer",)}, "--overlap cannot be measured for --directions peer"),
        ({"directions": ()}, "no direction was given"),
        ({"sizes_bytes": (3,)}, "not a multiple of 4"),
    ],
)
def test_invalid_option_is_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        OverlapSpec(**options)


def test_case_counts_memory_of_all_measurements() -> None:
    with closing(Sim()) as gpu:
        (pinned, pageable) = OverlapSpec(
            directions=("h2d", "pageable-h2d"), sizes_bytes=(1 << 20,)
        ).cases(gpu)

    assert (pinned.host_bytes, pageable.host_bytes) == (5 << 20, 4 << 20)
    assert pinned.method.blocker
    assert not pageable.method.blocker


@pytest.mark.gpu
def test_copies_of_pinned_memory_overlap_on_gpu_and_pageable_ones_do_not() -> None:
    pytest.importorskip("nvmath")
    with closing(open_gpu("cuda")) as gpu:
        rule = Rule(min_samples=20, min_time_s=0.05, timeout_s=0.5)
        options: dict[str, Any] = {"sizes_bytes": (32 << 20,), "warmup_s": 0.05, "rule": rule}
        result = measure(gpu, *DIRECTIONS, **options)

    assert all(case.verified for case in result.results), [
        (case.axes, case.median_s) for case in result.results if not case.verified
    ]
    shares = {overlap.direction: overlap.overlap for overlap in result.overlaps}
    assert all(isinstance(share, float) for share in shares.values())
    assert min(shares["h2d"], shares["d2h"]) > 0.8  # type: ignore[type-var]
    assert max(shares["pageable-h2d"], shares["pageable-d2h"]) < 0.2  # type: ignore[type-var]


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
