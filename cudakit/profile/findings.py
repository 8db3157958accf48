"""Find changes that make a program faster, estimate the time that each saves, and compare with limits.

Each rule looks at one device and its measured time. The rule applies only if the estimated saving is at
least 3 % of that time. The estimates are upper limits under the conditions that the actions state;
docs/explanation/profile.md compares them with measured savings.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from cudakit.profile.result import (
    Copies,
    Device,
    Finding,
    HostWait,
    Kernel,
    LaunchLimit,
    Limit,
    ProfileResult,
)
from cudakit.stacks import Frame
from cudakit.trace.kinds import Direction
from cudakit.units import format_ratio, format_seconds

_MIN_SHARE: Final = 0.03
# Minimum share of the measured time that the waits of a call site leave idle in a finding.
_MIN_WAIT_SHARE: Final = 0.01
# Time between two kernels of a CUDA graph that depend on each other; 0.5 to 1.3 microseconds on H100 and H200
# (cudakit bench graph).
_GRAPH_NODE_NS: Final = 1_000
# Assumed rate of pinned copies, for a profile without pinned copies: about 80 % of the rate of PCIe x16 (31.5
# GB/s for version 4.0, 63 GB/s for 5.0), as cudakit bench copy measures.
_PCIE_4_BYTES_PER_S: Final = 25e9
_PCIE_5_BYTES_PER_S: Final = 50e9
# Names of GPUs with PCIe 5.0 or a faster link to the host (NVIDIA's datasheets).
_PCIE_5_GPUS = re.compile(r"\b(?:H20|H100|H200|H800|G[HB]\d{3}|B[123]00|RTX 50\d\d|RTX PRO)\b")
# Minimum mean size of copies whose rate is that of the link: smaller copies are slower.
_LARGE_COPY_BYTES: Final = 1 << 20
_GEMM = re.compile(r"gemm|gemv|cutlass.*mma|matmul|xmma|nvjet", re.IGNORECASE)
_MIN_CONSECUTIVE_GEMMS: Final = 8
# Maximum time of a small GEMM: a longer one is limited by its arithmetic, not by its few thread blocks.
_MAX_SMALL_GEMM_NS: Final = 50_000
_MIN_STREAM_SHARE: Final = 0.1

_Rule = Callable[[Device], Iterator[Finding]]


def find(devices: Sequence[Device], *, is_lossy: bool) -> tuple[Finding, ...]:
    """Return the findings of all devices, the largest saving first.

    ``is_lossy`` is true if events are missing: then no saving is estimated.
    """
    findings = [finding for device in devices for rule in _RULES for finding in rule(device)]
    findings.sort(key=lambda finding: -finding.saving_ns)
    if is_lossy:
        findings = [replace(finding, saving_share=None) for finding in findings]
    return tuple(findings)


def _finding(
    device: Device,
    rule: str,
    sentence: str,
    saving_ns: float,
    estimate: str,
    actions: tuple[str, ...],
    *,
    at: Copies | HostWait | Kernel | None = None,
) -> Iterator[Finding]:
    """Yield a finding if its saving is large enough; ``at`` has its call stack."""
    measured_ns = device.measured.length_ns
    share = saving_ns / measured_ns if measured_ns else 0.0
    if share >= _MIN_SHARE:
        yield Finding(
            rule=rule,
            process=device.process,
            device=device.device,
            sentence=sentence,
            actions=actions,
            saving_ns=int(saving_ns),
            saving_share=min(share, 1.0),
            estimate=estimate,
            stack=at.stack if at else (),
            site=at.site if at else 0,
        )


def _share_text(device: Device, time_ns: float) -> str:
    return format_ratio(time_ns / device.measured.length_ns) if device.measured.length_ns else "0%"


def _per_step(device: Device, event_count: int, noun: str = "times") -> str:
    """Return a count per step, ``once per step``; without steps, the count in the measured time."""
    step_count = device.steps.measured
    per_step = event_count / max(step_count, 1)
    is_whole = per_step >= 10 or per_step == int(per_step)
    number = f"{per_step:,.0f}" if is_whole else f"{per_step:.1f}"
    text = "once" if (number, noun) == ("1", "times") else f"{number} {noun}"
    return f"{text} per step" if step_count else text


def call_site_text(stack: tuple[Frame, ...], site: int) -> str:
    """Return the call site of a stack as ``train.py:15``; empty without a stack."""
    if not stack:
        return ""
    return f"{stack[site].filename.rpartition('/')[2]}:{stack[site].line}"


def _at_site(row: Copies | HostWait | Kernel) -> str:
    return f" at {call_site_text(row.stack, row.site)}" if row.stack else ""


# --- the host is too slow --------------------------------------------------------------------------


def _launch_bound(device: Device) -> Iterator[Finding]:
    kernel_count = sum(kernel.calls for kernel in device.kernels)
    collective_count = sum(collective.calls for collective in device.collectives)
    if kernel_count == collective_count:
        return iter(())
    idle_ns = device.measured.idle.launch_ns
    # The time of a collective includes the wait for other ranks.
    total_ns = sum(kernel.total_ns for kernel in device.kernels)
    total_ns -= sum(collective.total_ns for collective in device.collectives)
    mean_ns = total_ns / (kernel_count - collective_count)
    mean_text = f"{format_seconds(mean_ns / 1e9)} each on average"
    if collective_count:
        collectives_text = _per_step(device, collective_count, "of them collectives")
        mean_text = f"{collectives_text.removesuffix(' per step')}; the others take {mean_text}"
    return _finding(
        device,
        "launch-bound",
        f"Launch-bound: the GPU waits {_share_text(device, idle_ns)} of the time for the next launch "
        f"({_per_step(device, kernel_count, 'kernels')}, {mean_text}).",
        idle_ns - min(kernel_count * _GRAPH_NODE_NS, idle_ns),
        "idle time of cause launch, minus 1 us for each kernel, the time between two nodes of a graph",
        (
            "launch the step as one CUDA graph: torch.cuda.graph or cudakit.graph",
            'fuse kernels: torch.compile(mode="reduce-overhead")',
            "enlarge the batch",
        ),
    )


def _host_waits(device: Device) -> Iterator[Finding]:
    """Yield a finding for each call site whose waits leave the GPU without work."""
    # Copies of pageable memory have a separate finding.
    copying_stacks = {
        row.stack[row.site :] for row in _copies_to_device(device) if row.host == "pageable"
    }
    waits_by_stack: defaultdict[tuple[Frame, ...], list[HostWait]] = defaultdict(list)
    for wait in device.waits:
        stack = wait.stack[wait.site :]
        if wait.kind == "wait" and not ("Memcpy" in wait.function and stack in copying_stacks):
            waits_by_stack[stack].append(wait)
    for stack, waits in waits_by_stack.items():
        idle_ns = sum(wait.idle_ns for wait in waits)
        blocked_ns = sum(wait.blocked_ns for wait in waits)
        site = replace(waits[0], stack=stack, site=0)
        if idle_ns < _MIN_WAIT_SHARE * device.measured.length_ns:
            continue
        yield from _finding(
            device,
            "host-wait",
            f"The host waits for the GPU{_at_site(site)} ({site.function}, "
            f"{_per_step(device, sum(wait.calls for wait in waits))}). "
            f"This leaves the GPU idle for {_share_text(device, idle_ns)} of the time, "
            "and delays later launches, which may cause more idle time.",
            min(blocked_ns, idle_ns + device.measured.idle.launch_ns),
            "time of the host in these waits, at most the idle time that the waits and launching cause",
            (
                "do not read results of the GPU in every step (.item(), .cpu(), nonzero, print): "
                "collect them on the GPU and read them every N steps",
                "copy into pinned memory with non_blocking=True, and wait for an event later",
            ),
            at=site,
        )


def _copies_to_device(device: Device) -> list[Copies]:
    return [row for row in device.copies if row.direction is Direction.HOST_TO_DEVICE]


def _data_loading(device: Device) -> Iterator[Finding]:
    # Without steps, the time may be a single compilation, not data loading.
    if not device.steps.measured:
        return iter(())
    idle_ns = device.measured.idle.data_loading_ns
    copies = _copies_to_device(device)
    source = (_at_site(copies[0]) if copies else "") or " by the program"
    return _finding(
        device,
        "data-loading",
        f"The GPU waits {_share_text(device, idle_ns)} of the time for input data, copied{source}.",
        idle_ns,
        "idle time of cause data loading",
        (
            "load in parallel: DataLoader(num_workers=N, persistent_workers=True, prefetch_factor=4)",
            "prepare data ahead, or on the GPU",
        ),
        at=copies[0] if copies else None,
    )


def _allocation(device: Device) -> Iterator[Finding]:
    rows = [wait for wait in device.waits if wait.kind == "allocation"]
    calls, steps = sum(row.calls for row in rows), device.steps.measured
    if not rows or not steps or calls < steps:
        return iter(())
    blocked_ns, idle_ns = sum(row.blocked_ns for row in rows), device.measured.idle.allocation_ns
    largest = max(rows, key=lambda row: (row.idle_ns, row.blocked_ns))
    source = (
        f"mainly{_at_site(largest)} ({largest.function})"
        if largest.stack
        else f"mainly in {largest.function}"
    )
    return _finding(
        device,
        "allocation",
        f"The driver allocates or frees memory {_per_step(device, calls)}, {source}. "
        f"This leaves the GPU idle for {_share_text(device, idle_ns)} of the time, "
        "and delays later launches, which may cause more idle time.",
        min(blocked_ns, idle_ns + device.measured.idle.launch_ns),
        "time of the host in these calls, at most the idle time that the calls and launching cause",
        (
            "use a caching allocator: that of PyTorch or CuPy, or cudakit.CachingAllocator",
            "allocate once, before the loop; do not call empty_cache() in it",
        ),
        at=largest,
    )


# --- copies ----------------------------------------------------------------------------------------


def _pageable_copies(device: Device) -> Iterator[Finding]:
    for row in device.copies:
        if row.host == "pageable" and row.total_ns:
            rate, source = _pinned_rate(device, row.direction)
            saved_ns = row.total_ns - row.size_bytes / rate * 1e9
            direction = row.direction.name.capitalize().replace("_", "-")
            yield from _finding(
                device,
                "pageable-copies",
                f"{direction} copies of pageable memory{_at_site(row)} reach "
                f"{(row.bytes_per_s or 0) / 1e9:.1f} GB/s and block the host.",
                saved_ns * (1 - min(row.overlapped_ns / row.total_ns, 1)),
                f"time of the copies without overlap, minus their time at {rate / 1e9:.0f} GB/s ({source})",
                (
                    "pin the host memory: DataLoader(pin_memory=True) or tensor.pin_memory()",
                    "then copy with non_blocking=True",
                ),
                at=row,
            )


def _pinned_rate(device: Device, direction: Direction) -> tuple[float, str]:
    """Return the rate of pinned copies in a direction, and the source of the rate."""
    for row in device.copies:
        is_large = row.size_bytes >= row.calls * _LARGE_COPY_BYTES
        if row.host == "pinned" and row.direction is direction and is_large:
            return row.bytes_per_s or _PCIE_4_BYTES_PER_S, "pinned copies of this profile"
    if _PCIE_5_GPUS.search(device.name):
        return _PCIE_5_BYTES_PER_S, "assumed for pinned memory on PCIe 5.0"
    return _PCIE_4_BYTES_PER_S, "assumed for pinned memory on PCIe 4.0"


# --- the GPU is not filled -------------------------------------------------------------------------


def _serial_streams(device: Device) -> Iterator[Finding]:
    measured_ns = device.measured.length_ns
    streams = [
        stream
        for stream in device.streams
        if stream.small_ns >= _MIN_STREAM_SHARE * measured_ns
        and stream.small_ns >= 0.8 * stream.busy_ns
        and stream.alone_ns >= 0.95 * stream.busy_ns
    ]
    if len(streams) < 2:
        return iter(())
    total_ns = sum(stream.small_ns for stream in streams)
    return _finding(
        device,
        "serial-streams",
        f"{len(streams)} streams never run at the same time, although their kernels use at most half of the "
        f"multiprocessors ({_share_text(device, total_ns)} of the time).",
        total_ns - max(stream.small_ns for stream in streams),
        "time of the small kernels of all these streams, minus that of the longest stream",
        (
            "if the streams do not depend on each other, remove the waits between them: events, "
            "synchronizations, work in the default stream",
        ),
    )


def _small_gemms(device: Device) -> Iterator[Finding]:
    kernel_count = sum(kernel.calls for kernel in device.kernels)
    for kernel in device.kernels:
        is_small = (
            _GEMM.search(kernel.name)
            and kernel.consecutive >= _MIN_CONSECUTIVE_GEMMS
            and kernel.median_ns <= _MAX_SMALL_GEMM_NS
            and 0 < kernel.blocks * 2 <= device.multiprocessors
        )
        if not is_small:
            continue
        batch_size = kernel.consecutive
        wave_count = math.ceil(batch_size * kernel.blocks / device.multiprocessors)
        idle_ns = device.measured.idle.launch_ns * kernel.calls / kernel_count
        yield from _finding(
            device,
            "small-gemms",
            f"Small GEMMs{_at_site(kernel)} run one after the other: "
            f"{batch_size:,.0f} in a row, each with {kernel.blocks:,} thread blocks for "
            f"{device.multiprocessors} multiprocessors ({format_seconds(kernel.median_ns / 1e9)} median).",
            (kernel.total_ns + idle_ns) * (1 - wave_count / batch_size),
            "their time and their part of the launch idle time, times the share of waves that batching saves",
            ("if they do not depend on each other, run them as one batched GEMM: torch.bmm",),
            at=kernel,
        )


_RULES: tuple[_Rule, ...] = (
    _launch_bound,
    _host_waits,
    _data_loading,
    _allocation,
    _pageable_copies,
    _serial_streams,
    _small_gemms,
)


# --- limits that ``cudakit bench`` measured --------------------------------------------------------
#
# Bytes and FLOPs of kernels are not recorded, so that their rates cannot be compared.

# Minimum size of the copies and memsets that are compared: latency limits the rate of smaller ones.
MIN_COPY_BYTES = 1 << 20
# Names of the directions in ``cudakit bench copy``. Copies of pageable memory use the same link as pinned
# copies.
_BENCH_DIRECTIONS = {
    Direction.HOST_TO_DEVICE: "h2d",
    Direction.DEVICE_TO_HOST: "d2h",
    Direction.DEVICE_TO_DEVICE: "d2d",
}


@dataclass(frozen=True, slots=True)
class MeasuredLimits:
    """The limits that ``cudakit bench`` measured on a device."""

    # Rate of copies in bytes per second, by direction.
    copy_rates: Mapping[str, float] = field(default_factory=dict)
    # Size of a buffer in bytes, and the rate of a kernel that writes it, in bytes per second.
    write_rates: Sequence[tuple[int, float]] = ()
    launch_s: float | None = None  # time between back-to-back launches of an empty kernel
    simulated: bool = False  # whether the device was simulated


def compare_limits(result: ProfileResult, limits: MeasuredLimits) -> ProfileResult:
    """Return the result with further comparisons of copies, memsets and launches with measured limits."""
    rates = (limit for device in result.devices for limit in _compare_rates(device, limits))
    launches = (limit for device in result.devices for limit in _compare_launches(device, limits))
    return replace(
        result,
        limits=(*result.limits, *rates),
        launch_limits=(*result.launch_limits, *launches),
    )


def why_nothing_compared(limits: MeasuredLimits) -> Iterator[str]:
    """Yield for each kind of limit what a profile lacks if ``compare_limits`` compared nothing."""
    work_names = []
    if directions := ", ".join(sorted(limits.copy_rates)):
        work_names.append(f"copies in the measured directions ({directions})")
    if limits.write_rates:
        work_names.append("memsets")
    for work_name in work_names:
        yield f"no {work_name} with a mean size of at least 1 MiB"
    if limits.launch_s:
        yield "no kernel launches outside of CUDA graphs"


def _compare_rates(device: Device, limits: MeasuredLimits) -> Iterator[Limit]:
    # Name, calls, size, rate and limit of what can be compared.
    rows: list[tuple[str, int, int, float | None, float | None]] = []
    for row in device.copies:
        direction = "peer" if row.peer else _BENCH_DIRECTIONS.get(row.direction, "")
        limit = limits.copy_rates.get(direction)
        rows.append((f"copies: {row.name}", row.calls, row.size_bytes, row.bytes_per_s, limit))
    memsets = device.memsets
    if memsets and memsets.total_ns and limits.write_rates:
        mean_bytes = max(memsets.size_bytes / memsets.calls, 1)
        # The write rate for the most similar size: small buffers stay in the L2 cache.
        _, write_rate = min(
            limits.write_rates, key=lambda write: abs(math.log(write[0] / mean_bytes))
        )
        rate = memsets.size_bytes / memsets.total_ns * 1e9
        rows.append(("memsets", memsets.calls, memsets.size_bytes, rate, write_rate))
    for name, calls, size_bytes, measured, limit in rows:
        if limit and measured and size_bytes >= calls * MIN_COPY_BYTES:
            yield Limit(
                name,
                device.process,
                device.device,
                measured,
                limit,
                measured / limit,
                limits.simulated,
            )


def _compare_launches(device: Device, limits: MeasuredLimits) -> Iterator[LaunchLimit]:
    launch_count = sum(kernel.calls for kernel in device.kernels) - device.graph_kernels
    if not limits.launch_s or launch_count <= 0 or not device.measured.length_ns:
        return
    limit_ns = limits.launch_s * 1e9
    interval_ns = device.measured.length_ns / launch_count
    short_kernels = [kernel for kernel in device.kernels if kernel.median_ns <= limit_ns]
    yield LaunchLimit(
        process=device.process,
        device=device.device,
        interval_ns=interval_ns,
        limit_interval_ns=limit_ns,
        share=limit_ns / interval_ns,
        short_kernels=sum(kernel.calls for kernel in short_kernels),
        short_kernels_share=sum(kernel.share for kernel in short_kernels),
        simulated=limits.simulated,
    )
