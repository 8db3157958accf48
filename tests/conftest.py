"""Fixtures of all tests, and a clean environment for each test."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
from invocation import Cli, run_cli

import cudakit

GOLDEN = Path(__file__).parent / "golden"

# The same examples in each run; --hypothesis-profile explore tries others.
hypothesis.settings.register_profile("steady", derandomize=True, deadline=None)
hypothesis.settings.register_profile("explore", max_examples=1000, deadline=None)
hypothesis.settings.load_profile("steady")

# Variables that change what a command prints.
SCRUBBED = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TERM", "PYTHONUNBUFFERED")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite the golden files; then read the diff"
    )
    parser.addoption("--all", action="store_true", help="run the tests marked thorough, too")


def pytest_configure() -> None:
    """Set what each child would inherit: undo a background job's ignored signals, and fix the umask."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.umask(0o022)


def pytest_report_header() -> str:
    return f"cudakit under test: {Path(cudakit.__file__).parent}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all"):
        thorough = [item for item in items if item.get_closest_marker("thorough")]
        if thorough:
            config.hook.pytest_deselected(items=thorough)
            items[:] = [item for item in items if item not in set(thorough)]
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/dxg").exists():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Freeze the objects of the collection phase, so that garbage collections skip them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name in SCRUBBED or name.startswith(("CUDAKIT_", "_CUDAKIT_")):
            monkeypatch.delenv(name)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with the file tests/golden/NAME; ``--update-golden`` writes the file instead."""

    def compare(name: str, text: str) -> None:
        place = GOLDEN / name
        if request.config.getoption("--update-golden"):
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, encoding="utf-8", newline="")
        elif not place.is_file():
            pytest.fail(f"{place} does not exist: run with --update-golden, then read the file")
        with place.open(encoding="utf-8", newline="") as file:
            assert text == file.read(), f"{name} differs: --update-golden if that is right"

    return compare


@pytest.fixture
def cli() -> Cli:
    """Run a command line in this process: ``cli("memviz", path).stdout``."""
    return run_cli


@pytest.fixture
def command() -> list[str]:
    """Return the command line of the installed cudakit as a separate process."""
    return [sys.executable, "-P", "-m", "cudakit"]
