"""The pytest plugin, on suites that use the simulated device."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec

import pytest

pytest_plugins = ["pytester"]

SUITE = """
import pytest
from cudakit.gpu.open import open_gpu

def step(ordered):
    gpu = open_gpu("sim")
    first, second = gpu.stream(), gpu.stream()
    memory = gpu.malloc(1024)
    gpu.fill(memory, 0, 1024, first)
    if ordered:
        gpu.sync_stream(first)
    gpu.fill(memory, 1, 1024, second)
    gpu.close()
"""

RACING = "def test_racing():\n    step(False)\n"
WAITING = "def test_waiting():\n    step(True)\n"
CHECKED = ("--cuda-sanitize", "--cuda-sanitize-on-missing=run")


def run(
    pytester: pytest.Pytester, *tests: str, options: tuple[str, ...] = CHECKED
) -> pytest.RunResult:
    pytester.makepyfile(test_suite="\n".join((SUITE, *tests)))
    return pytester.runpytest_subprocess("-p", "no:randomly", "-p", "no:cacheprovider", *options)


def test_plugin_is_registered_as_entry_point() -> None:
    (found,) = (entry for entry in entry_points(group="pytest11") if entry.name == "cudakit")
    assert found.value == "cudakit.pytest_plugin"


def test_plugin_import_loads_nothing_else() -> None:
    script = (
        "import sys, pytest; before = set(sys.modules); import cudakit.pytest_plugin;"
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == ["cudakit", "cudakit.pytest_plugin"]


def test_racing_test_fails_with_the_report_as_message(pytester: pytest.Pytester) -> None:
    found = run(pytester, RACING, WAITING)

    found.assert_outcomes(failed=1, passed=1)
    found.stdout.fnmatch_lines(
        [
            "1 race between operations on the GPU",
            "write-after-write (certain): the memset on stream 4 writes *",
            "*/test_suite.py:11 step",
            "*/test_suite.py:15 test_racing",
            "  fix:     record an event on stream 3 *",
            "checked: 2 tests, 1 test with races, 4 memsets",
            "FAILED test_suite.py::test_racing - Failed: 1 race between operations on *",
        ]
    )
    found.stdout.no_fnmatch_line("*::test_waiting*")


def test_nothing_is_checked_without_the_option(pytester: pytest.Pytester) -> None:
    found = run(pytester, RACING, options=())

    found.assert_outcomes(passed=1)
    found.stdout.no_fnmatch_line("checked: *")


def test_marker_checks_single_tests(pytester: pytest.Pytester) -> None:
    marked = f"@pytest.mark.cuda_sanitize\n{RACING}"
    found = run(pytester, marked, RACING.replace("racing", "other"), options=CHECKED[1:])

    found.assert_outcomes(failed=1, passed=1)
    found.stdout.fnmatch_lines(["checked: 1 test, *", "FAILED *::test_racing - *"])


def test_failure_of_the_test_itself_is_reported_first(pytester: pytest.Pytester) -> None:
    found = run(pytester, f"{RACING}    assert 1 == 2\n")

    found.assert_outcomes(failed=1)
    found.stdout.fnmatch_lines(["E *assert 1 == 2", "*Captured races call*", "1 race between *"])


def test_known_race_can_be_xfailed(pytester: pytest.Pytester) -> None:
    found = run(pytester, f"@pytest.mark.xfail(strict=True)\n{RACING}")

    found.assert_outcomes(xfailed=1)


def test_race_in_a_fixture_fails_its_test(pytester: pytest.Pytester) -> None:
    fixtures = """
@pytest.fixture
def before():
    step(False)

@pytest.fixture
def after():
    yield
    step(False)

def test_before(before): pass
def test_after(after): pass
"""
    found = run(pytester, fixtures)

    found.assert_outcomes(failed=1, passed=1, errors=1)
    found.stdout.fnmatch_lines(["FAILED *::test_before - *", "ERROR *::test_after - *"])


def test_race_between_two_tests_fails_the_later_and_names_the_earlier(
    pytester: pytest.Pytester,
) -> None:
    tests = """
@pytest.fixture(scope="module")
def shared():
    gpu = open_gpu("sim")
    yield gpu, gpu.malloc(1024), gpu.stream(), gpu.stream()
    gpu.close()

def test_earlier(shared):
    gpu, memory, stream, _ = shared
    gpu.fill(memory, 0, 1024, stream)

def test_between(shared):
    step(True)

def test_later(shared):
    gpu, memory, _, stream = shared
    gpu.fill(memory, 1, 1024, stream)
