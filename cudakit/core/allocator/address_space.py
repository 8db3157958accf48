"""How many addresses expandable segments set aside: by classes of streams, and what is set aside now.

A segment that grows may at most become as large as the range of addresses that it has. By default each has
9/8 of the device's memory, which many streams and pools may make more than a process can have. Source:
c10/cuda/CUDACachingAllocator.h of PyTorch 2.15 (setExpandableSegmentReserveClassForStream,
getExpandableSegmentsReservedBytes, getExpandableSegmentsCount).
"""

from __future__ import annotations

from dataclasses import dataclass

from cudakit.core.allocator.observed import Observed
from cudakit.core.allocator.upstream import Upstream, stream_number
from cudakit.errors import UsageError
from cudakit.torch_rules.setting_rules import is_class_name
from cudakit.torch_rules.settings import Settings


@dataclass(frozen=True, slots=True)
class AddressSpace:
    """Addresses that expandable segments have set aside, whether or not there is memory behind them."""

    segments: int
    reserved_bytes: int


class WithAddresses(Observed):
    """The allocator of one device, whose streams may have classes."""

    def __init__(self, upstream: Upstream, settings: Settings, device: int) -> None:
        super().__init__(upstream, settings, device)
        self._reserve_classes: dict[int, str] = {}

    def set_reserve_class(self, stream: int, name: str) -> None:
        """Let new expandable segments of a stream set aside what the setting says of a class; "" is none.

        The setting is expandable_segments_reserve_by_class; of a class that it does not name, as of a stream
        without one, expandable_segments_reserve counts. Raises UsageError for a name that no setting can
        have.
        """
        if name and not is_class_name(name):
            raise UsageError(
                f"{name!r} is no name of a class of streams",
                hint="it is not empty, and has no ',', ':', '[', ']' and no space",
            )
        with self._inside(flushes=False):
            if name:
                self._reserve_classes[stream_number(stream)] = name
            else:
                self._reserve_classes.pop(stream_number(stream), None)

    def reserve_class(self, stream: int) -> str:
        """Return the class of a stream; "" where it has none."""
        return self._reserve_classes.get(stream_number(stream), "")

    def address_space(self) -> AddressSpace:
        """Say how many addresses are set aside now."""
        with self._inside(flushes=False):
            expandable = self._cache.expandable
            reserved = expandable.reservations if expandable else ()
            return AddressSpace(len(reserved), sum(each.size for each in reserved))
