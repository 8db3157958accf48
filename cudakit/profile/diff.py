"""Compare two profiles by step, kernel and line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

from cudakit.profile.findings import call_site_text
from cudakit.profile.result import Device, ProfileResult


@dataclass(frozen=True, slots=True)
class Change:
    """A time in both profiles: per step if both have steps, otherwise in all measured time."""

    name: str  # name of the time: "step", "measured time", "busy", a cause of idle time, a kernel or a line
    before_ns: float  # time in the earlier profile; 0 if only the later profile has this name
    after_ns: float  # time in the later profile; 0 if only the earlier profile has this name

    @property
    def change_ns(self) -> float:
        """The later time minus the earlier time, in nanoseconds."""
        return self.after_ns - self.before_ns

    @property
    def growth(self) -> float | None:
        """The change divided by the earlier time; None if the earlier time is 0."""
        return self.after_ns / self.before_ns - 1 if self.before_ns else None


@dataclass(frozen=True, slots=True)
class DeviceChange:
    """The changes of one device."""

    device: int  # CUDA index in the process of the later profile
    per_step: bool  # whether the times are times of one step
    step: Change  # time of a step (median), or without steps the measured time
    busy: Change  # time in which the device was busy
    idle: tuple[Change, ...]  # changes of idle time, one for each cause
    kernels: tuple[Change, ...]  # changes of kernels, the largest first
    lines: tuple[Change, ...]  # changes of own time of lines, the largest first
    rank: int | None = None  # rank of the process in the later profile; null if there is none


@dataclass(frozen=True, slots=True)
class ProfileDiff:
    """The changes from one profile to another."""

    schema: ClassVar[str] = "cudakit.profile-diff/1"
    devices: tuple[DeviceChange, ...]  # changes of each device that both profiles have
    unmatched: int  # number of devices that only one of the profiles has
    simulated: bool = False  # whether a simulated device did the work of one of the profiles
    before_simulated: bool = (
        False  # whether the work of the earlier profile is that of a simulated device
    )
    after_simulated: bool = (
        False  # whether the work of the later profile is that of a simulated device
    )
    only_before: tuple[str, ...] = ()  # names of the devices that only the earlier profile has
    only_after: tuple[str, ...] = ()  # names of the devices that only the later profile has

    def slowest_growth(self) -> float | None:
        """Return the largest relative growth of a step; None if nothing can be compared."""
        growths = [device.step.growth for device in self.devices]
        return max((growth for growth in growths if growth is not None), default=None)


def compare(before_result: ProfileResult, after_result: ProfileResult) -> ProfileDiff:
    """Return the changes between two profiles, whose n-th devices are compared with each other."""
    device_pairs = list(zip(before_result.devices, after_result.devices, strict=False))
    pair_count = len(device_pairs)
    only_before = tuple(map(_device_name, before_result.devices[pair_count:]))
    only_after = tuple(map(_device_name, after_result.devices[pair_count:]))
    return ProfileDiff(
        tuple(_compare_devices(*pair) for pair in device_pairs),
        len(only_before) + len(only_after),
        before_result.simulated or after_result.simulated,
        before_result.simulated,
        after_result.simulated,
        only_before,
        only_after,
    )


def _device_name(device: Device) -> str:
    name = f"cuda:{device.device}"
    return name if device.rank is None else f"rank {device.rank}, {name}"


def _compare_devices(before_device: Device, after_device: Device) -> DeviceChange:
    per_step = bool(before_device.steps.measured and after_device.steps.measured)
    before_steps = before_device.steps.measured if per_step else 1
    after_steps = after_device.steps.measured if per_step else 1

    def change(name: str, time_of: Callable[[Device], int]) -> Change:
        return Change(
            name, time_of(before_device) / before_steps, time_of(after_device) / after_steps
        )

    def changes(times_of: Callable[[Device], Iterable[tuple[str, int]]]) -> tuple[Change, ...]:
        times_by_name: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for name, time in times_of(before_device):
            times_by_name[name][0] += time / before_steps
        for name, time in times_of(after_device):
            times_by_name[name][1] += time / after_steps
        changes = [
            Change(name, *pair) for name, pair in times_by_name.items() if pair[0] != pair[1]
        ]
        return tuple(sorted(changes, key=lambda row: (-abs(row.change_ns), row.name)))

    step = (
        Change("step", before_device.steps.median_ns, after_device.steps.median_ns)
        if per_step
        else change("measured time", lambda device: device.measured.length_ns)
    )
    return DeviceChange(
        device=after_device.device,
        per_step=per_step,
        step=step,
        busy=change("busy", lambda device: device.measured.busy_ns),
        idle=changes(_idle_causes),
        kernels=changes(lambda device: ((row.name, row.total_ns) for row in device.kernels)),
        lines=changes(
            lambda device: (
                (f"{call_site_text((row.frame,), 0)} {row.frame.name}", row.own_ns)
                for row in device.lines
            )
        ),
        rank=after_device.rank,
    )


def _idle_causes(device: Device) -> Iterable[tuple[str, int]]:
    idle = device.measured.idle
    return ((name, getattr(idle, name)) for name in idle.__dataclass_fields__)