"""
    found = run(pytester, tests)

    found.assert_outcomes(failed=1, passed=2)
    found.stdout.fnmatch_lines(
        [
            "the earlier operation of the race was enqueued in *::test_earlier",
            "FAILED *::test_later - *",
        ]
    )


def test_races_outside_tests_are_counted_in_the_summary(pytester: pytest.Pytester) -> None:
    found = run(pytester, "step(False)", WAITING)

    found.assert_outcomes(passed=1)
    found.stdout.fnmatch_lines(["checked: 1 test, *, 1 race outside the checked tests"])


def test_ini_option_suppresses_races(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\ncuda_sanitize_suppress = site:*:step\n")
    found = run(pytester, RACING)

    found.assert_outcomes(passed=1)


def test_invalid_suppression_is_a_usage_error(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\ncuda_sanitize_suppress = nonsense\n")
    found = run(pytester, RACING)

    assert found.ret == pytest.ExitCode.USAGE_ERROR
    found.stderr.fnmatch_lines(
        ["ERROR: cuda_sanitize_suppress: 'nonsense' is not a suppression pattern", "hint: *"]
    )


@pytest.mark.parametrize("options", [CHECKED[:1], ()], ids=["option", "marker"])
def test_already_recorded_run_is_a_usage_error(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    monkeypatch.setenv("CUDAKIT_SPOOL", str(pytester.path))
    found = run(pytester, f"@pytest.mark.cuda_sanitize\n{RACING}", options=options)

    assert found.ret == pytest.ExitCode.USAGE_ERROR
    found.stderr.fnmatch_lines(["ERROR: this process is already recorded*"])


@pytest.mark.gpu
def test_run_without_recorder_is_refused_with_a_hint(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_INJECTION64_PATH", "another-tool.so")
    refused = run(pytester, WAITING, options=CHECKED[:1])
    unchecked = run(pytester, WAITING)

    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    refused.stderr.fnmatch_lines(["ERROR: CUDA_INJECTION64_PATH *", "hint: *"])
    unchecked.assert_outcomes(passed=1)
    unchecked.stdout.fnmatch_lines(["CUDA was not recorded: *"])


def test_tests_without_gpu_work_are_reported_as_unchecked(pytester: pytest.Pytester) -> None:
    found = run(pytester, "def test_nothing(): pass\n")

    found.assert_outcomes(passed=1)
    found.stdout.fnmatch_lines(
        ["checked: 1 test", "no GPU work was recorded, so nothing was checked"]
    )


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_require_gpu_fails_a_run_without_a_real_gpu(
    pytester: pytest.Pytester, workers: tuple[str, ...]
) -> None:
    if workers and find_spec("xdist") is None:
        pytest.skip("needs pytest-xdist")
    options = (*CHECKED, "--cuda-sanitize-require-gpu", *workers)
    found = run(pytester, WAITING, options=options)

    found.assert_outcomes(passed=1)
    assert found.ret == pytest.ExitCode.TESTS_FAILED
    found.stdout.fnmatch_lines(["error: no work of a real GPU was recorded (--cuda-sanitize-req*"])


def test_lost_events_fail_the_run(pytester: pytest.Pytester) -> None:
    test = """
def test_many():
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
    gpu = open_gpu("sim")
    memory = gpu.malloc(1024)
    for _ in range(200):
        gpu.fill(memory, 0, 1024, gpu.stream())
        gpu.sync()
    gpu.close()
"""
    found = run(pytester, test)

    found.assert_outcomes(passed=1)
    assert found.ret == pytest.ExitCode.TESTS_FAILED
    found.stdout.fnmatch_lines(
        ["error: * events of process * could not be recorded: File too large"]
    )


@pytest.mark.skipif(find_spec("xdist") is None, reason="needs pytest-xdist")
def test_xdist_workers_check_their_own_tests(pytester: pytest.Pytester) -> None:
    found = run(pytester, RACING, WAITING, options=(*CHECKED, "-n", "2"))

    found.assert_outcomes(failed=1, passed=1)
    found.stdout.fnmatch_lines(["checked: 2 tests, 1 test with races, 4 memsets"])


PROFILED = """
def test_two_fills():
    step(True)

def test_without_gpu():
    pass
"""


def test_profile_prints_the_gpu_time_of_each_test(pytester: pytest.Pytester) -> None:
    found = run(pytester, PROFILED, options=("--cuda-profile",))

    found.assert_outcomes(passed=2)
    (line,) = (line for line in found.outlines if "launches" in line)
    assert line.split()[2:] == ["2", "launches", "test_suite.py::test_two_fills"]


def test_profile_without_gpu_work_says_so(pytester: pytest.Pytester) -> None:
    found = run(pytester, "def test_nothing():\n    pass\n", options=("--cuda-profile",))
    found.stdout.fnmatch_lines(["no GPU work was recorded"])


def test_profile_and_race_check_exclude_each_other(pytester: pytest.Pytester) -> None:
    found = run(pytester, WAITING, options=("--cuda-profile", "--cuda-sanitize"))
    assert found.ret == pytest.ExitCode.USAGE_ERROR
    found.stderr.fnmatch_lines(["*--cuda-profile and --cuda-sanitize exclude each other"])
