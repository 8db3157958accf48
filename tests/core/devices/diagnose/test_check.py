from __future__ import annotations

from core.devices.diagnose.machines import FAIL, OK, UNKNOWN, WARN

from cudakit.core.devices.diagnose.check import (
    Check,
    Finding,
    NotCheckable,
    Status,
    combine,
    fail,
    ok,
    warn,
)
from cudakit.gpu.api.run_context import RunContext


def broken(context: RunContext) -> Finding:
    """Break, as a check of unforeseen circumstances would."""
    raise ZeroDivisionError(f"over {len(context.variables)}")


def at_a_loss(context: RunContext) -> Finding:
    """Say that nothing can be said."""
    raise NotCheckable(f"nobody told of {len(context.variables)} variables")


def test_broken_check_is_unknown() -> None:
    found = Check("CK900", "it works", broken).run(RunContext())

    assert found == Finding(UNKNOWN, "the check broke: ZeroDivisionError: over 0")


def test_uncheckable_check_is_unknown_with_reason() -> None:
    assert Check("CK901", "it is known", at_a_loss).run(RunContext()).summary == (
        "nobody told of 0 variables"
    )


def test_explanation_is_docstring() -> None:
    explanation = Check("CK900", "it works", broken).explanation

    assert explanation == "Break, as a check of unforeseen circumstances would."


def test_combined_findings_have_worst_first_and_no_duplicates() -> None:
    found = combine(
        [ok("fine"), warn("slow", {"a": "1"}, "wait"), fail("dead", {"b": "2"}, "mend", "wait")],
        otherwise=ok("unused"),
    )

    assert found == Finding(FAIL, "dead; slow", {"b": "2", "a": "1"}, ("mend", "wait"))


def test_combined_findings_without_problem_are_ok() -> None:
    assert combine([ok("fine")], otherwise=ok("all fine")).summary == "all fine"


def test_statuses_ascend_by_severity() -> None:
    assert list(Status) == sorted(Status) == [OK, UNKNOWN, WARN, FAIL]
