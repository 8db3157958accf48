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
    call_site: tuple[tuple[Frame, ...], int] = ((), 0),
) -> Iterator[Finding]:
    """Yield a finding if its saving is large enough."""
    measured_ns = device.measured.length_ns
    share = saving_ns / measured_ns if measured_ns else 0.0
    if share >= _MIN_SHARE:
        stack, site = call_site
        yield Finding(
            rule=rule,
            process=device.process,
            device=device.device,
            sentence=sentence,
            actions=actions,
            saving_ns=int(saving_ns),
            saving_share=min(share, 1.0),
            estimate=estimate,
            stack=stack,
            site=site,
        )


def _share_text(device: Device, time_ns: float) -> str:
    return format_ratio(time_ns / device.measured.length_ns) if device.measured.length_ns else "0%"


def _time_text(time_ns: float) -> str:
    return format_seconds(time_ns / 1e9)


def _per_step(device: Device, event_count: int, noun: str = "times") -> str:
    """Return a count per step, ``once per step``; without steps, the count in the measured time."""
    step_count = device.steps.measured
    per_step = event_count / max(step_count, 1)
    is_shown_as_integer = per_step >= 10 or per_step == int(per_step)
    number_text = f"{per_step:,.0f}" if is_shown_as_integer else f"{per_step:.1f}"
    count_text = "once" if (number_text, noun) == ("1", "times") else f"{number_text} {noun}"
    return f"{count_text} per step" if step_count else count_text


def call_site_text(stack: tuple[Frame, ...], site: int) -> str:
    """Return the call site of a stack as ``train.py:15``; empty without a stack."""
    if not stack:
        return ""
    return f"{stack[site].filename.rpartition('/')[2]}:{stack[site].line}"


def _at_site(stack: tuple[Frame, ...], site: int) -> str:
    return f" at {call_site_text(stack, site)}" if stack else ""


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
    mean_text = f"{_time_text(mean_ns)} each on average"
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
    waits_by_stack: defaultdict[tuple[Frame, ...], list[HostWait]] = defaultdict(list)
    copying_stacks = {
        copy_group.stack[copy_group.site :] for copy_group in _pageable_to_device(device)
    }
    for wait in device.waits:
        # Copies of pageable memory have a separate finding.
        is_copy = "Memcpy" in wait.function and wait.stack[wait.site :] in copying_stacks
        if wait.kind == "wait" and not is_copy:
            waits_by_stack[wait.stack[wait.site :]].append(wait)
    for stack, waits in waits_by_stack.items():
        idle_ns, blocked_ns = (
            sum(wait.idle_ns for wait in waits),
            sum(wait.blocked_ns for wait in waits),
        )
        call_count = sum(wait.calls for wait in waits)
        if idle_ns < _MIN_WAIT_SHARE * device.measured.length_ns:
            continue
        yield from _finding(
            device,
            "host-wait",
            f"The host waits for the GPU{_at_site(stack, 0)} ({waits[0].function}, "
            f"{_per_step(device, call_count)}). "
            f"This leaves the GPU idle for {_share_text(device, idle_ns)} of the time, "
            "and delays later launches, which may cause more idle time.",
            min(blocked_ns, idle_ns + device.measured.idle.launch_ns),
            "time of the host in these waits, at most the idle time that the waits and launching cause",
            (
                "do not read results of the GPU in every step (.item(), .cpu(), nonzero, print): "
                "collect them on the GPU and read them every N steps",
                "copy into pinned memory with non_blocking=True, and wait for an event later",
            ),
            call_site=(stack, 0),
        )


def _pageable_to_device(device: Device) -> list[Copies]:
    return [
        copy_group
        for copy_group in device.copies
        if copy_group.host == "pageable" and copy_group.direction is Direction.HOST_TO_DEVICE
    ]


def _data_loading(device: Device) -> Iterator[Finding]:
    # Without steps, the time may be a single compilation, not data loading.
    if not device.steps.measured:
        return iter(())
    idle_ns = device.measured.idle.data_loading_ns
    copies_to_device = [
        copy_group
        for copy_group in device.copies
        if copy_group.direction is Direction.HOST_TO_DEVICE
    ]
    call_site = (
        (copies_to_device[0].stack, copies_to_device[0].site) if copies_to_device else ((), 0)
    )
    return _finding(
        device,
        "data-loading",
        f"The GPU waits {_share_text(device, idle_ns)} of the time for input data, copied"
        f"{_at_site(*call_site) or ' by the program'}.",
        idle_ns,
        "idle time of cause data loading",
        (
            "load in parallel: DataLoader(num_workers=N, persistent_workers=True, prefetch_factor=4)",
            "prepare data ahead, or on the GPU",
        ),
        call_site=call_site,
    )


