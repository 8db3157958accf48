"""Collect the memory of one process from the batches of its trace."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cudakit.core.memory.record.model import MemoryModel
from cudakit.trace.kinds import How, Kind, Layer
from cudakit.trace.layout import Records, view
from cudakit.trace.log import Stack
from cudakit.trace.spool import Batch

# Events kept per device, as in the history of PyTorch that cudakit records.
MAX_EVENTS = 200_000
_MAX_RANGES = 100_000

# The domain of ranges and marks that cudakit records itself.
OWN_DOMAIN = "cudakit"
BACKWARD_RANGE = "backward pass"
# The mark of the moment that the final snapshot shows; later frees belong to the end of the process.
END_MARK = "end of the program"

_KINDS = (Kind.ALLOC, Kind.FREE, Kind.RANGE_PUSH, Kind.RANGE_POP, Kind.MARK)


@dataclass(slots=True)
class NamedRange:
    """A named range of a thread; ``end_ns`` is None until it ends."""

    name: str
    domain: str
    stack: Stack
    begin_ns: int
    end_ns: int | None = None

    @property
    def is_backward_pass(self) -> bool:
        """Whether cudakit recorded this range for a backward pass of PyTorch."""
        return self.domain == OWN_DOMAIN and self.name == BACKWARD_RANGE


@dataclass(slots=True)
class ProcessMemory:
    """The memory of one process, and the ranges in which it was allocated."""

    model: MemoryModel = field(default_factory=lambda: MemoryModel(max_entries=MAX_EVENTS))
    ranges: deque[NamedRange] = field(default_factory=lambda: deque(maxlen=_MAX_RANGES))
    has_ended: bool = False
    _open_ranges: dict[tuple[int, str], list[NamedRange]] = field(default_factory=dict)

    def feed(self, batch: Batch) -> None:
        """Apply the records of a batch."""
        records = batch.records[np.isin(batch.records["kind"], _KINDS)]
        kinds = records["kind"].tolist()
        rows = {kind: iter(_rows(records, kind)) for kind in set(kinds)}
        for kind in kinds:
            if self.has_ended:
                return
            fields = next(rows[kind])
            stack = batch.stacks[fields["site"]]
            if kind == Kind.ALLOC:
                self._alloc(fields, stack, batch.strings)
            elif kind == Kind.FREE:
                self._free(fields, stack, batch.strings)
            else:
                self._annotate(Kind(kind), fields, stack, batch.strings)

    def _alloc(self, fields: Mapping[str, int], stack: Stack, strings: Sequence[str]) -> None:
        pool = strings[fields["pool"]]
        if fields["layer"] == Layer.POOL:
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
                how=How(fields["how"]),
                pool=pool,
                stream=fields["stream"],
                stack=stack,
                time_ns=fields["time_ns"],
            )

    def _free(self, fields: Mapping[str, int], stack: Stack, strings: Sequence[str]) -> None:
        address, time_ns = fields["address"], fields["time_ns"]
        if fields["layer"] == Layer.POOL:
            pool = strings[fields["pool"]]
            self.model.pool_free(address=address, pool=pool, stack=stack, time_ns=time_ns)
        else:
            self.model.driver_free(address=address, stack=stack, time_ns=time_ns)

    def _annotate(
        self, kind: Kind, fields: Mapping[str, int], stack: Stack, strings: Sequence[str]
    ) -> None:
        domain, time_ns = strings[fields["domain"]], fields["time_ns"]
        open_ranges = self._open_ranges.setdefault((fields["thread"], domain), [])
        if kind == Kind.RANGE_PUSH:
            pushed = NamedRange(strings[fields["name"]], domain, stack, time_ns)
            open_ranges.append(pushed)
            self.ranges.append(pushed)
        elif kind == Kind.RANGE_POP and open_ranges:
            open_ranges.pop().end_ns = time_ns
        elif kind == Kind.MARK:
            self.has_ended = domain == OWN_DOMAIN and strings[fields["name"]] == END_MARK


def _rows(records: Records, kind: int) -> list[dict[str, int]]:
    """Return the fields of the records of one kind."""
    rows = view(records[records["kind"] == kind], Kind(kind))
    names = rows.dtype.names or ()
    columns = [rows[name].tolist() for name in names]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
