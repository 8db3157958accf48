"""The language check reports dialect in prose and names, and reports no plain text or code."""

from __future__ import annotations

from pathlib import Path

import check_language
import pytest
from check_language import EXCEPTIONS, findings_in, texts_of


def words(path: Path, source: str) -> list[tuple[int, str]]:
    """Return the line and the word of each finding in a file with the given text."""
    path.write_text(source, encoding="utf-8")
    return [(finding.line, finding.word) for finding in findings_in(path.name, texts_of(path))]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("# no room left\n", [(1, "room")]),
        ("x = 1  # it tells of\n# nothing\n", [(1, "tells of")]),
        ("# it tells\n# of nothing\n", [(1, "tells of")]),
        ('"""Return it.\n\nIts twin is slower.\n"""\n', [(3, "twin")]),
        ("message = f'so many {room} of them'\n", [(1, "so many")]),
        ("message = (\n    'it tells '\n    'of a race'\n)\n", [(2, "tells of")]),
        ("def test_what_was_kept_is_kept(): ...\n", [(1, "test_what_was_kept_is_kept")]),
        ("def pool_tally(judge): ...\n", [(1, "tally"), (1, "judge")]),
        ("class PoolLedger: ...\n", [(1, "Ledger")]),
        ("help = 'Where a GPU is missing, nothing runs.'\n", [(1, "Where a GPU is missing,")]),
        ("help = 'Run. Where a GPU is missing, stop.'\n", [(1, "Where a GPU is missing,")]),
        ("help = 'What the device did before the launch.'\n", [(1, "What the device")]),
        ('def f():\n    """Say why."""\n', [(2, "Say")]),
        ("# Reported by every device.\n", [(1, "Reported b")]),
        ("size: int  # in bytes\n", [(1, "in")]),
        ("pool: int = 0  # None: not recorded\n", [(1, "None")]),
        ("self.devices = []  # by index\n", [(1, "by")]),
        ("exact: bool  # trace and final state agree\n", [(1, "trace")]),
        ('version: str  # "580.65.06"\n', [(1, '"580.65.06"')]),
    ],
)
def test_dialect_in_python_is_reported(
    tmp_path: Path, source: str, expected: list[tuple[int, str]]
) -> None:
    assert words(tmp_path / "some.py", source) == expected


@pytest.mark.parametrize(
    "source",
    [
        "# bathroom, headroom, so many that it fails\n",
        "# the option ``--room`` and `witness.h`\n",
        "help = 'Where did the memory go, and why?'\n",
        "help = 'What happened?'\n",
        "title = 'What changed'\n",
        "values = module.room(twin)\n",
        "message = f'{room}'\n",
        "exact: bool  # whether trace and final state agree\n",
        "pool: int = 0  # pool of the request; None: not recorded\n",
        'version: str  # version of the driver: "580.65.06"\n',
        "told = seen\n",
        "end = start  # by default\n",
        "value: bool = f()  # noqa: FBT001\n",
    ],
)
def test_plain_words_and_uses_of_a_name_are_not_reported(tmp_path: Path, source: str) -> None:
    assert words(tmp_path / "some.py", source) == []


def test_vague_names_are_reported_in_the_package_only() -> None:
    texts = list(check_language.python_texts("def told(kept_blocks): ...\n"))
    findings = check_language.findings_in("cudakit/some.py", texts)
    assert [finding.word for finding in findings] == ["told"]
    assert list(check_language.findings_in("tests/some.py", texts)) == []


def test_dialect_in_c_is_reported(tmp_path: Path) -> None:
    source = 'int room; // no room,\n          // it tells\n// of it\n/* a twin\n * fares */\nf("so many");\n'

    assert words(tmp_path / "some.cu", source) == [
        (1, "room"),
        (1, "tells of"),
        (4, "twin"),
        (4, "fares"),
        (6, "so many"),
    ]


def test_dialect_in_shell_and_markdown_is_reported(tmp_path: Path) -> None:
    assert words(tmp_path / "script", "#!/bin/sh\nroom=1 # a room\n") == [(2, "room")]
    assert words(tmp_path / "page.md", "# What is new here\n\nIt fares `so many`\nwell.\n") == [
        (3, "fares")
    ]


@pytest.mark.parametrize(
    ("source", "unknown"),
    [
        ('def f(names):\n    """Join ``many``."""\n', ["many"]),
        ('def f(names):\n    """Join ``names`` by ``g()``; ``None`` and ``A`` too."""\n', []),
        ('def f(names): ...\ndef h():\n    """Join ``names``."""\n', ["names"]),
        ('class A:\n    """Has ``size`` and ``color``."""\n\n    size: int\n', ["color"]),
        ('class A:\n    """Has ``size``."""\n\n    def __init__(self, size): ...\n', []),
        ('def f(key):\n    """Read ``kind``."""\n    return key["kind"]\n', []),
        ('LIMITS = min(first, last)\ndef f():\n    """Use ``first``."""\n', []),
        ('def f():\n    """Use ``first + 1``, ``numpy.first`` and `first`."""\n', []),
    ],
)
def test_quoted_name_in_docstring_must_exist(source: str, unknown: list[str]) -> None:
    package_names = {"g", "None"}
    findings = check_language.unknown_names("cudakit/some.py", source, package_names)
    assert [finding.word for finding in findings] == unknown


def test_quoted_names_of_the_package_exist() -> None:
    assert {"find_suppressed", "RaceKind", "torch_rules"} - check_language.names_of_package() == {
        "find_suppressed"
    }


def test_file_name_is_checked(tmp_path: Path) -> None:
    assert words(tmp_path / "pool_tally.py", "") == [(1, "tally")]


def test_unknown_format_is_not_read(tmp_path: Path) -> None:
    assert words(tmp_path / "room.bin", "a room") == []


def test_exception_applies_to_path_and_word(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("A room, a twin.\n", encoding="utf-8")
    exceptions = {("quoted/", "room")}

    quoted = findings_in("quoted/page.md", texts_of(page), exceptions)
    assert [finding.word for finding in quoted] == ["twin"]
    unquoted = findings_in("other/page.md", texts_of(page), exceptions)
    assert [finding.word for finding in unquoted] == ["room", "twin"]


def test_exceptions_have_files_and_reasons() -> None:
    for (prefix, _), reason in EXCEPTIONS.items():
        assert (check_language.ROOT / prefix).exists()
        assert reason


def test_findings_are_printed_and_counted_by_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.py").write_text("# a room\n", encoding="utf-8")
    (tmp_path / "b.md").write_text("plain\n", encoding="utf-8")

    assert check_language.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out == f"{tmp_path}/a.py:1: 'room': package, space, capacity\n"
    assert check_language.main(["--count", str(tmp_path)]) == 1
    assert capsys.readouterr().out.split()[0] == "1"
    assert check_language.main([str(tmp_path / "b.md")]) == 0
