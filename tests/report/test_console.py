"""Whole documents on the terminal: layout, and safety against hostile text."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

import numpy as np
import pytest
from document_views import no_picture
from hypothesis import given, settings
from hypothesis import strategies as st

from cudakit.report.console import render
from cudakit.report.document import (
    Bytes,
    Change,
    Chart,
    Column,
    Columns,
    Count,
    Document,
    Facts,
    Marker,
    Node,
    Note,
    Rate,
    Ratio,
    Seconds,
    Section,
    Series,
    Stack,
    Table,
    Text,
    View,
)
from cudakit.stacks import Frame
from cudakit.units import Unavailable

MIB, GIB = 1 << 20, 1 << 30
COLOUR = re.compile(r"\x1b\[[0-9;]*m")

ATTENTION = Stack(
    (
        Frame("attend", "/opt/venv/lib/python3.12/site-packages/torch/nn/functional.py", 5560),
        Frame("forward", "/home/ada/llm/model/attention.py", 97),
        Frame("_call_impl", "/opt/venv/lib/python3.12/site-packages/torch/nn/module.py", 1751),
        Frame("step", "/home/ada/llm/train/loop.py", 214),
        Frame("<module>", "/home/ada/llm/train/main.py", 131),
    ),
    site=1,
)
OPTIMIZER = Stack((Frame("init_the_states_of_the_optimizer", "/llm/train/optimizer.py", 61),))
NATIVE = Stack((Frame("torch::autograd::Engine::execute(std::shared_ptr<GraphTask>&)", "??", 0),))
HOSTILE = Stack((Frame("名前\x1b[31m[bold]\u202e", "/tmp\n/evil.py", 3),))  # noqa: S108

T = np.arange(0, 12, 0.01)
ALLOCATED = (6 * GIB + 4 * GIB * np.sin(T * 1.5)).astype(np.int64)
ALLOCATED[700] = 12 * GIB
RESERVED = np.maximum.accumulate(ALLOCATED) + 512 * MIB
MEMORY = Chart(
    "Memory over time",
    T,
    (
        Series("allocated", ALLOCATED),
        Series("reserved", RESERVED),
        Series("requested", ALLOCATED - 64 * MIB),
    ),
    x_label="time",
    x_unit="seconds",
    markers=(Marker(7.0, "peak", "warn"), Marker(2.5, "step 1"), Marker(11.99, "OOM", "error")),
)
POWER = Chart(
    "Clock and utilisation",
    T,
    (Series("clock", 0.8 + 0.1 * np.sin(T)), Series("utilisation", T / 12, step=False)),
    x_unit="seconds",
    y_unit="ratio",
)
HOLDERS = Table(
    (Column("size", "number"), Column("share", "bar"), Column("allocated at", "stack")),
    (
        (Bytes(8 * GIB), Ratio(0.64), ATTENTION),
        (Bytes(3 * GIB, derived=True), Ratio(0.24), OPTIMIZER),
        (Bytes(900 * MIB), Ratio(0.07), NATIVE),
        (Bytes(600), Ratio(5e-8), Stack(())),
        (Unavailable("not recorded"), Unavailable("not recorded"), HOSTILE),
    ),
    caption="5 of 1,312 stacks, 95.0% of the bytes.",
    total_row=(Bytes(12 * GIB), Ratio(1.0), Text("all stacks")),
)
CHANGES = Table(
    (Column("change", "number"), Column("what is new"), Column("rate", "number")),
    (
        (Change(120 * MIB), Text("alive since step 1, between two activations"), Rate(3e12, "B")),
        (Change(-MIB), Text("freed"), Rate(989e12, "FLOP")),
        (Change(0), Text(""), Unavailable("no clock")),
    ),
)
EMPTY = Table((Column("name"), Column("size", "number")), ())
ALL_NODES = Document(
    "cudakit memviz run.pkl.gz",
    (
        Note("ok", "Complete: every one of 139,322 events fits the state at the end."),
        Note("warn", "Stacks were recorded for allocations only.", ("Record with stacks='all'.",)),
        Section(
            "State",
            (
                Facts(
                    (
                        ("device", Text("cuda:0  NVIDIA H100")),
                        ("allocated at peak", Bytes(12 * GIB)),
                        ("requested at peak", Bytes(11 * GIB, derived=True)),
                        ("since the last file", Change(3 * MIB)),
                        ("recorded for", Seconds(12.5)),
                        ("events", Count(139_322)),
                        ("in use", Ratio(0.931)),
                        ("free on device", Unavailable("the file has no out-of-memory event")),
                        ("peak reached at", ATTENTION),
                    )
                ),
                Columns("events", {"size": np.arange(3)}),
                View("picture", ("events",), no_picture, MEMORY),
            ),
        ),
        Section("Holders", (HOLDERS, Section("Changes", (CHANGES, EMPTY)))),
        Section("Charts", (POWER,)),
        Section("Only for the page", (Columns("blocks", {}),)),
        Note(
            "error", "CUDA out of memory: 2.50 GiB asked, 1.20 GiB free on cuda:0.", ("Use less.",)
        ),
        Note("info", "The cache held 1.10 GiB."),
    ),
)


@pytest.mark.parametrize("width", [80, 160])
def test_document_of_all_nodes_equals_the_golden_file(
    width: int, golden: Callable[[str, str], None]
) -> None:
    golden(f"console-all-nodes-{width}.txt", render(ALL_NODES, width=width, color=False))


def test_color_adds_only_color_codes() -> None:
    coloured = render(ALL_NODES, width=100, color=True)
    assert coloured.startswith("\x1b[1mcudakit memviz run.pkl.gz\x1b[0m\n")
    assert "\x1b[33m! \x1b[0mStacks were" in coloured
    assert COLOUR.sub("", coloured) == render(ALL_NODES, width=100, color=False)


def test_environment_does_not_change_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    before = render(ALL_NODES, width=100, color=True)
    for name, value in {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "40"}.items():
        monkeypatch.setenv(name, value)
    assert render(ALL_NODES, width=100, color=True) == before


def test_section_with_nothing_to_show_has_no_heading() -> None:
    assert "Only for the page" not in render(ALL_NODES, width=80, color=False)


def test_every_level_of_a_note_has_its_own_symbol() -> None:
    notes = tuple(Note(level, "same words") for level in ("ok", "info", "warn", "error"))
    lines = render(Document("notes", notes), width=80, color=False).splitlines()[2:]
    assert lines == ["✓ same words", "i same words", "! same words", "✗ same words"]


def test_remedy_starts_a_line_and_is_indented_after_its_arrow() -> None:
    note = Note("warn", "Too few events.", ("Record again with a larger number of entries.",))
    lines = render(Document("t", (note,)), width=29, color=False).splitlines()[2:]
    assert lines == [
        "! Too few events.",
        "  → Record again with a",
        "    larger number of entries.",
    ]


# Text as in a file of another person.
ATTACKS = [
    "\x1b[2J\x1b]0;title\x07",
    "[bold red]markup[/] [/nothing]",
    ":smile: {braces} %s",
    "line one\nline two\r\n\tthree",
    "\u202eright to left\u2066",
    "\ud800 alone",
    "\x00\x7f\x9b31m",
    "e\u0301" * 40,
    "漢字かな交じり文" * 30,
    "🙂\ufe0f" * 20,
    "x" * 900,
]
TEXTS = st.one_of(
    st.sampled_from(ATTACKS),
    st.text(st.sampled_from("ab /:→漢가🙂é\u0301\x1b\n\u202e\u200d\ufe0f"), max_size=60),
)
AMOUNTS = st.one_of(
    st.builds(Bytes, st.integers(-(2**70), 2**70), st.booleans()),
    st.builds(Change, st.integers(-(2**70), 2**70)),
    st.builds(Seconds, st.floats()),
    st.builds(Rate, st.floats(), TEXTS),
    st.builds(Ratio, st.floats()),
    st.builds(Count, st.integers()),
)
FRAMES = st.builds(Frame, TEXTS, TEXTS, st.integers(-1, 10**6))
STACK_VALUES = st.builds(Stack, st.lists(FRAMES, max_size=4).map(tuple), st.integers(-1, 5))
VALUES = st.one_of(
    AMOUNTS, st.builds(Text, TEXTS), FRAMES, STACK_VALUES, st.builds(Unavailable, TEXTS)
)
KINDS = st.sampled_from(["number", "text", "stack", "bar"])


@st.composite
def tables(draw: st.DrawFn) -> Table:
    columns = draw(st.lists(st.builds(Column, TEXTS, KINDS), max_size=8).map(tuple))
    row = st.tuples(*(VALUES for _ in columns))
    rows = draw(st.lists(row, max_size=3).map(tuple))
    return Table(columns, rows, draw(TEXTS), draw(st.none() | row))


@st.composite
def charts(draw: st.DrawFn) -> Chart:
    length = draw(st.integers(0, 12))
    finite_floats = st.floats(-1e18, 1e18)
    unknown = st.sampled_from([np.nan, np.inf, -np.inf])
    numbers = finite_floats | unknown if draw(st.booleans()) else st.integers(-(2**60), 2**60)
    values = st.lists(numbers, min_size=length, max_size=length).map(np.array)
    series = st.builds(Series, TEXTS, values, st.booleans())
    markers = st.builds(Marker, finite_floats, TEXTS, st.sampled_from(["info", "warn", "error"]))
    return Chart(
        draw(TEXTS),
        np.sort(draw(st.lists(finite_floats, min_size=length, max_size=length).map(np.array))),
        draw(st.lists(series, max_size=5).map(tuple)),
        draw(TEXTS),
        draw(st.sampled_from(["seconds", "count"])),
        draw(st.sampled_from(["bytes", "seconds", "count", "ratio"])),
        draw(st.lists(markers, max_size=5).map(tuple)),
    )


LEAVES: st.SearchStrategy[Node] = st.one_of(
    st.builds(Facts, st.lists(st.tuples(TEXTS, VALUES), max_size=6).map(tuple)),
    st.builds(Note, st.sampled_from(["ok", "info", "warn", "error"]), TEXTS, TEXTS),
    tables(),
    charts(),
)
NODES = st.recursive(
    LEAVES,
    lambda inner: (
        st.builds(Section, TEXTS, st.lists(inner, max_size=3).map(tuple))
        | st.builds(View, st.just("picture"), st.just(()), st.just(no_picture), inner)
    ),
    max_leaves=3,
)
DOCUMENTS = st.builds(Document, TEXTS, st.lists(NODES, max_size=3).map(tuple))


def cells(line: str) -> int:
    """Return the width of a line in cells, independently of rich."""
    widths = {"W": 2, "F": 2}
    return sum(
        0 if unicodedata.combining(character) else widths.get(east_asian(character), 1)
        for character in line
    )


def east_asian(character: str) -> str:
    return unicodedata.east_asian_width(character)


@settings(max_examples=60, deadline=None)
@given(document=DOCUMENTS, width=st.sampled_from([1, 7, 20, 40, 80, 119, 120, 160]))
def test_no_line_is_wider_than_the_terminal_or_ends_in_a_space(
    document: Document, width: int
) -> None:
    for line in render(document, width=width, color=False).split("\n"):
        assert cells(line) <= width
        assert not line.endswith(" ")


@settings(max_examples=60, deadline=None)
@given(document=DOCUMENTS)
def test_escape_sequences_in_text_are_escaped(document: Document) -> None:
    plain = render(document, width=80, color=False)
    assert plain.replace("\n", "").isprintable()
    assert plain.encode("utf-8")
    assert COLOUR.sub("", render(document, width=80, color=True)) == plain


def test_markup_of_rich_is_shown_literally() -> None:
    document = Document("[red]title[/red]", (Note("info", "[link=x]a[/link] :smile:"),))
    text = render(document, width=80, color=False)
    assert "[red]title[/red]" in text
    assert "[link=x]a[/link] :smile:" in text


def test_ascii_report_has_only_ascii_and_fits_the_terminal() -> None:
    plain = render(ALL_NODES, width=80, color=False, ascii_only=True)

    assert set(plain) - set(map(chr, range(128))) == set("名前")
    assert max(map(cells, plain.splitlines())) <= 80


def test_ascii_symbols_may_be_wider_than_the_symbols_that_they_replace() -> None:
    table = Table(
        (Column("time ±", "number"), Column("shape", "text")),
        ((Text("55 °C"), Text("256³")), (Text("99% ± 1%"), Text("96×64"))),
        caption="a → b …",
    )

    assert render(Document("T", (table,)), width=40, color=False, ascii_only=True).splitlines()[
        2:
    ] == [
        "    time +/-  shape",
        "  -----------------",
        "        55 C  256^3",
        "  99% +/- 1%  96x64",
        "  a -> b ...",
    ]


def test_end_of_a_cut_text_is_three_dots_in_ascii() -> None:
    stack = Stack((Frame("a_long_name_of_a_function", "train.py", 12),))
    table = Table((Column("call stack", "stack"),), ((stack,),))
    document = Document("T", (table,))
    drawn = render(document, width=30, color=False).splitlines()[-1]
    plain = render(document, width=30, color=False, ascii_only=True).splitlines()[-1]

    assert drawn == "  train.py:12 a_long_name_of_…"
    assert plain == "  train.py:12 a_long_name_o..."


def test_ellipsis_inside_a_text_is_three_dots_in_ascii_and_columns_stay_aligned() -> None:
    stack = Stack((Frame("forward", "a/long/directory/of/a/package/linear.py", 134),))
    short_stack = Stack((Frame("epoch", "train/train.py", 58),))
    columns = (Column("line", "stack"), Column("time", "number"))
    rows = ((stack, Text("1 ms")), (short_stack, Text("a longer cell")))
    document = Document("T", (Table(columns, rows),))
    drawn = render(document, width=45, color=False).splitlines()[-2:]
    plain = render(document, width=45, color=False, ascii_only=True).splitlines()[-2:]

    assert drawn[0].split()[0] == "…/linear.py:134"
    assert plain[0].split()[0] == ".../linear.py:134"
    assert list(map(len, plain)) == list(map(len, drawn))


def test_title_and_headings_wrap() -> None:
    words = " ".join(["word"] * 12)
    document = Document(words, (Section(words, (Note("info", "note"),)),))

    lines = render(document, width=40, color=False).splitlines()

    assert lines[:3] == [" ".join(["word"] * 8), " ".join(["word"] * 4), "━" * 40]
    assert lines[3:5] == [
        "── word word word word word word word",
        "   word word word word word ────────────",
    ]
