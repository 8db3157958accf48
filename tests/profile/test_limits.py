"""Copies, memsets and launches beside the limits that a bench measured."""

from __future__ import annotations

import pytest
from profile_synthetic import MS, US, Program

from cudakit.profile.analysis import analyze
from cudakit.profile.limits import MeasuredLimits, compare_limits
from cudakit.profile.present.report import report
from cudakit.profile.result import ProfileResult
from cudakit.report import console

MIB = 1 << 20


def _compared(program: Program, limits: MeasuredLimits) -> ProfileResult:
    return compare_limits(analyze([program.activities()]).result, limits)


def test_launches_are_compared_with_back_to_back_launches() -> None:
    program = Program()
    for _ in range(10):
        program.kernel("short", 2 * US)
        program.kernel("long", 18 * US)
    (limit,) = _compared(program, MeasuredLimits(launch_s=2e-6)).launch_limits
    (device,) = analyze([program.activities()]).result.devices
    assert limit.interval_ns == pytest.approx(device.measured.length_ns / 20)
    assert limit.share == pytest.approx(2000 / limit.interval_ns)
    assert (limit.short_kernels, limit.short_kernels_share) == (10, pytest.approx(0.1))


def test_kernels_of_graphs_are_not_launches() -> None:
    program = Program()
    program.graph(["a", "b", "c"], 5 * US)
    assert not _compared(program, MeasuredLimits(launch_s=2e-6)).launch_limits


def test_memsets_are_compared_with_writes_of_a_similar_size() -> None:
    program = Program()
    program.fill(4 * MIB, 4 * US)
    limits = MeasuredLimits(write_rates=[(MIB, 9e12), (4 * MIB, 2e12), (1 << 30, 4e12)])
    (limit,) = _compared(program, limits).limits
    assert limit.limit_bytes_per_s == 2e12
    assert limit.share == pytest.approx(4 * MIB / 4e-6 / 2e12)


def test_small_memsets_are_not_compared() -> None:
    program = Program()
    program.fill(4096, 2 * US)
    assert not _compared(program, MeasuredLimits(write_rates=[(MIB, 9e12)])).limits


def test_report_says_that_rates_of_kernels_are_unknown() -> None:
    program = Program()
    program.kernel("short", 2 * US)
    program.kernel("long", 1 * MS)
    result = _compared(program, MeasuredLimits(launch_s=2e-6))
    text = console.render(report(result), width=120, color=False, ascii_only=True, height=100)
    text = " ".join(text.split())
    assert "mean interval of kernel launches" in text
    assert (
        "Interval of launches: the measured time divided by the number of kernel launches." in text
    )
    assert "launch of an empty kernel: 1 run, 0.2% of the GPU time." in text
    assert "Bytes and FLOPs of kernels are not recorded" in text


def test_limits_of_several_devices_name_the_device() -> None:
    programs = [Program(process=process) for process in (100, 200)]
    for program in programs:
        program.kernel("k", 10 * US)
    activities = [program.activities() for program in programs]
    compared = compare_limits(analyze(activities).result, MeasuredLimits(launch_s=2e-6))
    text = console.render(report(compared), width=100, color=False)
    names = [
        line.split("mean interval of")[0].strip()
        for line in text.splitlines()
        if "mean interval of" in line
    ]
    assert names == ["process 100 cuda:0", "process 200 cuda:0"]


def test_share_of_short_kernels_is_that_of_all_devices() -> None:
    programs = [Program(process=process) for process in (100, 200)]
    for program, long_time in zip(programs, (18 * US, 78 * US), strict=True):
        program.kernel("short", 2 * US)
        program.kernel("long", long_time)
    activities = [program.activities() for program in programs]
    compared = compare_limits(analyze(activities).result, MeasuredLimits(launch_s=2e-6))
    text = " ".join(console.render(report(compared), width=200, color=False).split())
    assert "launch of an empty kernel: 2 runs, 4.0% of the GPU time of all devices." in text
    assert "Copies and memsets with a mean size below 1 MiB are not compared" in text
    assert "Share of launches: the limit divided by the profile" in text


def test_exceeded_limit_is_explained() -> None:
    program = Program()
    program.fill(4 * MIB, 4 * US)
    explanation = "A share above 100% means that the limit does not fit"
    for rate, is_explained in ((0.5e12, True), (2e12, False)):
        result = _compared(program, MeasuredLimits(write_rates=[(MIB, rate)]))
        text = console.render(report(result), width=200, color=False)
        assert (explanation in text) is is_explained
