"""Checks, findings, and the result of all checks: the JSON of ``cudakit doctor``."""

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


class Status(IntEnum):
    """The outcome of a check; a higher value is worse."""

    OK = 0
    UNKNOWN = 1  # The check could not run; never counts as a problem.
    WARN = 2  # CUDA works, but slowly or unexpectedly.
    FAIL = 3  # CUDA does not work, or not on every GPU.


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check, with the reason."""

    status: Status
    summary: str  # The result in one line.
    evidence: Mapping[str, str] = field(default_factory=dict)  # The observed values by label.
    fix: tuple[
        str, ...
    ] = ()  # Commands or sentences that repair the problem, most promising first.


Examine: TypeAlias = Callable[[RunContext], Finding]


@dataclass(frozen=True, slots=True)
class Check:
    """A check; the docstring of ``examine`` is its explanation."""

    id: str  # CK and three digits; the id of a removed check is never reused.
    title: str  # The statement that is true if the check passes.
    examine: Examine

    @property
    def explanation(self) -> str:
        return inspect.getdoc(self.examine) or ""

    def run(self, context: RunContext) -> Finding:
        """Run the check; return UNKNOWN with the reason if it cannot run or raises."""
        try:
            return self.examine(context)
        except NotCheckable as reason:
            return Finding(Status.UNKNOWN, str(reason))
        except Exception as error:  # noqa: BLE001 one broken check must not prevent the others
            return Finding(
                Status.UNKNOWN, f"internal error in this check: {type(error).__name__}: {error}"
            )


class NotCheckable(Exception):
    """A fact that a check needs is missing; the message is the reason."""


def require(fact: _T | Unavailable, reason: str = "") -> _T:
    """Return a fact. Raises NotCheckable if the fact is Unavailable; default ``reason``: the fact's."""
    if isinstance(fact, Unavailable):
        raise NotCheckable(reason or fact.reason)
    return fact


def ok(summary: str, evidence: Mapping[str, str] | None = None) -> Finding:
    """Return a finding with status OK."""
    return Finding(Status.OK, summary, evidence or {})


def warn(summary: str, evidence: Mapping[str, str] | None = None, *fix: str) -> Finding:
    """Return a finding with status WARN."""
    return Finding(Status.WARN, summary, evidence or {}, fix)


def fail(summary: str, evidence: Mapping[str, str] | None = None, *fix: str) -> Finding:
    """Return a finding with status FAIL."""
    return Finding(Status.FAIL, summary, evidence or {}, fix)


def combine(findings: Iterable[Finding], *, otherwise: Finding) -> Finding:
    """Return one finding for all that are not OK, worst first; ``otherwise`` if every finding is OK."""
    problems = sorted(
        (finding for finding in findings if finding.status is not Status.OK),
        key=lambda finding: -finding.status,
    )
    if not problems:
        return otherwise
    return Finding(
        problems[0].status,
        "; ".join(dict.fromkeys(finding.summary for finding in problems)),
        {label: value for finding in problems for label, value in finding.evidence.items()},
        tuple(dict.fromkeys(fix for finding in problems for fix in finding.fix)),
    )


def count_of(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 GPU``, ``2 GPUs``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


# --- the results of all checks
# ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CheckResult:
    """A check and its finding."""

    id: str
    theme: str  # The heading of a group of checks: "Driver", "GPU health".
    title: str  # The statement that is true if the check passes.
    status: Status
    summary: str  # The result in one line.
    evidence: Mapping[str, str]  # The observed values by label.
    fix: tuple[str, ...]  # Commands or sentences that repair the problem, most promising first.


@dataclass(frozen=True, slots=True)
class DeviceLine:
    """The line about one GPU in the report."""

    index: int  # The NVML index, or the CUDA index if NVML does not answer.
    name: str | Unavailable
    uuid: str | Unavailable
    pci_bus_id: str | Unavailable
    compute_capability: str | Unavailable
    memory_bytes: int | Unavailable


@dataclass(frozen=True, slots=True)
class SetVariable:
    """An environment variable that is set and changes CUDA, a library, a framework or cudakit."""

    name: str
    value: str
    effect: str
    library: str  # The name of the library that reads the variable.
    source: (
        str  # The section of the documentation, or the source file, that describes the variable.
    )


@dataclass(frozen=True, slots=True)
class DoctorResult:
    """The findings of all checks on one machine."""

    schema: str
    simulated: bool  # Whether the GPUs are simulated.
    status: Status  # The worst status of all checks; UNKNOWN only if no check could run.
    counts: Mapping[str, int]  # The number of checks by status in lower case.
    about: Mapping[str, str]  # The versions of system, driver and packages by label.
    devices: tuple[DeviceLine, ...]
    checks: tuple[CheckResult, ...]
    variables: tuple[SetVariable, ...] = ()

    @property
    def is_unknown(self) -> bool:
        """Whether no check could run."""
        return self.status is Status.UNKNOWN

    @property
    def failures(self) -> int:
        return self.counts[Status.FAIL.name.lower()]

    @property
    def warnings(self) -> int:
        return self.counts[Status.WARN.name.lower()]


def overall_status(statuses: Iterable[Status]) -> Status:
    """Return the worst status; UNKNOWN only if no check could run."""
    distinct = set(statuses)
    return max(distinct - {Status.UNKNOWN}, default=Status.UNKNOWN if distinct else Status.OK)
