"""Run scenarios on subjects, check what each one expects, and compare two subjects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from allocator_scenarios.canonical import (
    BY_POOL,
    Addresses,
    CanonicalSnapshot,
    Names,
    canonical,
    name_pools,
    sort_by_segment,
)
from allocator_scenarios.scenario import CannotRun, Check, Layout, Scenario, Subject, full_name

MAX_REPORTED_DIFFERENCES = 12  # The maximum number of reported differences of one kind at a check.


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The state of an allocator at a check, and the expectations of the check that failed."""

    check: Check
    statistics: dict[str, int]
    snapshot: CanonicalSnapshot
    failures: tuple[str, ...]


def run(scenario: Scenario, subject: Subject) -> list[CheckResult]:
    """Run a scenario from its beginning to its end."""
    subject.begin(scenario.settings)
    try:
        return list(_checks(scenario, subject))
    finally:
        subject.end()


def _checks(scenario: Scenario, subject: Subject) -> Iterator[CheckResult]:
    statistics_before, entries_before = subject.statistics(), 0
    restore_entries: list[slice] = []
    for check in scenario.steps(subject):
        raw_statistics = subject.statistics()
        raw_snapshot = subject.snapshot()
        names = Names(
            subject.stream_names(), subject.pool_names(), subject.total_bytes * 9 // 8 & -(2 << 20)
        )
        statistics = name_pools(raw_statistics, names)
        snapshot = canonical(raw_snapshot, names)
        if check.restored:
            restore_entries.append(slice(entries_before, len(snapshot.trace)))
        for entries in restore_entries:
            snapshot.trace[entries] = sort_by_segment(snapshot.trace[entries])
        failures = failed_expectations(check, statistics_before, statistics, snapshot)
        yield CheckResult(check, statistics, snapshot, tuple(failures))
        statistics_before, entries_before = statistics, len(snapshot.trace)


def failed_expectations(
    check: Check,
    statistics_before: Mapping[str, int],
    statistics: Mapping[str, int],
    snapshot: CanonicalSnapshot,
) -> Iterator[str]:
    """Yield a sentence for each expectation of a check that failed."""
    for short_name, expected_change in check.changes.items():
        name = full_name(short_name)
        change = statistics[name] - statistics_before[name]
        if change != expected_change:
            yield f"{name} changed by {change:,}, not by {expected_change:,}"
    for name, value in check.now.items():
        if statistics[name] != value:
            yield f"{name} is {statistics[name]:,}, not {value:,}"
    if check.blocks is not None and (blocks := layout(snapshot)) != check.blocks:
        yield f"blocks are {blocks}, not {check.blocks}"
    for fact, holds in check.facts.items():
        if not holds:
            yield f"it does not hold: {fact}"


def layout(snapshot: CanonicalSnapshot) -> Layout:
    """Return the size and the state of each block, by segment."""
    return [
        [(block["size"], block["state"]) for block in segment["blocks"]]
        for segment in snapshot.segments
    ]


def differences(
    cudakit_results: list[CheckResult], torch_results: list[CheckResult]
) -> Iterator[str]:
    """Yield a sentence with both values for each difference between two runs of a scenario."""
    if len(cudakit_results) != len(torch_results):
        yield f"{len(cudakit_results)} checks against {len(torch_results)}"
    for cudakit_result, torch_result in zip(cudakit_results, torch_results, strict=False):
        label = cudakit_result.check.label
        for same_kind in _differences_at_check(cudakit_result, torch_result):
            yield from (f"{label}: {difference}" for difference in _shortened(list(same_kind)))


def _shortened(sentences: list[str]) -> list[str]:
    """Keep the first sentences; the last one says how many were left out."""
    omitted = len(sentences) - MAX_REPORTED_DIFFERENCES
    if omitted <= 0:
        return sentences
    return [*sentences[:MAX_REPORTED_DIFFERENCES], f"and {omitted:,} more"]


def _differences_at_check(
    cudakit_result: CheckResult, torch_result: CheckResult
) -> Iterator[Iterator[str]]:
    """Compare two states; yield an iterator for each kind of value."""
    snapshot, torch_snapshot = cudakit_result.snapshot, torch_result.snapshot
    yield _value_differences("fact", cudakit_result.check.facts, torch_result.check.facts)
    # cudakit has settings that PyTorch lacks.
    yield _value_differences(
        "setting", snapshot.settings, torch_snapshot.settings, names=torch_snapshot.settings
    )
    yield _missing_keys(snapshot.keys, torch_snapshot.keys)
    yield _row_differences("segment", snapshot.segments, torch_snapshot.segments)
    yield _row_differences("trace", snapshot.trace, torch_snapshot.trace)
    torch_statistics = torch_result.statistics
    statistics = _without_pools_unless_reported(cudakit_result.statistics, torch_statistics)
    yield _value_differences("statistic", statistics, torch_statistics)


