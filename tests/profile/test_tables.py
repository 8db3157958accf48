"""The tables of a device: kernels, lines, ranges, copies and streams."""

from __future__ import annotations

import pytest
from profile_synthetic import US, Program

from cudakit.profile import diff as diff
from cudakit.profile.analysis import analyze
from cudakit.profile.diff import compare
from cudakit.profile.result import Device
from cudakit.profile.tables import (
    DeviceLimits,
    grid_fill,
)
from cudakit.report import console
from cudakit.trace.kinds import Direction, MemoryKind


def _device(program: Program) -> Device:
    (device,) = analyze([program.activities()]).result.devices
    return device


def test_kernels_are_summed_by_name() -> None:
    program = Program()
    for duration in (10, 20, 60):
        program.kernel("gemm", duration * US, line=10, blocks=8)
    program.kernel("relu", 10 * US, line=11)
    gemm, relu = _device(program).kernels
    assert (gemm.name, gemm.calls, gemm.total_ns) == ("gemm", 3, 90 * US)
    assert (gemm.mean_ns, gemm.median_ns, gemm.blocks) == (30 * US, 20 * US, 8)
    assert (gemm.share, relu.share) == (0.9, 0.1)
    assert gemm.stack[gemm.site].line == 10
    assert gemm.consecutive == 3


def test_names_of_kernels_are_demangled() -> None:
    program = Program()
    program.kernel("_Z3addv", 10 * US)
    result = analyze([program.activities()], demangle=lambda _: "add()").result
    assert result.devices[0].kernels[0].name == "add()"


def test_lines_have_own_and_cumulative_time() -> None:
    program = Program()
    program.kernel("a", 10 * US, line=10)
    program.kernel("b", 30 * US, line=11)
    program.kernel("c", 5 * US)
    lines = {(line.frame.name, line.frame.line): line for line in _device(program).lines}
    assert lines["step", 11].own_ns == lines["step", 11].cumulative_ns == 30 * US
    assert (lines["<module>", 1].own_ns, lines["<module>", 1].cumulative_ns) == (0, 40 * US)
    assert lines["<module>", 1].share == pytest.approx(40 / 45)
    assert not any("site-packages" in line.frame.filename for line in _device(program).lines)


def test_kernels_of_a_graph_have_the_lines_of_their_capture() -> None:
    program = Program()
    program.graph(["a", "b"], 10 * US, line=5)
    lines = {line.frame.line for line in _device(program).lines if line.own_ns}
    assert lines == {1001, 1002}


def test_ranges_contain_the_work_of_inner_ranges() -> None:
    program = Program()
    with program.range("epoch 1"), program.range("forward", "torch"):
        program.kernel("a", 10 * US)
    with program.range("epoch 2"):
        program.kernel("b", 30 * US)
    ranges = {(row.domain, row.name): row.total_ns for row in _device(program).ranges}
    assert ranges == {("", "epoch #"): 40 * US, ("torch", "forward"): 10 * US}


def test_copies_are_divided_by_direction_and_host_memory() -> None:
    program = Program()
    program.copy(1_000_000, 100 * US, host=MemoryKind.PINNED)
    program.copy(1_000_000, 100 * US, host=MemoryKind.PINNED)
    program.copy(500_000, 100 * US, host=MemoryKind.PAGEABLE)
    program.copy(
        8, 2 * US, direction=Direction.DEVICE_TO_HOST, host=MemoryKind.PINNED
    )  # fmt: skip
    copies = {(row.direction, row.host): row for row in _device(program).copies}
    assert copies.keys() == {
        (Direction.HOST_TO_DEVICE, "pinned"),
        (Direction.HOST_TO_DEVICE, "pageable"),
        (Direction.DEVICE_TO_HOST, "pinned"),
    }
    pinned = copies[Direction.HOST_TO_DEVICE, "pinned"]
    assert (pinned.calls, pinned.size_bytes, pinned.bytes_per_s) == (2, 2_000_000, 1e10)