def _allocation(device: Device) -> Iterator[Finding]:
    rows = [wait for wait in device.waits if wait.kind == "allocation"]
    call_count = sum(row.calls for row in rows)
    if device.steps.measured and call_count < device.steps.measured:
        return iter(())
    if not rows or not device.steps.measured:
        return iter(())
    blocked_ns, idle_ns = sum(row.blocked_ns for row in rows), device.measured.idle.allocation_ns
    largest_wait = max(rows, key=lambda row: (row.idle_ns, row.blocked_ns))
    site_text = _at_site(largest_wait.stack, largest_wait.site)
    function = largest_wait.function
    main_source = f"mainly{site_text} ({function})" if site_text else f"mainly in {function}"
    return _finding(
        device,
        "allocation",
        f"The driver allocates or frees memory {_per_step(device, call_count)}, {main_source}. "
        f"This leaves the GPU idle for {_share_text(device, idle_ns)} of the time, "
        "and delays later launches, which may cause more idle time.",
        min(blocked_ns, idle_ns + device.measured.idle.launch_ns),
        "time of the host in these calls, at most the idle time that the calls and launching cause",
        (
            "use a caching allocator: that of PyTorch or CuPy, or cudakit.CachingAllocator",
            "allocate once, before the loop; do not call empty_cache() in it",
        ),
        call_site=(largest_wait.stack, largest_wait.site),
    )


# --- copies ----------------------------------------------------------------------------------------


def _pageable_copies(device: Device) -> Iterator[Finding]:
    for copy_group in device.copies:
        if copy_group.host == "pageable" and copy_group.total_ns:
            rate, source = _pinned_rate(device, copy_group)
            saved_ns = copy_group.total_ns - copy_group.size_bytes / rate * 1e9
            exposed_share = 1 - min(copy_group.overlapped_ns / copy_group.total_ns, 1)
            direction = copy_group.direction.name.capitalize().replace("_", "-")
            yield from _finding(
                device,
                "pageable-copies",
                f"{direction} copies of pageable memory{_at_site(copy_group.stack, copy_group.site)} reach "
                f"{(copy_group.bytes_per_s or 0) / 1e9:.1f} GB/s and block the host.",
                saved_ns * exposed_share,
                f"time of the copies without overlap, minus their time at {rate / 1e9:.0f} GB/s ({source})",
                (
                    "pin the host memory: DataLoader(pin_memory=True) or tensor.pin_memory()",
                    "then copy with non_blocking=True",
                ),
                call_site=(copy_group.stack, copy_group.site),
            )


def _pinned_rate(device: Device, pageable_group: Copies) -> tuple[float, str]:
    """Return the rate of pinned copies of the same direction, and the source of the rate."""
    for copy_group in device.copies:
        is_large = copy_group.size_bytes >= copy_group.calls * _LARGE_COPY_BYTES
        if (
            copy_group.host == "pinned"
            and copy_group.direction is pageable_group.direction
            and is_large
        ):
            return copy_group.bytes_per_s or _PCIE_4_BYTES_PER_S, "pinned copies of this profile"
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
        if not _is_small_gemm(device, kernel):
            continue
        batch_size = kernel.consecutive
        wave_count = math.ceil(batch_size * kernel.blocks / device.multiprocessors)
        idle_ns = device.measured.idle.launch_ns * kernel.calls / kernel_count
        yield from _finding(
            device,
            "small-gemms",
            f"Small GEMMs{_at_site(kernel.stack, kernel.site)} run one after the other: "
            f"{batch_size:,.0f} in a row, each with {kernel.blocks:,} thread blocks for "
            f"{device.multiprocessors} multiprocessors ({_time_text(kernel.median_ns)} median).",
            (kernel.total_ns + idle_ns) * (1 - wave_count / batch_size),
            "their time and their part of the launch idle time, times the share of waves that batching saves",
            ("if they do not depend on each other, run them as one batched GEMM: torch.bmm",),
            call_site=(kernel.stack, kernel.site),
        )


def _is_small_gemm(device: Device, kernel: Kernel) -> bool:
    return (
        bool(_GEMM.search(kernel.name))
        and kernel.consecutive >= _MIN_CONSECUTIVE_GEMMS
        and kernel.median_ns <= _MAX_SMALL_GEMM_NS
        and 0 < kernel.blocks * 2 <= device.multiprocessors
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
    devices = result.devices
    compared_rates = (limit for device in devices for limit in _compare_rates(device, limits))
    compared_launches = (limit for device in devices for limit in _compare_launches(device, limits))
    return replace(
        result,
        limits=(*result.limits, *compared_rates),
        launch_limits=(*result.launch_limits, *compared_launches),
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
    for copy_group in device.copies:
        direction = "peer" if copy_group.peer else _BENCH_DIRECTIONS.get(copy_group.direction, "")
        limit, measured_rate = limits.copy_rates.get(direction), copy_group.bytes_per_s
        if limit and measured_rate and copy_group.size_bytes >= copy_group.calls * MIN_COPY_BYTES:
            name = f"copies: {copy_group.name}"
            yield Limit(
                name,
                device.process,
                device.device,
                measured_rate,
                limit,
                measured_rate / limit,
                limits.simulated,
            )
    memsets = device.memsets
    if memsets and memsets.total_ns and limits.write_rates:
        mean_bytes = memsets.size_bytes / memsets.calls
        if mean_bytes >= MIN_COPY_BYTES:
            measured_rate, limit = (
                memsets.size_bytes / memsets.total_ns * 1e9,
                _rate_of_similar_size(limits, mean_bytes),
            )
            yield Limit(
                "memsets",
                device.process,
                device.device,
                measured_rate,
                limit,
                measured_rate / limit,
                limits.simulated,
            )


def _rate_of_similar_size(limits: MeasuredLimits, size_bytes: float) -> float:
    """Return the measured write rate for the most similar size: small buffers stay in the L2 cache."""
    return min(limits.write_rates, key=lambda write: abs(math.log(write[0] / size_bytes)))[1]


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
