"""Collect the memory of one process from the batches of its trace."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cudakit.memory.record.model import MemoryModel
from cudakit.stacks import Stack
from cudakit.trace.kinds import LIBRARY_DOMAINS, AllocationKind, AllocationLayer, EventKind
from cudakit.trace.layout import Records, view
from cudakit.trace.spool import Batch

# Number of events that are kept for each device; the agent sets the same limit for PyTorch's history.
MAX_EVENTS = 200_000
_MAX_RANGES = 100_000  # number of ranges, and of marks, that are kept for each process

# Fields of trace records that this module does not read.
_UNUSED_FIELDS = ("seq", "context", "kind")

# The NVTX domain of the ranges and marks that cudakit itself records.
OWN_DOMAIN = "cudakit"
BACKWARD_RANGE = "backward pass"
# The name of the mark at the moment of the final snapshot. Frees after the mark are part of process exit.
END_MARK = "end of the program"

# Kinds of trace records that change the memory, or that are NVTX ranges and marks.
_EVENT_KINDS = (
    EventKind.ALLOC,
    EventKind.FREE,
    EventKind.RANGE_PUSH,
    EventKind.RANGE_POP,
    EventKind.MARK,
    EventKind.OUT_OF_MEMORY,
)


@dataclass(slots=True)
class NamedRange:
    """An NVTX range of a thread or process; ``end_ns`` is None until the range ends."""

    name: str
    domain: str
    stack: Stack
    begin_ns: int
    end_ns: int | None = None

    @property
    def is_backward_pass(self) -> bool:
        """Whether cudakit recorded this range for a backward pass of PyTorch."""
        return self.domain == OWN_DOMAIN and self.name == BACKWARD_RANGE


@dataclass(frozen=True, slots=True)
class NamedMark:
    """An NVTX mark: a named point in time."""

    name: str
    time_ns: int


@dataclass(slots=True)
class ProcessMemory:
    """The memory of one process, and its named ranges and marks.

    ``has_ended`` is True after the mark at the moment of the final snapshot; later records are ignored.
    """

    model: MemoryModel = field(default_factory=lambda: MemoryModel(max_entries=MAX_EVENTS))
    ranges: deque[NamedRange] = field(default_factory=lambda: deque(maxlen=_MAX_RANGES))
    marks: deque[NamedMark] = field(default_factory=lambda: deque(maxlen=_MAX_RANGES))
    has_ended: bool = False
    has_run_out_of_memory: bool = False
    # Function that is called when a pool first runs out of memory, before later records are applied.
    on_out_of_memory: Callable[[], None] = field(default=lambda: None)
    # Open ranges, outermost first. The key is (thread, domain), or the number of a range of the process.
    _open_ranges: dict[tuple[int, str] | int, list[NamedRange]] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether no memory and no range was recorded."""
        return self.model.is_empty and not self.ranges

    def forget_ended_ranges(self) -> None:
        """Forget the marks, and the ranges that have ended, because a new recording begins."""
        open_ranges = [open_range for ranges in self._open_ranges.values() for open_range in ranges]
        self.ranges.clear()
        self.marks.clear()
        self.ranges += sorted(open_ranges, key=lambda open_range: open_range.begin_ns)

    def feed(self, batch: Batch) -> None:
        """Apply the records of a batch."""
        records = batch.records[np.isin(batch.records["kind"], _EVENT_KINDS)]
        kinds = records["kind"].tolist()
        rows_by_kind = {kind: iter(_rows_of_kind(records, kind)) for kind in set(kinds)}
        for kind in kinds:
            if self.has_ended:
                return
            fields = next(rows_by_kind[kind])
            site = fields["site"]
            # Only a damaged trace refers to a missing call stack.
            stack = batch.stacks[site] if site < len(batch.stacks) else ()
            if kind == EventKind.ALLOC:
                self._apply_alloc(fields, stack, batch.strings)
            elif kind == EventKind.FREE:
                self._apply_free(fields, stack, batch.strings)
            elif kind == EventKind.OUT_OF_MEMORY:
                self._apply_failed_alloc(fields, stack, batch.strings)
            else:
                self._apply_range(EventKind(kind), fields, stack, batch.strings)

    def _apply_alloc(self, fields: Mapping[str, int], stack: Stack, strings: Sequence[str]) -> None:
        pool = strings[fields["pool"]]
        if fields["layer"] == AllocationLayer.POOL:
            self.model.pool_alloc(
                device=fields["device"],
                address=fields["address"],
                size_bytes=fields["size_bytes"],
                requested_bytes=fields["requested_bytes"],
                pool=pool,
                stack=stack,
                time_ns=fields["time_ns"],
            )
        else:
            self.model.driver_alloc(
                device=fields["device"],
                address=fields["address"],
                size_bytes=fields["size_bytes"],
                kind=AllocationKind(fields["allocation_kind"]),
                pool=pool,
                stream=fields["stream"],
                stack=stack,
                time_ns=fields["time_ns"],
            )

    def _apply_free(self, fields: Mapping[str, int], stack: Stack, strings: Sequence[str]) -> None:
        address, time_ns = fields["address"], fields["time_ns"]
        if fields["layer"] == AllocationLayer.POOL:
            pool = strings[fields["pool"]]
            self.model.pool_free(address=address, pool=pool, stack=stack, time_ns=time_ns)
        else:
            self.model.driver_free(address=address, stack=stack, time_ns=time_ns)

    def _apply_failed_alloc(
        self, fields: Mapping[str, int], stack: Stack, strings: Sequence[str]
    ) -> None:
        self.model.out_of_memory(
            device=fields["device"],
            size_bytes=fields["size_bytes"],
            free_bytes=fields["free_bytes"],
            pool=strings[fields["pool"]],
            stack=stack,
            time_ns=fields["time_ns"],
        )
        if not self.has_run_out_of_memory:
            self.has_run_out_of_memory = True
            self.on_out_of_memory()

    def _apply_range(
        self, kind: EventKind, fields: Mapping[str, int], stack: Stack, strings: Sequence[str]
    ) -> None:
        domain, time_ns = strings[fields["domain"]], fields["time_ns"]
        if kind == EventKind.MARK:
            self._apply_mark(strings[fields["name"]], domain, time_ns)
            return
        # Autograd's threads have copies of the ranges of the thread that called ``backward()``.
        if fields.get("is_copy") or domain in LIBRARY_DOMAINS:
            return
        range_number = fields.get("number", 0)
        # Ranges of a thread nest by domain; a range of the process nests in no other range.
        nesting_key = range_number or (fields["thread"], domain)
        open_ranges = self._open_ranges.setdefault(nesting_key, [])
        if kind == EventKind.RANGE_PUSH:
            new_range = NamedRange(strings[fields["name"]], domain, stack, time_ns)
            open_ranges.append(new_range)
            self.ranges.append(new_range)
        elif kind == EventKind.RANGE_POP and open_ranges:
            open_ranges.pop().end_ns = time_ns
            if not open_ranges:
                del self._open_ranges[nesting_key]

    def _apply_mark(self, name: str, domain: str, time_ns: int) -> None:
        if domain == OWN_DOMAIN:
            self.has_ended = name == END_MARK
        elif domain not in LIBRARY_DOMAINS:
            self.marks.append(NamedMark(name, time_ns))


def _rows_of_kind(records: Records, kind: int) -> list[dict[str, int]]:
    """Return a dictionary of the used fields of each record of one kind, in the order of the records."""
    rows = view(records[records["kind"] == kind], EventKind(kind))
    field_names = [name for name in rows.dtype.names or () if name not in _UNUSED_FIELDS]
    columns = [rows[name].tolist() for name in field_names]
    return [
        dict(zip(field_names, row_values, strict=True)) for row_values in zip(*columns, strict=True)
    ]