def test_overlap_of_copies_is_the_time_in_which_a_kernel_ran() -> None:
    program = Program()
    program.kernel("a", 60 * US, stream=1)
    program.copy(1_000, 100 * US, stream=2)
    device = _device(program)
    assert device.copies[0].overlapped_ns == device.copies_overlapped_ns == 55 * US - 0 * US


def test_streams_have_their_time_alone() -> None:
    program = Program(launch_ns=0)
    program.kernel("a", 100 * US, stream=1)
    program.kernel("b", 40 * US, stream=2, blocks=4)
    first, second = _device(program).streams
    assert (first.busy_ns, first.alone_ns, first.small_ns) == (100 * US, 60 * US, 0)
    assert (second.busy_ns, second.alone_ns, second.small_ns) == (40 * US, 0, 40 * US)


def test_devices_of_a_process_are_distinguished() -> None:
    program = Program()
    program.kernel("a", 10 * US, device=0)
    program.kernel("b", 30 * US, device=1)
    devices = analyze([program.activities()]).result.devices
    assert [(device.device, device.work_ns) for device in devices] == [(0, 10 * US), (1, 30 * US)]
    assert devices[0].name == "NVIDIA H200"
    assert devices[1].name == ""


def test_profile_without_work_has_no_devices() -> None:
    program = Program()
    program.call("cudaGetDevice", 1 * US)
    assert analyze([program.activities()]).result.devices == ()
    assert analyze([]).result.devices == ()


@pytest.mark.parametrize(
    ("has_steps", "caption"), [(True, "Mean time per step."), (False, "Total time.")]
)
def test_comparison_says_whether_times_are_means(has_steps: bool, caption: str) -> None:
    results = []
    for duration in (10 * US, 20 * US):
        program = Program()
        for _ in range(10):
            with program.range("step" if has_steps else "other"):
                program.kernel("scale", duration, line=10)
        results.append(analyze([program.activities()]).result)
    text = console.render(diff.report(compare(*results)), width=100, color=False)
    assert caption in text
    assert ("Per step: the median" in text) is has_steps


# --- how a grid fills the device -------------------------------------------------------------------

H100 = DeviceLimits(132, 2048, 32, 65536, 233472, 1024)


@pytest.mark.parametrize(
    ("threads", "registers", "shared_bytes", "expected"),
    [
        (1024, 32, 0, 2),  # threads
        (32, 16, 0, 32),  # blocks
        (128, 168, 0, 3),  # registers: 12 warps of 5,376 registers
        (256, 255, 0, 1),
        (128, 32, 100_000, 2),  # shared memory: 101,120 bytes for each block
        (384, 168, 230_400, 1),
        (1024, 128, 0, 1),  # a kernel that ran has one block at least
    ],
)
def test_blocks_of_a_multiprocessor_are_limited_by_each_resource(
    threads: int, registers: int, shared_bytes: int, expected: int
) -> None:
    assert H100.resident_blocks(threads, registers, shared_bytes) == expected


def test_small_grid_leaves_multiprocessors_empty() -> None:
    grid = grid_fill(H100, blocks=33, threads=256, registers=32, shared_bytes=0)
    assert grid.multiprocessors_share == pytest.approx(0.25)
    assert grid.threads_share == pytest.approx(33 * 256 / (132 * 2048))
    assert grid.waves == pytest.approx(33 / (132 * 8))


def test_last_wave_is_partly_empty() -> None:
    grid = grid_fill(H100, blocks=132 + 33, threads=1024, registers=64, shared_bytes=0)
    assert grid.waves == pytest.approx(1.25)
    assert grid.tail_share == pytest.approx(0.375)
    assert grid.multiprocessors_share == 1
    assert grid.threads_share == pytest.approx(0.5)


def test_full_waves_have_no_tail() -> None:
    grid = grid_fill(H100, blocks=132 * 8, threads=256, registers=32, shared_bytes=0)
    assert (grid.waves, grid.tail_share, grid.threads_share) == (1, 0, 1)


def test_limits_of_an_old_trace_are_unknown() -> None:
    assert not DeviceLimits(132).are_recorded
    assert H100.are_recorded
