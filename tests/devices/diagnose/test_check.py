from __future__ import annotations

from devices.diagnose.machines import FAIL, OK, UNKNOWN, WARN

from cudakit.devices.diagnose.check import (
    Check,
    Finding,
    NotCheckable,
    Status,
    combine_findings,
    fail_finding,
    ok_finding,
    warn_finding,
)
from cudakit.gpu.api.run_context import RunContext


def broken(context: RunContext) -> Finding:
    """Raise an unexpected error."""
    raise ZeroDivisionError(f"over {len(context.variables)}")


def without_fact(context: RunContext) -> Finding:
    """Raise NotCheckable with a reason."""
    raise NotCheckable(f"{len(context.variables)} variables are set")


def test_broken_check_is_unknown() -> None:
    finding = Check("CK900", "it works", broken).run(RunContext())

    assert finding == Finding(UNKNOWN, "internal error in this check: ZeroDivisionError: over 0")


def test_uncheckable_check_is_unknown_with_reason() -> None:
    assert Check("CK901", "it is known", without_fact).run(RunContext()).summary == (
        "0 variables are set"
    )


def test_explanation_is_docstring() -> None:
    explanation = Check("CK900", "it works", broken).explanation

    assert explanation == "Raise an unexpected error."


def test_combined_findings_have_worst_first_and_no_duplicates() -> None:
    finding = combine_findings(
        [
            ok_finding("fine"),
            warn_finding("slow", {"a": "1"}, "wait"),
            fail_finding("dead", {"b": "2"}, "repair", "wait"),
        ],
        otherwise=ok_finding("unused"),
    )

    assert finding == Finding(FAIL, "dead; slow", {"b": "2", "a": "1"}, ("repair", "wait"))


def test_combined_findings_without_problem_are_ok() -> None:
    assert (
        combine_findings([ok_finding("fine")], otherwise=ok_finding("all fine")).summary
        == "all fine"
    )


def test_statuses_ascend_by_severity() -> None:
    assert list(Status) == sorted(Status) == [OK, UNKNOWN, WARN, FAIL]
