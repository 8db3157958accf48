"""What became of a scenario: how ours and PyTorch's went, and where they differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from allocator_scenarios.canonical import Addresses
from allocator_scenarios.judge import Taken, differences, run
from allocator_scenarios.scenario import Scenario
from allocator_scenarios.subject import CannotRun, Subject

NOWHERE = Addresses()


@dataclass(frozen=True, slots=True)
class Verdict:
    """One row of the table."""

    number: int
    name: str
    checks: int = 0
    placed: bool = False  # compared at PyTorch's addresses
    not_compared: str = ""  # the reason
    problems: tuple[str, ...] = ()

    @property
    def word(self) -> str:
        """What the table says."""
        if self.problems:
            return f"{len(self.problems)} problems"
        if self.not_compared:
            seen = "as expected, " if self.checks else ""
            return f"{seen}not compared: {self.not_compared}"
        return "equal, at PyTorch's addresses" if self.placed else "equal"


def judge(
    scenario: Scenario,
    ours: Callable[[Addresses], Subject],
    theirs: Subject | None,
) -> Verdict:
    """Run a scenario on both, PyTorch's first, and compare.

    Where they differ, ours is run again with its segments at the addresses that PyTorch got.
    """
    reason = scenario.without_torch or ("no other allocator" if theirs is None else "")
    other: list[Taken] = []
    if theirs is not None and not reason:
        try:
            other = run(scenario, theirs)
        except CannotRun as missing:
            reason = str(missing)
        except Exception as error:  # noqa: BLE001  # whatever it was, the next one is to be run
            return _failed(scenario, "PyTorch", error)
    try:
        own = run(scenario, ours(NOWHERE))
        found = [] if reason else list(differences(own, other))
        placed = bool(found)
        if placed:
            own = run(scenario, ours(_addresses(other)))
            found = list(differences(own, other))
    except CannotRun as missing:
        return Verdict(scenario.number, scenario.name, not_compared=str(missing))
    except Exception as error:  # noqa: BLE001
        return _failed(scenario, "cudakit", error)
    problems = [*_wrong("cudakit", own), *_wrong("PyTorch", other), *found]
    return Verdict(scenario.number, scenario.name, len(own), placed, reason, tuple(problems))


def as_row(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as JSON has it."""
    return {
        "number": verdict.number,
        "name": verdict.name,
        "checks": verdict.checks,
        "at_torch_addresses": verdict.placed,
        "not_compared": verdict.not_compared,
        "problems": list(verdict.problems),
    }


def _wrong(who: str, taken: list[Taken]) -> list[str]:
    return [
        f"{at.label}: {who} is not as expected: {problem}" for at in taken for problem in at.wrong
    ]


def _failed(scenario: Scenario, who: str, error: Exception) -> Verdict:
    words = f"{who} failed: {type(error).__name__}: {error}"
    return Verdict(scenario.number, scenario.name, problems=(words,))


def _addresses(taken: list[Taken]) -> Addresses:
    """Return where segments were put, as the longest trace has it."""
    return max((at.seen.addresses for at in taken), key=len, default=NOWHERE)
