"""Each finding holds for a program with its cause and not for the fixed one; estimates fit the schedule."""

from __future__ import annotations

import pytest
from profile_synthetic import MS, US, Program, activities_of

from cudakit.profile.analysis import analyze
from cudakit.profile.findings import MeasuredLimits, compare_limits
from cudakit.profile.report import brief_sentences, report, title
from cudakit.profile.result import Finding, ProfileResult
from cudakit.report import console
from cudakit.report.document import Note
from cudakit.trace.kinds import Direction, MemoryKind

STEPS = 10


def _result(program: Program) -> ProfileResult:
    return analyze([program.activities()]).result


def _findings(program: Program) -> dict[str, Finding]:
    return {finding.rule: finding for finding in _result(program).findings}


def _step_ns(program: Program) -> int:
    return _result(program).devices[0].steps.median_ns


def _assert_saving(slow: Program, fixed: Program, rule: str) -> Finding:
    """Check that a finding's share is within a third of the real one, and absent in the fixed program."""
    finding = _findings(slow)[rule]
    saving = 1 - _step_ns(fixed) / _step_ns(slow)
    assert finding.saving_share == pytest.approx(saving, rel=1 / 3)
    assert rule not in _findings(fixed)
    return finding


def _small_kernels(*, graphed: bool) -> Program:
    program = Program()
    for _ in range(STEPS):
        with program.range("step"):
            if graphed:
                program.graph(["k"] * 100, 3 * US, line=10)
            else:
                for _ in range(100):
                    program.kernel("k", 3 * US, line=10)
                    program.host(10 * US)
    return program


def test_slow_launches_are_found_and_a_graph_saves_them() -> None:
    finding = _assert_saving(
        _small_kernels(graphed=False), _small_kernels(graphed=True), "launch-bound"
    )
    assert "100 kernels per step" in finding.sentence
    assert any("CUDA graph" in action for action in finding.actions)


def _layers(*, reads_results: bool) -> Program:
    program = Program()
    for _ in range(STEPS):
        with program.range("step"):
            for _ in range(20):
                program.kernel("gemm", 60 * US, line=40)
                if reads_results:
                    program.copy(
                        4, 1 * US, line=41, direction=Direction.DEVICE_TO_HOST,
                        host=MemoryKind.PAGEABLE,
                    )  # fmt: skip
                    program.synchronize(line=41)
                program.host(20 * US)
    return program


def test_waits_in_the_loop_are_found_at_their_line() -> None:
    slow = _layers(reads_results=True)
    finding = _assert_saving(slow, _layers(reads_results=False), "host-wait")
    assert "train.py:41" in finding.sentence
    assert finding.stack[finding.site].line == 41


def test_wait_that_leaves_the_queue_full_is_no_finding() -> None:
    program = Program()
    for _ in range(STEPS):
        with program.range("step"):
            for _ in range(20):
                program.kernel("gemm", 1 * MS, line=40)
            program.synchronize(line=41)
    assert _findings(program) == {}


def _loop_with_loading(*, load_ns: int) -> Program:
    program = Program()
    for _ in range(STEPS):
        program.host(load_ns)
        with program.range("step"):
            program.copy(1 << 20, 50 * US, line=7)
            program.kernel("gemm", 4 * MS, line=8)
            program.synchronize(line=9)
    return program


def test_data_loading_is_found_at_the_copy() -> None:
    slow = _loop_with_loading(load_ns=6 * MS)
    finding = _assert_saving(slow, _loop_with_loading(load_ns=0), "data-loading")
    assert "train.py:7" in finding.sentence


def _loop_with_allocation(*, allocates: bool) -> Program:
    program = Program()
    for _ in range(STEPS):
        with program.range("step"):
            for _ in range(5):
                program.kernel("gemm", 100 * US, line=8)
                if allocates:
                    program.synchronize_in("cudaFree", line=9)
                    program.call("cudaMalloc", 150 * US, line=9)
    return program


def test_driver_allocations_in_the_loop_are_found() -> None:
    slow = _loop_with_allocation(allocates=True)
    finding = _assert_saving(slow, _loop_with_allocation(allocates=False), "allocation")
    assert "10 times per step, mainly at train.py:9 (cudaFree). " in finding.sentence


def test_driver_allocations_before_the_loop_are_no_finding() -> None:
    program = Program()
    for _ in range(20):
        program.call("cudaMalloc", 1 * MS, line=3)
    for _ in range(STEPS):
        with program.range("step"):
            program.kernel("gemm", 1 * MS, line=8)
    assert "allocation" not in _findings(program)


