"""The results of ``memviz --what-if``, which are also its JSON document.

Sizes are in bytes. An event is an index into the trace of the device; -1 is before the first recorded event.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cudakit.memory.result import FileFacts

SCHEMA = "cudakit.memviz.whatif/1"
DEFAULTS = "defaults"  # the name of settings without text
LIMITED_BASELINE = (
    "recorded settings"  # the name of the replay with a limit that the recording lacks
)


@dataclass(frozen=True, slots=True)
class MemoryTotals:
    """The four totals of memory, as defined by ``torch.cuda.memory_stats``."""

    reserved_bytes: int  # reserved bytes
    allocated_bytes: int  # allocated bytes
    requested_bytes: int  # requested bytes
    active_bytes: int  # allocated and pending bytes


@dataclass(frozen=True, slots=True)
class Shortage:
    """A request that succeeded in the recording and failed in the replay."""

    event: int  # the event of the request
    size_bytes: int  # size of the request


@dataclass(frozen=True, slots=True)
class Outcome:
    """The memory and the driver calls, as recorded or of one replay."""

    name: str  # "recorded", "replayed, as recorded", "recorded settings", or the settings as text
    settings: str  # settings in the format of PYTORCH_CUDA_ALLOC_CONF; empty: defaults
    limit_bytes: int | None  # maximum reserved memory; null: no limit
    peak: MemoryTotals  # the maximum of each total until the end, or until the shortage
    end: MemoryTotals  # totals at the end, or at the shortage
    fragmentation_bytes: int  # free memory in segments at the peak of the recording
    fragmentation: float  # fragmentation_bytes / reserved bytes at the same peak
    device_allocations: int  # number of segment allocations and mappings
    device_frees: int  # number of segment frees and unmappings
    retries: int | None  # driver allocations repeated after emptying the cache; null: unknown
    ooms: int  # number of requests that failed
    shortage: Shortage | None  # the request that ended the replay; null: none


@dataclass(frozen=True, slots=True)
class Difference:
    """A figure that differs between the recording and its replay."""

    figure: str  # name of the figure, such as "peak reserved"
    recorded: int  # value in the recording
    replayed: int  # value in the replay


@dataclass(frozen=True, slots=True)
class Limit:
    """The most memory that replays may reserve, and the source of this limit."""

    bytes: int  # maximum reserved memory
    source: Literal[
        "given", "device full", "reserved"
    ]  # source of the limit: the caller ("given"), or the recording


@dataclass(frozen=True, slots=True)
class DeviceWhatIf:
    """All replays of one device of one file."""

    file: str  # name of the file
    device: int  # device index
    events: int  # number of events in the trace
    limit: Limit | None  # memory limit of the replays; null: none
    recorded: Outcome  # figures of the recording
    replayed: (
        Outcome  # outcome of a replay with the recorded settings, which should equal ``recorded``
    )
    differences: tuple[Difference, ...]  # figures of the replay that differ from the recording
    reasons: tuple[str, ...]  # reasons for differences
    baseline: Outcome  # the outcome that ``tried`` is compared with
    tried: tuple[Outcome, ...]  # figures of the replay with each of the given settings
    best: int | None  # index in ``tried`` of the settings that help most; null: none helps
    headline: str  # the result in one sentence


@dataclass(frozen=True, slots=True)
class WhatIfResult:
    """The result for all files."""

    schema: str  # name and version of this document
    files: tuple[FileFacts, ...]  # the files that were read
    devices: tuple[DeviceWhatIf, ...]  # each device of each file
