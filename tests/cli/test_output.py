""""""

from __future__ import annotations

import io
import os
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

import pytest
from invocation import Terminal

from cudakit.cli.output import (
    Output,
    OutputOptions,
    Progress,
    Report,
    Target,
    brief_sentences,
    format_of,
    open_file,
    open_outputs,
    printable,
    progress_line,
    standard_output,
    terminal_width,
    wants_ascii,
    wants_color,
)
from cudakit.errors import EnvironmentUnusable, UsageError
from cudakit.report.document import Column, Count, Document, Note, Section, Table, Text
from cudakit.units import Unavailable


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "report.txt"


def names(directory: Path) -> list[str]:
    return sorted(place.name for place in directory.iterdir())


# --- files -------------------------------------------------------------------------------------


def test_file_appears_when_the_block_ends(target: Path) -> None:
    with open_file(str(target)) as output:
        output.write("first\n")
        output.write(str(line) for line in range(3))
        assert not target.exists()

    assert target.read_bytes() == b"first\n012"
    assert names(target.parent) == ["report.txt"]


def test_failed_run_leaves_nothing(target: Path) -> None:
    with pytest.raises(KeyboardInterrupt), open_file(str(target)) as output:
        output.write("half")
        raise KeyboardInterrupt

    assert names(target.parent) == []


def test_failed_run_keeps_the_existing_file(target: Path) -> None:
    target.write_text("old")

    with pytest.raises(ZeroDivisionError), open_file(str(target), force=True) as output:
        output.write(str(1 // piece) for piece in (1, 0))

    assert names(target.parent) == ["report.txt"]
    assert target.read_text() == "old"


def test_file_that_exists_is_rejected_before_any_work(target: Path) -> None:
    target.write_text("old")

    with pytest.raises(UsageError, match="exists") as refused, open_file(str(target)):
        pytest.fail("the work must not start")

    assert refused.value.hint == "-f replaces it"
    assert target.read_text() == "old"


def test_force_replaces_a_file(target: Path) -> None:
    target.write_text("old and longer")

    with open_file(str(target), force=True) as output:
        output.write("new")

    assert target.read_text() == "new"


def test_force_replaces_the_target_of_a_link_and_keeps_the_link(target: Path) -> None:
    target.write_text("old")
    link = target.with_name("latest.txt")
    link.symlink_to(target)

    with open_file(str(link), force=True) as output:
        output.write("new")

    assert link.is_symlink()
    assert target.read_text() == "new"


def test_new_file_has_the_default_permissions(target: Path) -> None:
    other = target.with_name("other")
    other.touch()

    with open_file(str(target)) as output:
        output.write("x")

    assert stat.S_IMODE(target.stat().st_mode) == stat.S_IMODE(other.stat().st_mode)


def test_name_of_maximal_length_is_written(tmp_path: Path) -> None:
    target = tmp_path / ("n" * 255)

    with open_file(str(target)) as output:
        output.write("x")

    assert target.read_text() == "x"


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("", "is a directory"),
        (".", "is a directory"),
        ("missing/", "is a directory"),
        ("missing/report.txt", "the directory missing does not exist"),
        ("file/report.txt", "Not a directory"),
        ("n" * 300, "File name too long"),
    ],
)
def test_unwritable_path_is_a_usage_error_before_any_work(
    path: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()

    with pytest.raises(UsageError, match=reason), open_file(path):
        pytest.fail("the work must not start")

    assert names(tmp_path) == ["file"]


def test_device_is_written_and_never_replaced() -> None:
    reader, device = os.openpty()
    with os.fdopen(reader, "rb") as screen, os.fdopen(device):
        with open_file(os.ttyname(device)) as output:
            output.write("x")

        assert screen.read(1) == b"x"
        assert stat.S_ISCHR(os.stat(os.ttyname(device)).st_mode)


def test_named_pipe_is_written_and_never_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    heard: list[str] = []
    reader = threading.Thread(target=lambda: heard.append(pipe.read_text()), daemon=True)
    reader.start()

    with open_file(str(pipe)) as output:
        output.write("x")

    reader.join(timeout=10)
    assert heard == ["x"]
    assert pipe.is_fifo()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_error_names_the_file() -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        stream = io.TextIOWrapper(io.BufferedWriter(full, 1), write_through=True)
        with pytest.raises(EnvironmentUnusable, match=r"cannot write x\.txt: No space left"):
            Output(stream, "x.txt", width=100, color=False).write("words")


def test_closed_pipe_is_not_reported_as_full_disk() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb", buffering=0) as closed_pipe:
        stream = io.TextIOWrapper(io.BufferedWriter(closed_pipe, 1), write_through=True)
        with pytest.raises(BrokenPipeError):
            Output(stream, "x.txt", width=100, color=False).write("words")


def test_error_of_the_renderer_is_not_reported_as_error_of_the_file(target: Path) -> None:
    def pieces() -> Iterator[str]:
        yield "half"
        raise FileNotFoundError(2, "the input went away")

    with pytest.raises(FileNotFoundError), open_file(str(target)) as output:
        output.write(pieces())


# --- standard output ---------------------------------------------------------------------------


def test_standard_output_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    standard_output().write("hello\n")

    assert capsys.readouterr().out == "hello\n"


def test_closed_standard_output_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)

    with pytest.raises(UsageError, match="standard output is closed"):
        standard_output()


def test_character_outside_of_the_encoding_is_escaped() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")

    Output(stream, "narrow", width=100, color=False).write("π \udc80")
    stream.flush()

    assert raw.getvalue() == b"\\u03c0 \\udc80"


