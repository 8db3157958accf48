from __future__ import annotations

import io
from pathlib import Path

import pytest

from cudakit.cli.options import OutputOptions, Target
from cudakit.cli.output import Output
from cudakit.cli.report import Report, brief_sentences, format_of, main_rows, open_outputs
from cudakit.errors import UsageError
from cudakit.report.document import Column, Count, Document, Note, Section, Table, Text
from cudakit.units import Unavailable

ROWS = Table(
    (Column("name"), Column("size"), Column("health")),
    ((Text("a"), Count(1), Unavailable("no driver")), (Text("b"), Count(2), Text("ok"))),
)
DOCUMENT = Document(
    "Title",
    (
        Note("ok", "verified"),
        Note("info", "a detail"),
        ROWS,
        Section("Part", (Note("ok", "one of many"), Note("warn", "a warning"))),
        Note("error", "a failure"),
    ),
)
REPORT = Report(result=None, document=lambda: DOCUMENT)


def options(*targets: Target, quiet: bool = False) -> OutputOptions:
    return OutputOptions(
        json=False, targets=targets, force=False, quiet=quiet, formats=("md", "txt", "csv")
    )


def written(output_options: OutputOptions, report: Report = REPORT) -> str:
    """Write a report; return the text on the terminal."""
    stream = io.StringIO()
    with open_outputs(
        output_options, open_terminal=lambda: Output(stream, "terminal", 80, color=False)
    ) as outputs:
        outputs.write(report)
    return stream.getvalue()


def test_brief_has_title_and_important_notes() -> None:
    title, *notes = brief_sentences(DOCUMENT)

    assert title == "Title"
    assert [note.text for note in notes if isinstance(note, Note)] == [
        "verified",
        "a warning",
        "a failure",
    ]


def test_rows_of_the_main_table_name_their_columns_and_reasons_without_a_value() -> None:
    assert list(main_rows(DOCUMENT)) == [
        "name a, size 1, health n/a (no driver)",
        "name b, size 2, health ok",
    ]
    assert list(main_rows(Document("Title", (Section("Part", (ROWS,)),)))) == []


def test_quiet_prints_brief_and_rows() -> None:
    lines = written(options(quiet=True)).splitlines()

    assert lines == [
        "Title",
        "✓ verified",
        "! a warning",
        "✗ a failure",
        *main_rows(DOCUMENT),
    ]


def test_quiet_marks_notes_in_ascii_if_the_terminal_has_no_symbols() -> None:
    stream = io.StringIO()
    terminal = Output(stream, "terminal", 80, color=False, ascii_only=True)
    with open_outputs(options(quiet=True), open_terminal=lambda: terminal) as outputs:
        outputs.write(REPORT)

    assert stream.getvalue().splitlines()[1:4] == ["+ verified", "! a warning", "x a failure"]


def test_lines_of_a_report_are_printable() -> None:
    report = Report(result=None, document=lambda: DOCUMENT, brief_sentences=lambda: ["a\n\x1b[2J"])

    assert written(options(quiet=True), report) == "a \\x1b[2J\n"


def test_file_replaces_the_report_on_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.md"

    assert written(options(Target(str(target)))) == ""
    assert target.read_text().startswith("# Title\n")
    assert capsys.readouterr().err.splitlines() == [
        "Title",
        "! a warning",
        "✗ a failure",
        "1 more message is in the report",
        f"Wrote {target}",
    ]


def test_summary_of_a_short_report_has_all_lines_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.md"
    notes = (Note("ok", "verified"), Note("error", "a failure"))

    written(
        options(Target(str(target))), Report(result=None, document=lambda: Document("T", notes))
    )
    assert capsys.readouterr().err == f"T\n✓ verified\n✗ a failure\nWrote {target}\n"


@pytest.mark.parametrize(
    ("name", "last_line"),
    [
        ("out.md", "7 more messages are in the report"),
        ("out.csv", "7 more messages are in no file: add -o - to print the report"),
    ],
)
def test_summary_says_where_the_omitted_messages_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, last_line: str
) -> None:
    report = Report(
        result=None,
        document=lambda: Document("T", (Note("ok", "verified"),) * 9),
        exports={"csv": lambda: "a\n"},
    )
    written(options(Target(str(tmp_path / name))), report)

    assert last_line in capsys.readouterr().err.splitlines()


def test_suffix_of_another_format_of_the_command_is_not_read_as_its_end() -> None:
    with pytest.raises(UsageError, match="no format with this suffix"):
        format_of("a.perfetto.json", ("json",), ("json", "perfetto.json"))


def test_dash_prints_the_report_beside_a_file(tmp_path: Path) -> None:
    text = written(options(Target(str(tmp_path / "out.md")), Target("-")))

    assert text.startswith("Title\n")


def test_streams_are_all_places_with_their_formats(tmp_path: Path) -> None:
    target = Target(str(tmp_path / "out.md"))
    with open_outputs(options(target, Target("-"))) as outputs:
        assert [suffix for suffix, _ in outputs.streams()] == ["md", "txt"]
    with open_outputs(options()) as outputs:
        assert [suffix for suffix, _ in outputs.streams()] == ["txt"]


@pytest.mark.parametrize(
    ("path", "suffix"),
    [("a.json", "json"), ("A.JSON", "json"), ("a.perfetto.json", "perfetto.json")],
)
def test_longest_suffix_is_the_format(path: str, suffix: str) -> None:
    assert format_of(path, ("json", "perfetto.json")) == suffix


def test_file_named_twice_is_a_usage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(UsageError, match="named twice"):
        written(options(Target("out.md"), Target("./out.md")))
    assert list(tmp_path.iterdir()) == []
