"""``doctor``: why does CUDA not work, or not well, here? Checks that judge RunContext. Pure."""

from __future__ import annotations

from collections.abc import Collection

from cudakit.core.devices.diagnose.about import device_lines, versions
from cudakit.core.devices.diagnose.check import Check, Status, judge
from cudakit.core.devices.diagnose.registry import DEEP, THEMES, every_check
from cudakit.core.devices.diagnose.result import (
    EXPLANATION_SCHEMA,
    SCHEMA,
    DoctorResult,
    Explanation,
    Judged,
    counted,
)
from cudakit.errors import UsageError
from cudakit.gpu.api.run_context import RunContext


def diagnose(
    circumstances: RunContext,
    *,
    only: Collection[str] = (),
    skip: Collection[str] = (),
    deep: bool = False,
) -> DoctorResult:
    """Make the checks: all, or ``only`` some, without those to ``skip``; ``deep`` adds the trials.

    Raises UsageError for an id that no check has, and for a trial without ``deep``.
    """
    refuse_unknown(only, skip, deep=deep)
    themes = {**THEMES, **DEEP} if deep else THEMES
    checks = tuple(
        _judged(theme, check, circumstances)
        for theme, members in themes.items()
        for check in members
        if (not only or check.id in only) and check.id not in skip
    )
    return DoctorResult(
        schema=SCHEMA,
        simulated=circumstances.simulated,
        status=max((check.status for check in checks), default=Status.OK),
        counts=counted(checks),
        about=versions(circumstances),
        devices=device_lines(circumstances),
        checks=checks,
    )


def refuse_unknown(only: Collection[str], skip: Collection[str], *, deep: bool) -> None:
    """Raise UsageError for a selection of checks that cannot be made."""
    for name in (*only, *skip):
        find(name)
    trials = {check.id for members in DEEP.values() for check in members}
    if not deep and trials & set(only):
        raise UsageError(
            f"{', '.join(sorted(trials & set(only)))} uses the GPU", hint="add --deep to allow it"
        )


def find(name: str) -> Check:
    """Return the check of an id. Raises UsageError where there is none."""
    known = every_check()
    if name not in known:
        raise UsageError(
            f"there is no check {name!r}",
            hint=f"checks are {min(known)} to {max(known)}: cudakit doctor lists them",
        )
    return known[name]


def explain(name: str) -> Explanation:
    """Say what a check looks at and why. Raises UsageError for an id that no check has."""
    check = find(name)
    return Explanation(EXPLANATION_SCHEMA, check.id, check.title, check.explanation)


def _judged(theme: str, check: Check, circumstances: RunContext) -> Judged:
    found = judge(check, circumstances)
    return Judged(
        id=check.id,
        theme=theme,
        title=check.title,
        status=found.status,
        summary=found.summary,
        evidence=found.evidence,
        fix=found.fix,
    )
