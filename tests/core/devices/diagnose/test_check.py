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


def test_a_check_that_breaks_costs_itself_only() -> None:
    found = Check("CK900", "it works", broken).run(RunContext())

    assert found == Finding(UNKNOWN, "the check broke: ZeroDivisionError: over 0")


def test_a_check_that_cannot_tell_gives_its_reason() -> None:
    assert Check("CK901", "it is known", at_a_loss).run(RunContext()).summary == (
        "nobody told of 0 variables"
    )


def test_the_explanation_of_a_check_is_its_docstring() -> None:
    explanation = Check("CK900", "it works", broken).explanation

    assert explanation == "Break, as a check of unforeseen circumstances would."


def test_findings_join_with_the_worst_first_and_nothing_twice() -> None:
    found = combine(
        [ok("fine"), warn("slow", {"a": "1"}, "wait"), fail("dead", {"b": "2"}, "mend", "wait")],
        otherwise=ok("unused"),
    )

    assert found == Finding(FAIL, "dead; slow", {"b": "2", "a": "1"}, ("mend", "wait"))


def test_without_a_finding_all_is_well() -> None:
    assert combine([ok("fine")], otherwise=ok("all fine")).summary == "all fine"


def test_what_is_worse_is_greater() -> None:
    assert list(Status) == sorted(Status) == [OK, UNKNOWN, WARN, FAIL]
