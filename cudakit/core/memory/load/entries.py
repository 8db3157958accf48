"""The trace of one device: from its list of entries to Events."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cudakit.core.memory.load.tables import StreamNumbers, Tables
from cudakit.core.memory.load.tree import Handles, Tree
from cudakit.core.memory.snapshot import Events
from cudakit.errors import SnapshotError
from cudakit.torch_rules.actions import Action

# The largest address space a GPU has is 49 bits (CUDA C++ Programming Guide, unified memory).
MOST_BYTES = 1 << 49
# Paging with five levels has 57 bits (Intel SDM volume 3, 4.5); no host and no GPU has more.
_MOST_ADDRESS = 1 << 57
# No trace allocates this much, and twice as much is still far from the end of int64.
_MOST_TOTAL = 1 << 60

_ACTIONS = {
    "alloc": Action.ALLOC,
    "free_requested": Action.FREE_REQUESTED,
    "free_completed": Action.FREE_COMPLETED,
    "free": Action.FREE,
    "segment_alloc": Action.SEGMENT_ALLOC,
    "segment_free": Action.SEGMENT_FREE,
    "segment_map": Action.SEGMENT_MAP,
    "segment_unmap": Action.SEGMENT_UNMAP,
    "snapshot": Action.SNAPSHOT,
    "oom": Action.OOM,
    "annotate": Action.ANNOTATE,
}


def read_events(
    tree: Tree, tables: Tables, streams: StreamNumbers, entries: Handles
) -> tuple[Events, tuple[str, ...]]:
    """Read trace entries; returns the events and a sentence for each kind of defect met.

    An entry without a usable address or size, or with an action that is not known, stays in the trace
    as a marker (Action.UNKNOWN), so that indices keep their meaning. Raises SnapshotError where an entry
    is no dictionary, and where sizes add up to what cannot be.
    """
    action = tables.codes(tree.column(entries, "action"), _ACTIONS, Action.UNKNOWN)
    address, has_address = tree.integers(tree.column(entries, "addr"))
    free, has_free = tree.integers(tree.column(entries, "device_free"))
    size, has_size = tree.integers(tree.column(entries, "size"))
    is_oom = action == Action.OOM
    moves_memory = (action != Action.UNKNOWN) & (action < Action.SNAPSHOT)
    somewhere = has_address & is_range(address, size)
    broken = (moves_memory & ~(somewhere & has_size)) | (is_oom & ~(has_size & (size >= 0)))
    _refuse_impossible_total(size[moves_memory & ~broken])
    warnings = _warnings(broken, action)
    pool_handles = tree.column(entries, "pool_id")
    events = Events(
        action=np.where(broken, np.uint8(Action.UNKNOWN), action),
        address=np.where(is_oom & has_free, free, address).view(np.uint64),
        size=size,
        stream=streams.number(tree.integers(tree.column(entries, "stream"))[0]),
        time_us=tree.integers(tree.column(entries, "time_us"))[0],
        stack=tables.stack_ids(tree.column(entries, "frames")),
        pool=np.where(pool_handles == 0, np.int32(-1), tables.pool_ids(pool_handles)),
        compile_context=tables.text_ids(tree.column(entries, "compile_context")),
        user_metadata=tables.text_ids(tree.column(entries, "user_metadata")),
        category=tables.text_ids(tree.column(entries, "category")),
    )
    return events, warnings


def is_range(address: npt.NDArray[np.int64], size: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Say which (wrapped) addresses and sizes are a range of memory that a machine can have."""
    lies = (address >= 0) & (address <= _MOST_ADDRESS)
    return lies & (size >= 0) & (size <= MOST_BYTES)


def _refuse_impossible_total(size: npt.NDArray[np.int64]) -> None:
    if (total := float(size.sum(dtype=np.float64))) > _MOST_TOTAL:
        raise SnapshotError(
            f"the sizes in a trace add up to {total:.0e} bytes: the file is damaged"
        )


def _warnings(broken: npt.NDArray[np.bool_], action: npt.NDArray[np.uint8]) -> tuple[str, ...]:
    found = []
    if n := int(np.count_nonzero(broken)):
        found.append(f"{n:,} trace entries have no usable address or size and are passed over")
    if n := int(np.count_nonzero(action == Action.UNKNOWN)):
        found.append(f"{n:,} trace entries have an action that is not known and are passed over")
    return tuple(found)