def _without_pools_unless_reported(
    statistics: Mapping[str, int], torch_statistics: Mapping[str, int]
) -> dict[str, int]:
    """Omit the reserved bytes of private pools if PyTorch does not report them (before 2.15)."""
    torch_reports_pools = any(name.startswith(BY_POOL) for name in torch_statistics)
    return {
        name: value
        for name, value in statistics.items()
        if torch_reports_pools or not name.startswith(BY_POOL)
    }


def _missing_keys(
    keys_by_kind: Mapping[str, set[str]], torch_keys_by_kind: Mapping[str, set[str]]
) -> Iterator[str]:
    for kind, torch_keys in torch_keys_by_kind.items():
        if missing := torch_keys - keys_by_kind[kind]:
            yield f"{kind} lacks the keys {', '.join(sorted(missing))}"


def _value_differences(
    kind: str,
    values: Mapping[str, Any],
    torch_values: Mapping[str, Any],
    *,
    names: Iterable[str] | None = None,
) -> Iterator[str]:
    """Compare the values of names; None means the names of both mappings."""
    for name in sorted({*values, *torch_values}) if names is None else names:
        value, torch_value = values.get(name, "missing"), torch_values.get(name, "missing")
        if value != torch_value:
            yield f"{kind} {name}: {_formatted(value)}, PyTorch {_formatted(torch_value)}"


def _row_differences(
    kind: str, rows: list[dict[str, Any]], torch_rows: list[dict[str, Any]]
) -> Iterator[str]:
    """Compare segments, blocks or trace entries by their position."""
    for position, (row, torch_row) in enumerate(zip_longest(rows, torch_rows, fillvalue={})):
        for key in sorted({*row, *torch_row}):
            # Keys that only cudakit has, such as the pool of an entry, are not compared.
            if torch_row and key not in torch_row:
                continue
            value, torch_value = row.get(key), torch_row.get(key)
            if value == torch_value:
                continue
            if key == "blocks" and row and torch_row:
                yield from _row_differences(f"{kind} {position} block", value, torch_value)
            else:
                yield (
                    f"{kind} {position} {key}: {_formatted(value)}, PyTorch {_formatted(torch_value)}"
                )


def _formatted(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else f"{value}"


NO_ADDRESSES = Addresses()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a scenario: one row of the table."""

    number: int
    name: str
    checks: int = 0
    # Whether the comparison was repeated with segments at PyTorch's addresses.
    at_torch_addresses: bool = False
    not_compared_reason: str = ""  # Why PyTorch was not compared; empty if it was.
    problems: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """Words for the result in the table."""
        if self.problems:
            return f"{len(self.problems)} problems"
        if self.not_compared_reason:
            outcome = "as expected, " if self.checks else ""
            return f"{outcome}not compared: {self.not_compared_reason}"
        return "equal, at PyTorch's addresses" if self.at_torch_addresses else "equal"


def compare_subjects(
    scenario: Scenario,
    make_cudakit_subject: Callable[[Addresses], Subject],
    torch_subject: Subject | None,
) -> Verdict:
    """Run a scenario on both allocators, PyTorch's first, and compare.

    If they differ, cudakit's allocator runs again with its segments at PyTorch's addresses.
    """
    no_torch_reason = "no other allocator" if torch_subject is None else ""
    reason = scenario.without_torch or no_torch_reason
    torch_results: list[CheckResult] = []
    if torch_subject is not None and not reason:
        try:
            torch_results = run(scenario, torch_subject)
        except CannotRun as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001  # the scenarios after this one must still run
            return _failed(scenario, "PyTorch", error)
    try:
        results = run(scenario, make_cudakit_subject(NO_ADDRESSES))
        found = [] if reason else list(differences(results, torch_results))
        at_torch_addresses = bool(found)
        if at_torch_addresses:
            results = run(scenario, make_cudakit_subject(_addresses(torch_results)))
            found = list(differences(results, torch_results))
    except CannotRun as error:
        return Verdict(scenario.number, scenario.name, not_compared_reason=str(error))
    except Exception as error:  # noqa: BLE001
        return _failed(scenario, "cudakit", error)
    problems = [*_failures("cudakit", results), *_failures("PyTorch", torch_results), *found]
    return Verdict(
        scenario.number, scenario.name, len(results), at_torch_addresses, reason, tuple(problems)
    )


def as_row(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict for JSON."""
    return {
        "number": verdict.number,
        "name": verdict.name,
        "checks": verdict.checks,
        "at_torch_addresses": verdict.at_torch_addresses,
        "not_compared": verdict.not_compared_reason,
        "problems": list(verdict.problems),
    }


def _failures(allocator_name: str, results: list[CheckResult]) -> list[str]:
    return [
        f"{result.check.label}: {allocator_name} is not as expected: {failure}"
        for result in results
        for failure in result.failures
    ]


def _failed(scenario: Scenario, allocator_name: str, error: Exception) -> Verdict:
    problem = f"{allocator_name} failed: {type(error).__name__}: {error}"
    return Verdict(scenario.number, scenario.name, problems=(problem,))


def _addresses(results: list[CheckResult]) -> Addresses:
    """Return the addresses of segments from the longest trace."""
    return max((result.snapshot.addresses for result in results), key=len, default=NO_ADDRESSES)
