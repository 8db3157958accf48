"""Tallies: the metrics of the small and of the large pools, and what both are together.

What every allocation changes is in the ledger. The rest is flat: of each metric there is its name, ``_added``
and ``_peak``. What both tallies add up to is found when somebody asks, but for its peaks, which are not the
sum of theirs. The rules are those of PyTorch's c10/core/CachingDeviceAllocator.h.
"""

from __future__ import annotations

from cudakit.core.allocator.ledger import METRICS, SMALL, Ledger, unit

# What is counted by itself.
FLAT = ("segment", "reserved_bytes", "inactive_split", "inactive_split_bytes")
# What is allocated, and what was freed but is still in use by other streams.
ACTIVE = {"active": "allocation", "active_bytes": "allocated_bytes"}
PENDING = {"active": "pending", "active_bytes": "pending_bytes"}

_BLOCKS, _BYTES, _REQUESTED = range(len(METRICS))


class Peaks:
    """The highest values since the last reset, of what is not in the ledger.

    What is active is what is allocated while nothing is pending: it has a peak of its own for other times
    only.
    """

    __slots__ = tuple(f"{metric}_peak" for metric in (*FLAT, *ACTIVE))

    def __init__(self) -> None:
        self.segment_peak = self.reserved_bytes_peak = 0
        self.inactive_split_peak = self.inactive_split_bytes_peak = 0
        self.active_peak = self.active_bytes_peak = 0

    def raise_to(self, metric: str, value: int) -> None:
        """Note a value, which may be the highest."""
        name = f"{metric}_peak"
        setattr(self, name, max(getattr(self, name), value))


class Tally(Peaks):
    """The metrics of one kind of pool; ``pending`` blocks were freed, but other streams use them.

    ``block_unit``, ``byte_unit`` and ``request_unit`` are what one of each is in the ledger.
    """

    __slots__ = (
        *(f"{metric}{part}" for metric in FLAT for part in ("", "_added")),
        "block_unit",
        "byte_unit",
        "bases",
        "kind",
        "ledger",
        "other",
        "pending",
        "pending_bytes",
        "request_unit",
        "whole",
    )

    def __init__(self, whole: Peaks, ledger: Ledger | None = None, kind: int = SMALL) -> None:
        super().__init__()
        self.whole = whole
        self.ledger = ledger or Ledger()
        self.kind = kind
        self.other = self  # the other kind's, once it is there
        self.block_unit = unit(kind, _BLOCKS)
        self.byte_unit = unit(kind, _BYTES)
        self.request_unit = unit(kind, _REQUESTED)
        self.segment = self.segment_added = 0
        self.reserved_bytes = self.reserved_bytes_added = 0
        self.inactive_split = self.inactive_split_added = 0
        self.inactive_split_bytes = self.inactive_split_bytes_added = 0
        self.pending = self.pending_bytes = 0
        self.bases = dict.fromkeys(
            (*FLAT, *PENDING.values()), 0
        )  # values at the last reset of sums

    @property
    def allocation(self) -> int:
        """Blocks handed out."""
        return self.ledger.current(self.kind, _BLOCKS)

    @property
    def allocated_bytes(self) -> int:
        """Bytes that they have."""
        return self.ledger.current(self.kind, _BYTES)

    @property
    def requested_bytes(self) -> int:
        """Bytes that were asked for."""
        return self.ledger.current(self.kind, _REQUESTED)

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
        for metric in FLAT:
            setattr(self, f"{metric}_added", 0)
        self.bases = {metric: getattr(self, metric) for metric in self.bases}

    def weight(self, size: int, requested: int) -> int:
        """Return what a block adds to the ledger."""
        return self.block_unit + size * self.byte_unit + requested * self.request_unit

    def postponed(self, size: int) -> None:
        """Count a block that was freed while other streams use it."""
        self.ledger.used -= self.block_unit + size * self.byte_unit
        self.ledger.pending += 1
        self.pending += 1
        self.pending_bytes += size

    def completed(self, size: int, requested: int) -> None:
        """Count a block that other streams have used to the end."""
        self.ledger.used -= requested * self.request_unit
        self.ledger.pending -= 1
        self.pending -= 1
        self.pending_bytes -= size

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

    def raise_active(self) -> None:
        """Note how much is active, which may be more than ever."""
        self._raise(*ACTIVE)

    def _raise(self, *metrics: str) -> None:
        for metric in metrics:
            value: int = getattr(self, metric)
            self.raise_to(metric, value)
            self.whole.raise_to(metric, value + getattr(self.other, metric))
