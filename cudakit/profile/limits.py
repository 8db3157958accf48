"""Compare copies, memsets and kernel launches of a profile with limits that ``cudakit bench`` measured.

Bytes and FLOPs of kernels are not recorded, so that their rates cannot be compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cudakit.profile.present.tables import copies_name
from cudakit.profile.result import Device, LaunchLimit, Limit, ProfileResult
from cudakit.trace.kinds import Direction

# Minimum size of the copies and memsets that are compared: latency limits the rate of smaller ones.
MIN_COPY_BYTES = 1 << 20
# Names of the directions in ``cudakit bench copy``. Copies of pageable memory use the same link as pinned
# copies.
_DIRECTIONS = {
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
        direction = "peer" if copy_group.peer else _DIRECTIONS.get(copy_group.direction, "")
        limit, measured_rate = limits.copy_rates.get(direction), copy_group.bytes_per_s
        if limit and measured_rate and copy_group.size_bytes >= copy_group.calls * MIN_COPY_BYTES:
            name = f"copies: {copies_name(copy_group)}"
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
