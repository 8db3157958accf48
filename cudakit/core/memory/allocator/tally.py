"""Tallies: the metrics of the small and of the large pools, and what both are together.

They are flat, since each is touched by every allocation: of each metric there is its name, ``_added`` and
``_peak``. What both tallies add up to is found when somebody asks, but for its peaks, which are not the sum
of theirs. The rules are those of PyTorch's c10/core/CachingDeviceAllocator.h.
"""

from __future__ import annotations

# What is counted by itself.
COUNTED = (
    "allocation",
    "allocated_bytes",
    "requested_bytes",
    "segment",
    "reserved_bytes",
    "inactive_split",
    "inactive_split_bytes",
)
# What is allocated, and what was freed but is still in use by other streams.
ACTIVE = {"active": "allocation", "active_bytes": "allocated_bytes"}


class Peaks:
    """The highest values since the last reset.

    What is active is what is allocated while nothing is pending: it has a peak of its own for other times
    only.
    """

    __slots__ = tuple(f"{metric}_peak" for metric in (*COUNTED, *ACTIVE))

    def __init__(self) -> None:
        self.allocation_peak = self.allocated_bytes_peak = self.requested_bytes_peak = 0
        self.segment_peak = self.reserved_bytes_peak = 0
        self.inactive_split_peak = self.inactive_split_bytes_peak = 0
        self.active_peak = self.active_bytes_peak = 0

    def raise_to(self, metric: str, value: int) -> None:
        """Note a value, which may be the highest."""
        name = f"{metric}_peak"
        setattr(self, name, max(getattr(self, name), value))


class Tally(Peaks):
    """The metrics of one kind of pool; ``pending`` blocks were freed, but other streams use them."""

    __slots__ = (
        *(f"{metric}{part}" for metric in COUNTED for part in ("", "_added")),
        "bases",
        "other",
        "pending",
        "pending_bytes",
        "whole",
    )

    def __init__(self, whole: Peaks) -> None:
        super().__init__()
        self.whole = whole
        self.other = self  # the other kind's, once it is there
        self.allocation = self.allocation_added = 0
        self.allocated_bytes = self.allocated_bytes_added = 0
        self.requested_bytes = self.requested_bytes_added = 0
        self.segment = self.segment_added = 0
        self.reserved_bytes = self.reserved_bytes_added = 0
        self.inactive_split = self.inactive_split_added = 0
        self.inactive_split_bytes = self.inactive_split_bytes_added = 0
        self.pending = self.pending_bytes = 0
        self.bases = dict.fromkeys((*COUNTED, *ACTIVE), 0)  # values at the last reset of sums

    @property
    def active(self) -> int:
        """Blocks in use."""
        return self.allocation + self.pending

    @property
    def active_bytes(self) -> int:
        """Bytes of blocks in use."""
        return self.allocated_bytes + self.pending_bytes

    def reset_sums(self) -> None:
        """Begin to add up anew."""
        for metric in COUNTED:
            setattr(self, f"{metric}_added", 0)
        self.bases = {metric: getattr(self, metric) for metric in self.bases}

    def handed_out(self, size: int, requested: int) -> None:
        """Count a block that was handed out."""
        other, whole = self.other, self.whole
        self.allocation_added += 1
        self.allocated_bytes_added += size
        self.requested_bytes_added += requested
        self.allocation = blocks = self.allocation + 1
        self.allocated_bytes = held = self.allocated_bytes + size
        self.requested_bytes = asked = self.requested_bytes + requested
        if blocks > self.allocation_peak:
            self.allocation_peak = blocks
        if held > self.allocated_bytes_peak:
            self.allocated_bytes_peak = held
        if asked > self.requested_bytes_peak:
            self.requested_bytes_peak = asked
        if blocks + other.allocation > whole.allocation_peak:
            whole.allocation_peak = blocks + other.allocation
        if held + other.allocated_bytes > whole.allocated_bytes_peak:
            whole.allocated_bytes_peak = held + other.allocated_bytes
        if asked + other.requested_bytes > whole.requested_bytes_peak:
            whole.requested_bytes_peak = asked + other.requested_bytes
        if self.pending or other.pending:
            self._raise_active()

    def freed(self, size: int, requested: int) -> None:
        """Count a block that nobody used any more when it was freed."""
        self.allocation -= 1
        self.allocated_bytes -= size
        self.requested_bytes -= requested

    def postponed(self, size: int) -> None:
        """Count a block that was freed while other streams use it."""
        self.allocation -= 1
        self.allocated_bytes -= size
        self.pending += 1
        self.pending_bytes += size

    def completed(self, size: int, requested: int) -> None:
        """Count a block that other streams have used to the end."""
        self.pending -= 1
        self.pending_bytes -= size
        self.requested_bytes -= requested

    def pieces_changed(self, count: int, size: int) -> None:
        """Count by how much the free pieces of split segments have changed."""
        self.inactive_split = pieces = self.inactive_split + count
        self.inactive_split_bytes = held = self.inactive_split_bytes + size
        if count > 0:
            self.inactive_split_added += count
            if pieces > self.inactive_split_peak:
                self.inactive_split_peak = pieces
            pieces += self.other.inactive_split
            if pieces > self.whole.inactive_split_peak:
                self.whole.inactive_split_peak = pieces
        if size > 0:
            self.inactive_split_bytes_added += size
            if held > self.inactive_split_bytes_peak:
                self.inactive_split_bytes_peak = held
            held += self.other.inactive_split_bytes
            if held > self.whole.inactive_split_bytes_peak:
                self.whole.inactive_split_bytes_peak = held

    def reserved(self, size: int) -> None:
        """Count a new segment."""
        self.segment += 1
        self.segment_added += 1
        self.reserved_bytes += size
        self.reserved_bytes_added += size
        self._raise("segment", "reserved_bytes")

    def released(self, size: int) -> None:
        """Count a segment that was given back."""
        self.segment -= 1
        self.reserved_bytes -= size

    def _raise_active(self) -> None:
        self._raise(*ACTIVE)

    def _raise(self, *metrics: str) -> None:
        for metric in metrics:
            value: int = getattr(self, metric)
            self.raise_to(metric, value)
            self.whole.raise_to(metric, value + getattr(self.other, metric))
