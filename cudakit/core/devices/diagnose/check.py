"""Checks, what one finds, and the result of all: the JSON of ``cudakit doctor``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias, TypeVar

from cudakit.gpu.api.run_context import RunContext
from cudakit.units import Unavailable

_T = TypeVar("_T")

SCHEMA = "cudakit.doctor/1"
EXPLANATION_SCHEMA = "cudakit.doctor.explanation/1"


class Status(IntEnum):
    """The outcome of a check, the worse the higher."""

    OK = 0
    UNKNOWN = 1  # could not be checked; never counts as a finding
    WARN = 2  # CUDA works, but something slows it down, or will surprise
    FAIL = 3  # CUDA does not work, or not on every GPU


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found."""

    status: Status
    summary: str  # one line that can stand alone
    evidence: Mapping[str, str] = field(default_factory=dict)  # observed values, by name
    fix: tuple[str, ...] = ()  # commands or sentences, most promising first


Examine: TypeAlias = Callable[[RunContext], Finding]


@dataclass(frozen=True, slots=True)
class Check:
    """One question. Its explanation is the docstring of the function that answers it."""

    id: str  # CK and three digits; never given to another question
    title: str  # the statement that holds if all is well
    examine: Examine

    @property
    def explanation(self) -> str:
        return inspect.getdoc(self.examine) or ""

    def run(self, context: RunContext) -> Finding:
        """Examine a context; if that is impossible or fails, return UNKNOWN with the reason."""
        try:
            return self.examine(context)
        except NotCheckable as reason:
            return Finding(Status.UNKNOWN, str(reason))
        except Exception as error:  # noqa: BLE001 one broken check must not cost the others
            return Finding(Status.UNKNOWN, f"the check broke: {type(error).__name__}: {error}")


class NotCheckable(Exception):
    """A check lacks a fact that it needs; the message is the reason."""


def require(fact: _T | Unavailable, reason: str = "") -> _T:
    """Return a fact. Raises NotCheckable with its reason, or another, if it is Unavailable."""
    if isinstance(fact, Unavailable):
        raise NotCheckable(reason or fact.reason)
    return fact


def ok(summary: str, evidence: Mapping[str, str] | None = None) -> Finding:
    """Return the finding that all is well."""
    return Finding(Status.OK, summary, evidence or {})


def warn(summary: str, evidence: Mapping[str, str] | None = None, *fix: str) -> Finding:
    """Return the finding of something that slows CUDA down, or will surprise."""
    return Finding(Status.WARN, summary, evidence or {}, fix)


def fail(summary: str, evidence: Mapping[str, str] | None = None, *fix: str) -> Finding:
    """Return the finding of something that does not work."""
    return Finding(Status.FAIL, summary, evidence or {}, fix)


def combine(findings: Iterable[Finding], *, otherwise: Finding) -> Finding:
    """Join the findings that are not OK, the worst first; return ``otherwise`` if there are none."""
    wrong = sorted(
        (one for one in findings if one.status is not Status.OK), key=lambda one: -one.status
    )
    if not wrong:
        return otherwise
    return Finding(
        wrong[0].status,
        "; ".join(dict.fromkeys(one.summary for one in wrong)),
        {label: value for one in wrong for label, value in one.evidence.items()},
        tuple(dict.fromkeys(fix for one in wrong for fix in one.fix)),
    )


# --- the result ------------------------------------------------------------------------------------


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