def test_lone_surrogate_does_not_break_a_file(target: Path) -> None:
    with open_file(str(target)) as output:
        output.write("π \udc80")

    assert target.read_bytes() == "π \\udc80".encode()


# --- width and colour ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "width"), [("160", 160), ("80", 80), ("5", 40), ("0", 100), ("", 100), ("x", 100)]
)
def test_width_follows_a_valid_columns_variable(
    columns: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)

    assert terminal_width(io.StringIO()) == width


def test_terminal_is_filled_to_its_own_width() -> None:
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as terminal, os.fdopen(master):
        import fcntl
        import struct
        import termios

        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 132, 0, 0))
        assert terminal_width(terminal) == 132


@pytest.mark.parametrize(
    ("environment", "on_terminal", "on_pipe"),
    [
        ({}, True, False),
        ({"NO_COLOR": "1"}, False, False),
        ({"NO_COLOR": ""}, True, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"FORCE_COLOR": "0"}, True, False),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False),
        ({"TERM": "dumb"}, False, False),
    ],
)
def test_color_depends_on_terminal_and_environment(
    environment: dict[str, str],
    on_terminal: bool,
    on_pipe: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert wants_color(Terminal()) is on_terminal
    assert wants_color(io.StringIO()) is on_pipe


def test_file_has_no_color_with_force_color(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")

    with open_file(str(target)) as output:
        assert not output.color
        assert standard_output().color


@pytest.mark.parametrize(
    ("environment", "encoding", "expected"),
    [
        ({}, "utf-8", False),
        ({}, "ascii", True),
        ({}, "latin-1", True),
        ({"LC_ALL": "C"}, "utf-8", True),
        ({"LC_ALL": "POSIX"}, "utf-8", True),
        ({"LC_ALL": "C.UTF-8"}, "utf-8", False),
        ({"LC_ALL": "en_US.UTF-8", "LANG": "C"}, "utf-8", False),
    ],
)
def test_drawing_is_ascii_in_the_c_locale_and_for_encodings_without_boxes(
    environment: dict[str, str], encoding: str, *, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LC_ALL", "LC_CTYPE", "LANG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert wants_ascii(io.TextIOWrapper(io.BytesIO(), encoding=encoding)) is expected


# --- words ---------------------------------------------------------------------------------------


def test_printable_keeps_letters_and_escapes_control_characters() -> None:
    assert printable("naïve 模型 🔥") == "naïve 模型 🔥"
    assert printable("a\r\n  b\x1b[2J\x9b\u2028c") == "a b\\x1b[2J\\x9b c"


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
    terminal = Output(io.StringIO(), "terminal", 80, color=False)
    assert REPORT.brief_text(terminal, with_rows=True).splitlines()[4:] == [
        "name a, size 1, health n/a (no driver)",
        "name b, size 2, health ok",
    ]
    in_section = Report(
        result=None, document=lambda: Document("Title", (Section("Part", (ROWS,)),))
    )
    assert in_section.brief_text(terminal, with_rows=True) == "Title\n"


def test_quiet_prints_brief_and_rows() -> None:
    lines = written(options(quiet=True)).splitlines()

    assert lines == [
        "Title",
        "✓ verified",
        "! a warning",
        "✗ a failure",
        "name a, size 1, health n/a (no driver)",
        "name b, size 2, health ok",
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


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("COLUMNS", "40")
    return Terminal()


@contextmanager
def progress_on(stream: io.StringIO | None, *, quiet: bool = False) -> Iterator[Progress]:
    with redirect_stderr(stream), progress_line(quiet=quiet) as progress:
        yield progress


def drawn(stream: io.StringIO) -> list[str]:
    return stream.getvalue().split("\r\x1b[K")[1:]


def test_progress_line_is_cleared_at_the_end(terminal: Terminal) -> None:
    with progress_on(terminal) as progress:
        progress("reading", 0.0)
        progress("reading", 0.5)
        progress("replaying", 1.0)

    assert drawn(terminal) == ["reading   0%", "reading  50%", "replaying 100%", ""]


def test_failure_clears_the_progress_line(terminal: Terminal) -> None:
    with pytest.raises(ValueError, match="broken"), progress_on(terminal) as progress:
        progress("reading", 0.5)
        raise ValueError("broken")

    assert drawn(terminal)[-1] == ""


def test_change_below_one_percent_is_not_drawn(terminal: Terminal) -> None:
    with progress_on(terminal) as progress:
        for step in range(1000):
            progress("reading", 0.5 + step * 1e-7)

    assert drawn(terminal) == ["reading  50%", ""]


def test_stage_is_cut_and_escaped(terminal: Terminal) -> None:
    with progress_on(terminal) as progress:
        progress("\x1b[2J" + "x" * 100, 0.5)

    assert drawn(terminal)[0] == ("\\x1b[2J" + "x" * 100)[:39]


def test_without_work_nothing_is_drawn(terminal: Terminal) -> None:
    with progress_on(terminal):
        pass

    assert terminal.getvalue() == ""


def test_quiet_shows_nothing(terminal: Terminal) -> None:
    with progress_on(terminal, quiet=True) as progress:
        progress("reading", 0.5)

    assert terminal.getvalue() == ""


@pytest.mark.parametrize("stream", [io.StringIO(), None])
def test_stderr_that_is_no_terminal_shows_nothing(
    stream: io.StringIO | None,
) -> None:
    with progress_on(stream) as progress:
        progress("reading", 0.5)

    assert stream is None or stream.getvalue() == ""


def test_dumb_terminal_shows_nothing(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with progress_on(terminal) as progress:
        progress("reading", 0.5)

    assert terminal.getvalue() == ""
