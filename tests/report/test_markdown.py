from __future__ import annotations

import numpy as np
import pytest
from document_views import no_picture

from cudakit.report.document import (
    Bytes,
    Chart,
    Column,
    Columns,
    Count,
    Document,
    Facts,
    Node,
    Note,
    Ratio,
    Seconds,
    Section,
    Series,
    Stack,
    Table,
    Text,
    View,
)
from cudakit.report.markdown import render
from cudakit.stacks import Frame
from cudakit.units import Unavailable


def text_of(*nodes: Node) -> str:
    return render(Document("T", nodes)).removeprefix("# T\n\n").removesuffix("\n")


def cell(words: str) -> str:
    table = Table((Column("a"),), ((Text(words),),))
    return text_of(table).splitlines()[2].removeprefix("| ").removesuffix(" |")


def test_table_aligns_numbers_and_closes_with_its_total_and_caption() -> None:
    table = Table(
        (Column("name"), Column("size", "number"), Column("share", "bar")),
        ((Text("a"), Bytes(1024), Ratio(0.5)), (Text("b"), Unavailable("why"), Ratio(0.25))),
        caption="In order.",
        total_row=(Text("all"), Bytes(2048), Ratio(0.75)),
    )
    assert text_of(table).splitlines() == [
        "| name | size | share |",
        "| --- | ---: | ---: |",
        "| a | 1.00 KiB | 50.0% |",
        "| b | n/a | 25.0% |",
        "| all | 2.00 KiB | 75.0% |",
        "",
        "In order.",
    ]


def test_markdown_has_sections_facts_notes_and_fallbacks_of_views() -> None:
    counts = Facts((("count", Count(3)),))
    section = Section(
        "Inside", (Facts((("time", Seconds(0.5)),)), View("picture", (), no_picture, counts))
    )
    note = Note("warn", "Look.", ("do this",))
    assert text_of(section, note) == (
        "## Inside\n\n* **time**: 500 ms\n\n* **count**: 3\n\n> **Warning**: Look.\n> * do this"
    )


def test_section_with_nothing_to_show_is_left_out() -> None:
    empty = Section("Empty", (Columns("c", {"n": np.arange(3)}), Facts(())))
    assert text_of(empty, Note("ok", "Done.")) == "> **OK**: Done."


def test_chart_is_a_table_of_its_points() -> None:
    chart = Chart(
        "Speed", np.array([1, 2]), (Series("a", np.array([0.5, 1.0])),), "n", y_unit="ratio"
    )
    assert text_of(chart).splitlines() == [
        "**Speed**",
        "",
        "| n | a |",
        "| ---: | ---: |",
        "| 1 | 50.0% |",
        "| 2 | 100% |",
    ]


def test_long_chart_is_thinned_out_and_an_empty_one_says_so() -> None:
    long = Chart("L", np.arange(1000), (Series("a", np.arange(1000)),))
    empty = Chart("E", np.array([]), ())
    assert 20 < len(text_of(long).splitlines()) < 50
    assert text_of(empty) == "**E**: no data"


def test_stack_is_all_its_frames() -> None:
    stack = Stack((Frame("step", "train.py", 15), Frame("main", "train.py", 3)))
    table = Table((Column("where", "stack"),), ((stack,), (Stack(()),)))
    assert text_of(table).splitlines()[2:] == [
        "| train.py:15 step ← train.py:3 main |",
        "| no stack recorded |",
    ]


@pytest.mark.parametrize(
    ("hostile", "written"),
    [
        ("a|b", r"a\|b"),
        ("<script>", r"\<script\>"),
        ("[x](javascript:y)", r"\[x\](javascript:y)"),
        ("![x](y)", r"!\[x\](y)"),
        ("`code` *bold* _it_ ~~no~~", r"\`code\` \*bold\* \_it\_ \~\~no\~\~"),
        ("a\nb\r\n\n# c", r"a b \# c"),
        ("back\\slash", r"back\\slash"),
        ("https://x.y www.x.y", r"https\://x.y www\.x.y"),
        ("&lt; $x$", r"\&lt; \$x\$"),
        ("@user #12 a@b # c", r"@&#8203;user \#&#8203;12 a@b \# c"),
        ("a\x1b[31mb\u202ec\ud800", r"a\\x1b\[31mb\\u202ec\\ud800"),
    ],
)
def test_text_is_shown_literally(hostile: str, written: str) -> None:
    assert cell(hostile) == written


@pytest.mark.parametrize(
    ("caption", "written"),
    [
        ("- a", r"\- a"),
        ("1. a", r"1\. a"),
        ("===", r"\==="),
        ("2) b", r"2\) b"),
        ("plain", "plain"),
    ],
)
def test_paragraph_is_no_list_and_no_heading(caption: str, written: str) -> None:
    assert text_of(Table((Column("a"),), (), caption=caption)).splitlines()[-1] == written


def test_titles_are_escaped_too_and_everything_is_valid_utf8() -> None:
    document = Document("<b>\ud800", (Section("*s*", (Note("ok", "\ud800 n"),)),))
    assert render(document).encode().decode().splitlines()[0] == r"# \<b\>\\ud800"
