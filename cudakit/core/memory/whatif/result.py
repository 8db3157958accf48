"""What a recorded program would have needed under other settings: ``memviz --what-if`` as a Result.

Sizes are bytes and names say so; an event is an index into the device's trace, -1 means "before the
first recorded event".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cudakit.core.memory.result import FileFacts

SCHEMA = "cudakit.memviz.whatif/1"


@dataclass(frozen=True, slots=True)
class Held:
    """The four amounts, as torch's memory statistics mean them."""

    reserved_bytes: int
    allocated_bytes: int
    requested_bytes: int
    active_bytes: int


@dataclass(frozen=True, slots=True)
class Shortage:
    """A request that was served when the program ran, and could not be in the replay."""

    event: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was held and asked of the driver, as recorded or under one set of settings."""

    name: str  # "recorded", "replayed, as recorded", "recorded settings", or as given
    settings: str  # as PYTORCH_CUDA_ALLOC_CONF; empty: the defaults
    limit_bytes: int | None  # most that may be reserved; null: no limit
    peak: Held  # the highest of each; with a shortage: until then
    end: Held  # with a shortage: when it came
    fragmentation_bytes: int  # free inside segments when most was requested in the record
    fragmentation: float  # as a share of what was reserved then
    device_allocations: int  # segments taken from the driver, and mappings
    device_frees: int  # segments given back, and unmappings
    retries: int | None  # requests served after the cache was emptied; null: not known
    ooms: int  # requests that failed
    shortage: Shortage | None  # where the replay ended, since the program would not have gone on


@dataclass(frozen=True, slots=True)
class Difference:
    """A figure that differs between the record and its replay."""

    figure: str  # such as "peak reserved"
    recorded: int
    replayed: int


@dataclass(frozen=True, slots=True)
class Limit:
    """How much the replays may reserve, and how that is known."""

    bytes: int
    source: Literal["given", "device full", "reserved"]  # the last two: seen when memory ran out


@dataclass(frozen=True, slots=True)
class DeviceWhatIf:
    """One device of one file under each of the settings."""

    file: str
    device: int
    events: int
    limit: Limit | None
    recorded: Outcome
    replayed: Outcome  # under the settings of the record: equal to it, or what follows is less sure
    differences: tuple[Difference, ...]
    reasons: tuple[str, ...]  # why the replay can differ from the record
    baseline: Outcome  # what the tried settings are compared with
    tried: tuple[Outcome, ...]
    best: int | None  # index in ``tried`` of what would have helped most; null: none would
    headline: str


@dataclass(frozen=True, slots=True)
class WhatIfResult:
    """What other settings would have done in all files."""

    schema: str
    files: tuple[FileFacts, ...]
    devices: tuple[DeviceWhatIf, ...]
