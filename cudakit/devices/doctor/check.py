"""Checks, findings, and the result of all checks: the JSON of ``cudakit doctor``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import ClassVar, TypeVar

from cudakit.gpu.api.facts import RunContext
from cudakit.units import Unavailable

_T = TypeVar("_T")


class Status(IntEnum):
    """The outcome of a check; a higher value is worse."""

    OK = 0
    UNKNOWN = 1  # the check could not be performed; this never counts as a problem
    WARN = 2  # CUDA works, but slowly or unexpectedly
    FAIL = 3  # CUDA does not work, or not on every GPU


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check, with the reason."""

    status: Status
    summary: str  # sentence of one line
    evidence: Mapping[str, str] = field(default_factory=dict)  # observed values, by name
    fix: tuple[str, ...] = ()  # remedies as commands or sentences, the most promising first


@dataclass(frozen=True, slots=True)
class Check:
    """One check; its explanation is the docstring of ``examine``.

    ``examine`` returns its finding, or yields several: the problems among them are joined. If all are OK,
    the last one counts.
    """

    id: str  # id, such as CK005; the id of a removed check is never reused
    title: str  # statement that is true if the check passes
    examine: Callable[[RunContext], Finding | Iterable[Finding]]  # performs the check

    @property
    def explanation(self) -> str:
        return inspect.getdoc(self.examine) or ""

    def run(self, context: RunContext) -> Finding:
        """Run the check; return UNKNOWN with the reason if it cannot run or raises."""
        try:
            findings = self.examine(context)
            return findings if isinstance(findings, Finding) else join_findings(findings)
        except NotCheckable as reason:
            return Finding(Status.UNKNOWN, str(reason))
        except Exception as error:  # noqa: BLE001 an error in one check must not prevent the other checks
            return Finding(
                Status.UNKNOWN, f"internal error in this check: {type(error).__name__}: {error}"
            )


class NotCheckable(Exception):
    """Raised if a fact that a check needs is missing; the message is the reason."""


def require_fact(fact: _T | Unavailable, reason: str = "") -> _T:
    """Return an available fact. Raises NotCheckable with ``reason``, or else with the fact's reason."""
    if isinstance(fact, Unavailable):
        raise NotCheckable(reason or fact.reason)
    return fact


def ok(summary: str, evidence: Mapping[str, str] | None = None) -> Finding:
    """Report that the statement of a check is true."""
    return Finding(Status.OK, summary, evidence or {})


def warn(summary: str, evidence: Mapping[str, str] | None = None, *fix: str) -> Finding:
    """Report that CUDA works, but slowly or unexpectedly."""
    return Finding(Status.WARN, summary, evidence or {}, fix)


def fail(summary: str, evidence: Mapping[str, str] | None = None, *fix: str) -> Finding:
    """Report that CUDA does not work, or not on every GPU."""
    return Finding(Status.FAIL, summary, evidence or {}, fix)


def join_findings(findings: Iterable[Finding]) -> Finding:
    """Join the findings that are not OK, the worst first. Return the last finding if all are OK."""
    findings = tuple(findings)
    problems = sorted(
        (finding for finding in findings if finding.status is not Status.OK),
        key=lambda finding: -finding.status,
    )
    if not problems:
        return findings[-1]
    return Finding(
        problems[0].status,
        "; ".join(dict.fromkeys(finding.summary for finding in problems)),
        {label: value for finding in problems for label, value in finding.evidence.items()},
        tuple(dict.fromkeys(fix for finding in problems for fix in finding.fix)),
    )


def count_of(count: int, noun: str) -> str:
    """Return a number with its noun: ``1 GPU``, ``2 GPUs``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


# --- the result of all checks ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check and its finding."""

    id: str  # id, such as CK005
    theme: str  # heading of the group of checks
    title: str  # statement that is true if the check passes
    status: Status  # result of the check
    summary: str  # sentence of one line
    evidence: Mapping[str, str]  # observed values, by name
    fix: tuple[str, ...]  # remedies as commands or sentences, the most promising first


@dataclass(frozen=True, slots=True)
class DeviceLine:
    """One GPU of the report."""

    index: int  # NVML index, or the CUDA index if NVML does not answer
    name: str | Unavailable  # name of the model
    uuid: str | Unavailable  # UUID of the GPU
    pci_bus_id: str | Unavailable  # PCI address
    compute_capability: str | Unavailable  # compute capability, such as 9.0
    memory_bytes: int | Unavailable  # size of the device memory


@dataclass(frozen=True, slots=True)
class SetVariable:
    """An environment variable that is set and changes CUDA, a library, a framework or cudakit."""

    name: str  # name of the variable
    value: str  # value of the variable
    effect: str  # what the variable changes
    library: str  # library that reads the variable
    source: str  # section of the documentation, or source file


@dataclass(frozen=True, slots=True)
class DoctorResult:
    """The findings of all checks on one machine."""

    schema: ClassVar[str] = "cudakit.doctor/1"
    simulated: bool  # whether the GPUs are simulated
    status: Status  # worst status of all checks; unknown only if no check could be performed
    counts: Mapping[str, int]  # number of checks by status
    about: Mapping[str, str]  # versions of system, driver and packages
    devices: tuple[DeviceLine, ...]  # GPUs, without MIG instances
    checks: tuple[CheckResult, ...]  # all checks that were selected
    variables: tuple[SetVariable, ...] = ()  # environment variables that are set

    @property
    def is_unknown(self) -> bool:
        """Whether no check could be performed."""
        return self.status is Status.UNKNOWN

    @property
    def failures(self) -> int:
        return self.counts[Status.FAIL.name.lower()]

    @property
    def warnings(self) -> int:
        return self.counts[Status.WARN.name.lower()]