def _loop_with_copies(*, host: MemoryKind, duration_ns: int, gpu: str = "NVIDIA H200") -> Program:
    program = Program(gpu=gpu)
    for _ in range(STEPS):
        with program.range("step"):
            program.copy(64 << 20, duration_ns, line=7, host=host)
            program.kernel("gemm", 2 * MS, line=8)
    return program


def test_pageable_copies_are_found_and_pinned_ones_are_not() -> None:
    slow = _loop_with_copies(host=MemoryKind.PAGEABLE, duration_ns=9 * MS)
    fixed = _loop_with_copies(host=MemoryKind.PINNED, duration_ns=2 * MS)
    finding = _assert_saving(slow, fixed, "pageable-copies")
    assert "7.5 GB/s" in finding.sentence


@pytest.mark.parametrize(
    ("gpu", "version"),
    [("NVIDIA H100 80GB HBM3", "5.0"), ("NVIDIA A100-SXM4-40GB", "4.0"), ("", "4.0")],
)
def test_pageable_copies_are_compared_with_the_link_of_the_gpu(gpu: str, version: str) -> None:
    program = _loop_with_copies(host=MemoryKind.PAGEABLE, duration_ns=9 * MS, gpu=gpu)
    assert f"PCIe {version}" in _findings(program)["pageable-copies"].estimate


def _two_streams(*, serial: bool) -> Program:
    program = Program(launch_ns=1 * US)
    end = 0
    for _ in range(STEPS):
        with program.range("step"):
            for _ in range(10):
                for stream in (1, 2):
                    after = end if serial else 0
                    end = program.kernel("spin", 100 * US, stream=stream, blocks=4, after_ns=after)
    return program


def test_streams_that_never_overlap_are_found_if_their_kernels_are_small() -> None:
    finding = _assert_saving(
        _two_streams(serial=True), _two_streams(serial=False), "serial-streams"
    )
    assert finding.sentence.startswith("2 streams")


def _gemms(*, batched: bool) -> Program:
    program = Program(launch_ns=2 * US)
    for _ in range(STEPS):
        with program.range("step"):
            if batched:
                program.kernel("sgemm_batched", 20 * US, blocks=256, line=8)
            else:
                for _ in range(64):
                    program.kernel("sgemm_64x64", 9 * US, blocks=4, line=8)
            program.kernel("softmax", 30 * US, line=9)
    return program


def test_small_gemms_in_a_row_are_found() -> None:
    finding = _assert_saving(_gemms(batched=False), _gemms(batched=True), "small-gemms")
    assert "64 in a row" in finding.sentence


def test_lost_events_forbid_an_estimate() -> None:
    program = _small_kernels(graphed=False)
    program.lose("kernels: the buffers of CUPTI were full", 12)
    result = _result(program)
    assert result.gaps == {"kernels: the buffers of CUPTI were full": 12}
    assert [finding.saving_share for finding in result.findings] == [None]


def test_reduction_of_a_split_gemm_is_a_part_of_it() -> None:
    program = Program(launch_ns=2 * US)
    for _ in range(STEPS):
        with program.range("step"):
            for _ in range(32):
                program.kernel("sgemm_64x64_splitK", 9 * US, blocks=4, line=8)
                program.kernel("splitKreduce_kernel", 3 * US, blocks=4, line=8)
            program.kernel("softmax", 30 * US, line=9)
    assert "32 in a row" in _findings(program)["small-gemms"].sentence


def test_long_host_time_before_the_first_step_is_no_data_loading() -> None:
    program = Program()
    program.kernel("set-up", 10 * US)
    program.host(5_000 * MS)
    for _ in range(STEPS):
        with program.range("step"):
            program.copy(1 << 20, 50 * US, line=7)
            program.kernel("gemm", 4 * MS, line=8)
    recorded = _result(program).devices[0].recorded
    assert recorded.idle.data_loading_ns == 0
    assert recorded.idle.other_host_ns > 4_000 * MS


def test_findings_of_several_devices_at_one_line_are_one_note() -> None:
    slow, slower = _small_kernels(graphed=False), Program(process=200)
    for _ in range(STEPS):
        with slower.range("step"):
            for _ in range(100):
                slower.kernel("k", 3 * US, line=10)
                slower.host(30 * US)
    result = analyze(activities_of(slow, slower)).result
    assert len(result.findings) == 2
    (note,) = (
        line for line in brief_sentences(result) if isinstance(line, Note) and line.level == "warn"
    )
    assert note.text.startswith("process 200 cuda:0: Launch-bound")
    assert "Process 100 cuda:0 has the same problem" in note.text
    assert title(result).startswith("2 processes: GPU busy ")


# --- limits that a bench measured ------------------------------------------------------------------

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
