"""What a check is, and what it finds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias

from cudakit.gpu.api.run_context import RunContext


class Status(IntEnum):
    """How a check came out, the worse the higher."""

    OK = 0
    UNKNOWN = 1  # could not be judged; never counts as a finding
    WARN = 2  # CUDA works, but something slows it down, or will surprise
    FAIL = 3  # CUDA does not work, or not on every GPU


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found."""

    status: Status
    summary: str  # one line that can stand alone
    evidence: Mapping[str, str] = field(default_factory=dict)  # what was seen, by name
    fix: tuple[str, ...] = ()  # commands or sentences, most promising first


Examine: TypeAlias = Callable[[RunContext], Finding]


@dataclass(frozen=True, slots=True)
class Check:
    """One question. Its explanation is the docstring of the function that answers it."""

    id: str  # CK and three digits; never given to another question
    title: str  # what holds where all is well
    examine: Examine

    @property
    def explanation(self) -> str:
        return inspect.getdoc(self.examine) or ""


class CannotTell(Exception):
    """A check cannot be judged, and why."""


def ok(summary: str, evidence: Mapping[str, str] | None = None) -> Finding:
    """Make the finding that all is well."""
    return Finding(Status.OK, summary, evidence or {})


def warn(summary: str, evidence: Mapping[str, str] | None = None, *fix: str) -> Finding:
    """Make the finding of something that slows CUDA down, or will surprise."""
    return Finding(Status.WARN, summary, evidence or {}, fix)


def fail(summary: str, evidence: Mapping[str, str] | None = None, *fix: str) -> Finding:
    """Make the finding of something that does not work."""
    return Finding(Status.FAIL, summary, evidence or {}, fix)


def together(findings: Iterable[Finding], *, otherwise: Finding) -> Finding:
    """Join the findings of one check that are not ok, the worst first; ``otherwise`` where all are."""
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


def judge(check: Check, circumstances: RunContext) -> Finding:
    """Let a check judge; where it cannot, or breaks, the finding is UNKNOWN with the reason."""
    try:
        return check.examine(circumstances)
    except CannotTell as reason:
        return Finding(Status.UNKNOWN, str(reason))
    except Exception as error:  # noqa: BLE001 one broken check must not cost the others
        return Finding(Status.UNKNOWN, f"the check broke: {type(error).__name__}: {error}")
