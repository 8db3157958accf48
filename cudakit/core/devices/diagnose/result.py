"""What ``doctor`` found: the Result that is also its JSON (``cudakit.doctor/1``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from cudakit.core.devices.diagnose.check import Status
from cudakit.units import Unavailable

SCHEMA = "cudakit.doctor/1"
EXPLANATION_SCHEMA = "cudakit.doctor.explanation/1"


@dataclass(frozen=True, slots=True)
class Judged:
    """One check and what it found."""

    id: str
    theme: str
    title: str  # what holds where all is well
    status: Status
    summary: str  # one sentence: what was found, or why nothing could be
    evidence: Mapping[str, str]  # what was seen, by name
    fix: tuple[str, ...]  # commands or sentences, most promising first


@dataclass(frozen=True, slots=True)
class DeviceLine:
    """Which GPU was looked at."""

    index: int  # NVML's
    name: str | Unavailable
    uuid: str | Unavailable
    pci_bus_id: str | Unavailable
    compute_capability: str | Unavailable
    memory_bytes: int | Unavailable


@dataclass(frozen=True, slots=True)
class DoctorResult:
    """All checks that were made, and on what machine."""

    schema: str
    simulated: bool  # the GPUs are
    status: Status  # the worst of all checks
    counts: Mapping[str, int]  # checks by status
    about: Mapping[str, str]  # versions, by what they are of
    devices: tuple[DeviceLine, ...]
    checks: tuple[Judged, ...]

    @property
    def failures(self) -> int:
        return self.counts[Status.FAIL.name.lower()]

    @property
    def warnings(self) -> int:
        return self.counts[Status.WARN.name.lower()]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What one check looks at and why (``doctor --explain``)."""

    schema: str
    id: str
    title: str  # what holds where all is well
    explanation: str


def counted(checks: tuple[Judged, ...]) -> dict[str, int]:
    """Count checks by the word of their status, zeros included."""
    found = Counter(check.status for check in checks)
    return {status.name.lower(): found[status] for status in Status}
