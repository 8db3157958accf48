"""Run the examples of README and docs.

A ``console`` block has commands after ``$``, each followed by its output. A line ``…`` stands for omitted
lines; all other lines must be those of the output. A command must succeed unless ``$ echo $?`` follows it.
``python`` blocks run if the modules that they import are installed. ``pycon`` blocks must print the shown
output.
"""

from __future__ import annotations

import doctest
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path

import pytest

import cudakit

ROOT = Path(__file__).parent.parent
PAGES = (
    ROOT / "README.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("examples/**/*.md")),
)
LEFT_OUT = "…"

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_IMPORTED = re.compile(r"^(?:import|from) (\w+)", re.MULTILINE)
# cudakit is the version under test. $? is the exit code of the previous command.
_SHELL = 'cudakit() { "$PYTHON" -P -m cudakit "$@"; }\n(exit "$PREVIOUS")\n'


@dataclass(frozen=True, slots=True)
class Command:
    """A command line with the output that the page shows."""

    line: str
    shown: tuple[str, ...]

    @property
    def asks_for_exit_code(self) -> bool:
        return self.line == "echo $?"

    @property
    def is_installed(self) -> bool:
        programs = [stage.split()[0] for stage in self.line.split(" | ")]
        return all(name == "cudakit" or shutil.which(name) for name in programs)


def blocks(page: Path, language: str) -> list[str]:
    found = _BLOCK.findall(page.read_text(encoding="utf-8"))
    return [content for name, content in found if name == language]


def commands(block: str) -> Iterator[Command]:
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        line, *shown = part.splitlines()
        yield Command(line, tuple(shown))


def is_shown_rightly(shown: Sequence[str], printed: str) -> bool:
    parts = (
        r"(?:.*\n)*?" if line == LEFT_OUT else re.escape(line.rstrip()) + r" *\n" for line in shown
    )
    return re.fullmatch("".join(parts), printed) is not None


def run(command: Command, *, at: Path, previous: int) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHON": sys.executable, "PREVIOUS": str(previous), "PYTHONUTF8": "1"}
    return subprocess.run(
        ["bash", "-c", _SHELL + command.line],  # noqa: S607
        cwd=at,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
    )


def check_block(block: str, *, at: Path) -> None:
    found = [command for command in commands(block) if command.is_installed]
    code = 0
    for command, following in zip_longest(found, found[1:]):
        done = run(command, at=at, previous=code)
        code = 0 if command.asks_for_exit_code else done.returncode
        told = following is not None and following.asks_for_exit_code
        assert code == 0 or told, f"{command.line}: exit code {code}\n{done.stdout}"
        assert is_shown_rightly(command.shown, done.stdout), (
            f"{command.line}: the page does not show what is printed\n{done.stdout}"
        )


def with_blocks(language: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    pages = [page for page in PAGES if blocks(page, language)]
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a writable directory with the examples and tests of the repository."""
    for name in ("examples", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


@with_blocks("console")
def test_console_blocks_print_the_shown_output(page: Path, checkout: Path) -> None:
    for block in blocks(page, "console"):
        check_block(block, at=checkout)


@with_blocks("python")
def test_python_blocks_run(page: Path, checkout: Path) -> None:
    for code in blocks(page, "python"):
        if "cudakit" in code and all(map(find_spec, _IMPORTED.findall(code))):
            subprocess.run([sys.executable, "-P", "-c", code], cwd=checkout, check=True)


@with_blocks("pycon")
def test_pycon_blocks_print_the_shown_output(
    page: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkout)
    names = {name: getattr(cudakit, name) for name in cudakit.__all__}
    text = "\n".join(blocks(page, "pycon"))
    prompts = doctest.DocTestParser().get_doctest(text, names, page.name, str(page), 0)
    said: list[str] = []

    assert doctest.DocTestRunner().run(prompts, out=said.append).failed == 0, "".join(said)


@pytest.mark.parametrize(
    "shown",
    [
        "a\nb\nc",
        "…",
        "a\n…",
        "…\nc",
        "a\n…\nc",
        "…\nb\n…",
        "a\nb  \nc",
        "a\n…\nb\nc",
    ],
)
def test_ellipsis_stands_for_omitted_lines(shown: str) -> None:
    assert is_shown_rightly(shown.splitlines(), "a\nb\nc\n")


@pytest.mark.parametrize(
    "shown",
    ["", "a", "a\nb", "b\nc", "a\nc", "…\nb", "b\n…", "a\n…\nd", "…\nb\n…\na\n…", "a\nb\nC"],
)
def test_omitted_added_or_changed_lines_are_found(shown: str) -> None:
    assert not is_shown_rightly(shown.splitlines(), "a\nb\nc\n")


@pytest.mark.parametrize(
    "block",
    [
        "$ cudakit memviz missing.pkl\n…\n",
        "$ cudakit --version\ncudakit of another time\n",
        "$ cudakit memviz missing.pkl\n…\n$ echo $?\n0\n",
        "$ false\n",
    ],
)
def test_block_with_other_output_is_found(block: str, checkout: Path) -> None:
    with pytest.raises(AssertionError):
        check_block(block, at=checkout)


def test_block_may_show_a_failure_with_its_exit_code(checkout: Path) -> None:
    check_block("$ cudakit memviz missing.pkl\n…\n$ echo $?\n2\n", at=checkout)
