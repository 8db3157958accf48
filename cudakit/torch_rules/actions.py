"""The actions of entries in the trace of a snapshot."""

from __future__ import annotations

from enum import IntEnum


class Action(IntEnum):
    """The action of a trace entry (torch/csrc/cuda/memory_snapshot.cpp, ``action_to_str``)."""

    UNKNOWN = 0
    ALLOC = 1
    FREE_REQUESTED = 2
    FREE_COMPLETED = 3
    FREE = 4  # A free that one event both requests and completes. Other tools write it, PyTorch does not.
    SEGMENT_ALLOC = 5
    SEGMENT_FREE = 6
    SEGMENT_MAP = 7
    SEGMENT_UNMAP = 8
    SNAPSHOT = 9
    OOM = 10
    ANNOTATE = 11
