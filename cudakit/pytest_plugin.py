"""The pytest plugin: a test with a race between streams fails, with the report as its message.

``pytest --cuda-sanitize`` checks every test, the marker ``cuda_sanitize`` single tests. Without either, the
plugin imports and records nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

if TYPE_CHECKING:
    from cudakit.sanitize.findings import RaceCollector
    from cudakit.sanitize.races import Race, SanitizeResult
    from cudakit.trace.spool import Batch

_PLUGIN_NAME = "cudakit-sanitizer"
_MARKER = "cuda_sanitize"
_REQUIRE_GPU_OPTION = "--cuda-sanitize-require-gpu"
_SUPPRESS_OPTION = "cuda_sanitize_suppress"
# The nouns of the counts in the summary, in singular and plural.
_COUNT_NOUNS = {
    "tests": ("test", "tests"),
    "raced": ("test with races", "tests with races"),
    "launches": ("kernel launch", "kernel launches"),
    "copies": ("copy", "copies"),
    "fills": ("memset", "memsets"),
    "gaps": ("operation not analyzed", "operations not analyzed"),
    "elsewhere": ("race outside the checked tests", "races outside the checked tests"),
}

# A hook wrapper is a generator that returns the result of the wrapped hooks.
Wrapper: TypeAlias = Generator[None, object, object]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the plugin."""
    group = parser.getgroup("cudakit")
    group.addoption(
        "--cuda-sanitize", action="store_true", help="fail each test whose CUDA streams race"
    )
    group.addoption(
        "--cuda-sanitize-on-missing",
        choices=("refuse", "run"),
        default="refuse",
        help="if CUDA cannot be recorded: refuse to run (default), or run without checking and report that",
    )
    group.addoption(
        _REQUIRE_GPU_OPTION,
        action="store_true",
        help="fail the run if no work of a real GPU was recorded in the checked tests",
    )
    group.addoption(
        "--cuda-sanitize-accesses",
        choices=("auto", "exact", "arguments"),
        help="accesses of kernels: auto (recorded, reused if launches repeat), exact (recorded in each"
        " launch) or arguments (assumed from their pointer arguments); default: auto if the GPU"
        " supports it, else arguments",
    )
    group.addoption("--cuda-profile", action="store_true", help="print the GPU time of each test")
    parser.addini(
        _SUPPRESS_OPTION,
        "races that do not fail a test: patterns as for cudakit run --suppress",
        type="linelist",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Start recording for ``--cuda-sanitize``, before pytest imports test modules, which may use CUDA."""
    config.addinivalue_line("markers", f"{_MARKER}: fail this test if its CUDA streams race")
    config.pluginmanager.register(_Summary(), f"{_PLUGIN_NAME}-summary")
    if config.getoption("--cuda-sanitize"):
        _start_recording(config, every_test=True)
    if config.getoption("--cuda-profile"):
        if config.getoption("--cuda-sanitize"):
            raise pytest.UsageError("--cuda-profile and --cuda-sanitize exclude each other")
        if config.getoption("dist", "no") != "no":
            raise pytest.UsageError("--cuda-profile does not work with pytest-xdist; add -n 0")
        with _usage_errors():
            config.pluginmanager.register(_Profile(), "cudakit-profile")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start recording if a test has the marker. No fixture has run yet, so none has used CUDA."""
    is_marked = any(item.get_closest_marker(_MARKER) for item in session.items)
    if is_marked and not session.config.pluginmanager.has_plugin(_PLUGIN_NAME):
        _start_recording(session.config, every_test=False)


def _start_recording(config: pytest.Config, *, every_test: bool) -> None:
    """Start recording, unless the tests run in worker processes of pytest-xdist."""
    if config.getoption("dist", "no") == "no" or hasattr(config, "workerinput"):
        with _usage_errors():
            config.pluginmanager.register(_Sanitizer(config, every_test=every_test), _PLUGIN_NAME)


@contextmanager
def _usage_errors() -> Iterator[None]:
    """Report an error of cudakit as pytest's UsageError."""
    from cudakit.errors import CudakitError

    try:
        yield
    except CudakitError as error:
        hint = f"\nhint: {error.hint}" if error.hint else ""
        raise pytest.UsageError(f"{error.message}{hint}") from error


class _Profile:
    """Measures the GPU time of each test."""

    def __init__(self) -> None:
        from cudakit.api.profile import TestTimes

        self._times = TestTimes()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Wrapper:
        with self._times.measure(item.nodeid):
            return (yield)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        from cudakit.units import format_count, format_seconds

        times = self._times.finish()
        terminalreporter.section("GPU time", sep="-")
        for used in times:
            launches = f"{format_count(used.launches)} launches"
            seconds = format_seconds(used.busy_ns / 1e9)
            terminalreporter.write_line(f"{seconds:>10}  {launches:>14}  {used.test}")
        if not times:
            terminalreporter.write_line("no GPU work was recorded")


class _TestsByCall:
    """The test of each CUDA call, by the call's number in one trace."""

    def __init__(self) -> None:
        self._last_calls: list[int] = []
        self._tests: list[str] = []

    def add_test(self, last_call: int, test: str) -> None:
        """Record that a test made the calls after the last recorded call, up to the call ``last_call``."""
        if self._tests and self._tests[-1] == test:
            self._last_calls[-1] = max(self._last_calls[-1], last_call)
        else:
            self._last_calls.append(last_call)
            self._tests.append(test)

    def test_of(self, call_number: int) -> str:
        """Return the id of the test that made a call, or an empty string if no test was running."""
        return self._tests[min(bisect_left(self._last_calls, call_number), len(self._tests) - 1)]


class _Sanitizer:
    """Records this process, and attributes each race to the running test."""

    def __init__(self, config: pytest.Config, *, every_test: bool) -> None:
        from cudakit.record.recording import begin
        from cudakit.sanitize.baseline import suppressions
        from cudakit.sanitize.detector import RaceDetector

        self._checks_every_test = every_test
        self._suppressions = suppressions(config.getini(_SUPPRESS_OPTION), origin=_SUPPRESS_OPTION)
        self._detector = RaceDetector()
        self._report_outside_tests = self._report = self._new_report()
        self._test = ""  # id of the running test; empty if it is not checked
        self._test_count = 0
        self._tests_with_races: set[str] = set()
        self._tests_by_call: defaultdict[tuple[int, int], _TestsByCall] = defaultdict(_TestsByCall)
        self._shared_race_notes: list[str] = []  # notes on races with operations of earlier tests
        # Sentences on operations that may race with a launch that was not recorded: a dict as an ordered set.
        self._unverified_sentences: dict[str, None] = {}
        self._recording = begin(
            self._feed,
            accesses=config.getoption("--cuda-sanitize-accesses"),
            on_missing=config.getoption("--cuda-sanitize-on-missing"),
        )
        self._recording.record_simulated(enabled=True)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Wrapper:
        if self._checks_every_test or item.get_closest_marker(_MARKER):
            with self._all_work_checked():
                self._report = self._new_report()
                self._test = item.nodeid
                self._test_count += 1
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Wrapper:
        return (yield from self._check_phase(item, "call"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Wrapper:
        try:
            return (yield from self._check_phase(item, "teardown"))
        finally:
            self._report, self._test = self._report_outside_tests, ""

    def summary(self) -> dict[str, Any]:
        """Return the counts by the keys of ``_COUNT_NOUNS``, whether a real GPU worked, and the notes."""
        from cudakit.sanitize.findings import findings

        with self._all_work_checked():
            result = self._detector.result(self._report_outside_tests)
            self._add_unverified(result)
        coverage = result.coverage
        counts = {
            "tests": self._test_count,
            "raced": len(self._tests_with_races),
            "launches": coverage.launches + coverage.graph_launches,
            "copies": coverage.copies,
            "fills": coverage.fills,
            "gaps": sum(result.gaps.values()),
            "elsewhere": len(findings(result)),
            "real_gpu": self._detector.has_recorded_gpu_work,
        }
        return {
            "counts": counts,
            # Why CUDA is not recorded, or why accesses are not exact.
            "notes": self._recording.cuda.notes,
            # Why recorded events are missing, or why a race may be missing.
            "incomplete": (*self._recording.incomplete, *self._unverified_sentences),
        }

    def _check_phase(self, item: pytest.Item, phase: str) -> Wrapper:
        """Fail the test if it has a race in this phase. If it fails anyway, add the race to its report."""
        try:
            hook_result = yield
        except BaseException:
            if race_message := self._race_message():
                item.add_report_section(phase, "races", race_message)
            raise
        if race_message := self._race_message():
            pytest.fail(race_message, pytrace=False)
        return hook_result

    def _race_message(self) -> str:
        """Return the message for the races since the last call, or an empty string."""
        from cudakit.sanitize.findings import findings, message

        if self._report is self._report_outside_tests:
            return ""
        with self._all_work_checked():
            result = self._detector.result(self._report)
            races = findings(result)
            self._add_unverified(result)
            shared_race_notes, self._shared_race_notes = self._shared_race_notes, []
            self._report = self._new_report()
        if not races:
            return ""
        self._tests_with_races.add(self._test)
        return "\n\n".join([message(races), *dict.fromkeys(shared_race_notes)])

    def _add_unverified(self, result: SanitizeResult) -> None:
        """Add the operations of a result that may race with a launch that was not recorded."""
        advice = "rerun with --cuda-sanitize-accesses exact"
        for pair in result.unverified:
            self._unverified_sentences[f"{pair.sentence}: {advice}"] = None

    def _new_report(self) -> RaceCollector:
        from cudakit.gpu.compile import demangle
        from cudakit.sanitize.findings import RaceCollector

        return RaceCollector(suppressions=self._suppressions, demangle=demangle)

    @contextmanager
    def _all_work_checked(self) -> Iterator[None]:
        """Check all work that was enqueued so far. Inside the ``with`` block, nothing is recorded."""
        with self._recording.synchronize_and_drain():
            for trace, races in self._detector.finish(self._report).items():
                self._add_shared_races(self._tests_by_call[trace], races)
            yield

    def _feed(self, batch: Batch) -> None:
        tests_by_call = self._tests_by_call[batch.process, batch.trace_number]
        tests_by_call.add_test(int(batch.records["seq"].max()), self._test)
        self._add_shared_races(tests_by_call, self._detector.feed(batch, self._report))

    def _add_shared_races(self, tests_by_call: _TestsByCall, races: Iterable[Race]) -> None:
        """Add a note for each race with an operation of another test."""
        for race in races:
            test = tests_by_call.test_of(race.previous.seq)
            if race.previous.seq and test != self._test:
                test_or_outside = f"in {test}" if test else "outside the checked tests"
                self._shared_race_notes.append(
                    f"the earlier operation of the race was enqueued {test_or_outside}"
                )


class _Summary:
    """Prints the summary of this process, or of the workers of pytest-xdist."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        # These are dicts instead of sets, because dicts keep the order of their keys.
        self._notes: dict[str, None] = {}
        self._incomplete_reasons: dict[str, None] = {}

    @pytest.hookimpl(trylast=True)  # after pytest-xdist has collected the output of its workers
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if sanitizer := session.config.pluginmanager.get_plugin(_PLUGIN_NAME):
            summary = sanitizer.summary()
            if hasattr(session.config, "workeroutput"):
                session.config.workeroutput[_PLUGIN_NAME] = summary
            self._add_counts(summary)
        if self._errors(session.config) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        # A crashed worker has no output.
        self._add_counts(getattr(node, "workeroutput", {}).get(_PLUGIN_NAME, {}))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._counts["tests"]:
            terminalreporter.section("CUDA races", sep="-")
            counts = {name: self._counts[name] for name in _COUNT_NOUNS if self._counts[name]}
            texts = (
                f"{count:,} {_COUNT_NOUNS[name][count != 1]}" for name, count in counts.items()
            )
            terminalreporter.write_line(f"checked: {', '.join(texts)}")
            if not counts.keys() & {"launches", "copies", "fills"}:
                terminalreporter.write_line("no GPU work was recorded, so nothing was checked")
        for note in self._notes:
            terminalreporter.write_line(note)
        for error in self._errors(terminalreporter.config):
            terminalreporter.write_line(f"error: {error}", red=True)

    def _errors(self, config: pytest.Config) -> list[str]:
        """Return the reasons to fail the run."""
        errors = list(self._incomplete_reasons)
        if config.getoption(_REQUIRE_GPU_OPTION) and not self._counts["real_gpu"]:
            errors.append(f"no work of a real GPU was recorded ({_REQUIRE_GPU_OPTION})")
        return errors

    def _add_counts(self, summary: dict[str, Any]) -> None:
        self._counts.update(summary.get("counts", {}))
        self._notes |= dict.fromkeys(summary.get("notes", ()))
        self._incomplete_reasons |= dict.fromkeys(summary.get("incomplete", ()))
