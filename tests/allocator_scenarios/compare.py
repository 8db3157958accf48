"""Run scenarios on subjects, check what each one expects, and compare two subjects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from allocator_scenarios.canonical import (
    BY_POOL,
    Addresses,
    Names,
    Seen,
    canonical,
    named,
    segment_by_segment,
)
from allocator_scenarios.scenario import CannotRun, Check, Layout, Scenario, Subject, full_name

MOST_SHOWN = 12  # The maximum number of reported differences of one kind at a check.


@dataclass(frozen=True, slots=True)
class Taken:
    """The state of a subject at a check, and the failed expectations."""

    check: Check
    statistics: dict[str, int]
    seen: Seen
    wrong: tuple[str, ...]


def run(scenario: Scenario, subject: Subject) -> list[Taken]:
    """Run a scenario from its beginning to its end."""
    subject.begin(scenario.settings)
    try:
        return list(_checks(scenario, subject))
    finally:
        subject.end()


def _checks(scenario: Scenario, subject: Subject) -> Iterator[Taken]:
    before, known, restores = subject.statistics(), 0, list[slice]()
    for check in scenario.steps(subject):
        found = subject.statistics()
        snapshot = subject.snapshot()
        names = Names(
            subject.stream_names(), subject.pool_names(), subject.total_bytes * 9 // 8 & -(2 << 20)
        )
        statistics = named(found, names)
        seen = canonical(snapshot, names)
        if check.restored:
            restores.append(slice(known, len(seen.trace)))
        for entries in restores:
            seen.trace[entries] = segment_by_segment(seen.trace[entries])
        yield Taken(check, statistics, seen, tuple(wrong(check, before, statistics, seen)))
        before, known = statistics, len(seen.trace)


def wrong(
    check: Check, before: Mapping[str, int], now: Mapping[str, int], seen: Seen
) -> Iterator[str]:
    """Yield the failed expectations of a check."""
    for short, change in check.changes.items():
        name = full_name(short)
        if now[name] - before[name] != change:
            yield f"{name} changed by {now[name] - before[name]:,}, not by {change:,}"
    for name, value in check.now.items():
        if now[name] != value:
            yield f"{name} is {now[name]:,}, not {value:,}"
    if check.blocks is not None and (found := layout(seen)) != check.blocks:
        yield f"blocks are {found}, not {check.blocks}"
    for fact, holds in check.facts.items():
        if not holds:
            yield f"it does not hold: {fact}"


def layout(seen: Seen) -> Layout:
    """Return the size and the state of each block, by segment."""
    return [
        [(block["size"], block["state"]) for block in segment["blocks"]]
        for segment in seen.segments
    ]


def differences(ours: list[Taken], theirs: list[Taken]) -> Iterator[str]:
    """Yield the differences between two runs: the check and both values."""
    if len(ours) != len(theirs):
        yield f"{len(ours)} checks against {len(theirs)}"
    for own, other in zip(ours, theirs, strict=False):
        for found in _at_a_check(own, other):
            yield from (f"{own.check.label}: {difference}" for difference in _first(list(found)))


def _first(found: list[str]) -> list[str]:
    left = len(found) - MOST_SHOWN
    return [*found[:MOST_SHOWN], f"and {left:,} more"] if left > 0 else found


def _at_a_check(own: Taken, other: Taken) -> Iterator[Iterator[str]]:
    """Compare two states, one kind of value after the other."""
    yield _mappings("fact", own.check.facts, other.check.facts)
    yield _mappings("setting", own.seen.settings, other.seen.settings, extra_is_fine=True)
    yield _lacking(own.seen.keys, other.seen.keys)
    yield _sequences("segment", own.seen.segments, other.seen.segments)
    yield _sequences("trace", own.seen.trace, other.seen.trace)
    yield _mappings("statistic", _known_to(other.statistics, own.statistics), other.statistics)


def _known_to(other: Mapping[str, int], own: Mapping[str, int]) -> dict[str, int]:
    """Omit the reserved bytes of private pools if PyTorch does not report them (before 2.15)."""
    knows = any(name.startswith(BY_POOL) for name in other)
    return {name: n for name, n in own.items() if knows or not name.startswith(BY_POOL)}


def _lacking(own: Mapping[str, set[str]], other: Mapping[str, set[str]]) -> Iterator[str]:
    for kind, keys in other.items():
        if missing := keys - own[kind]:
            yield f"{kind} lacks the keys {', '.join(sorted(missing))}"


def _mappings(
    kind: str, own: Mapping[str, Any], other: Mapping[str, Any], *, extra_is_fine: bool = False
) -> Iterator[str]:
    for name in other if extra_is_fine else sorted({*own, *other}):
        mine, yours = own.get(name, "missing"), other.get(name, "missing")
        if mine != yours:
            yield f"{kind} {name}: {_shown(mine)}, PyTorch {_shown(yours)}"


def _sequences(kind: str, own: list[dict[str, Any]], other: list[dict[str, Any]]) -> Iterator[str]:
    for number, (mine, yours) in enumerate(zip_longest(own, other, fillvalue={})):
        for key in sorted({*mine, *yours}):
            # Keys that only cudakit has, such as the pool of an entry, are not compared.
            if yours and key not in yours:
                continue
            if mine.get(key) == yours.get(key):
                continue
            if key == "blocks" and mine and yours:
                yield from _sequences(f"{kind} {number} block", mine[key], yours[key])
            else:
                yield (
                    f"{kind} {number} {key}: {_shown(mine.get(key))}, PyTorch {_shown(yours.get(key))}"
                )


def _shown(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else f"{value}"


NOWHERE = Addresses()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a scenario: one row of the table."""

    number: int
    name: str
    checks: int = 0
    placed: bool = False  # Whether the comparison was repeated at PyTorch's addresses.
    not_compared: str = ""  # The reason.
    problems: tuple[str, ...] = ()

    @property
    def word(self) -> str:
        """The word for the result in the table."""
        if self.problems:
            return f"{len(self.problems)} problems"
        if self.not_compared:
            seen = "as expected, " if self.checks else ""
            return f"{seen}not compared: {self.not_compared}"
        return "equal, at PyTorch's addresses" if self.placed else "equal"


def compare_subjects(
    scenario: Scenario,
    ours: Callable[[Addresses], Subject],
    theirs: Subject | None,
) -> Verdict:
    """Run a scenario on both allocators, PyTorch's first, and compare.

    If they differ, cudakit's allocator runs again with its segments at PyTorch's addresses.
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
    """Return a verdict for JSON."""
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
        f"{at.check.label}: {who} is not as expected: {problem}"
        for at in taken
        for problem in at.wrong
    ]


def _failed(scenario: Scenario, who: str, error: Exception) -> Verdict:
    words = f"{who} failed: {type(error).__name__}: {error}"
    return Verdict(scenario.number, scenario.name, problems=(words,))


def _addresses(taken: list[Taken]) -> Addresses:
    """Return the addresses of segments from the longest trace."""
    return max((at.seen.addresses for at in taken), key=len, default=NOWHERE)
