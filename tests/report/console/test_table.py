"""Tables on the terminal."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from cudakit.report import console
from cudakit.report.console.table import MAX_TEXT_LENGTH, cut, escape, table_lines, wrap
from cudakit.report.document import Bytes, Column, Count, Document, Ratio, Stack, Table, Text
from cudakit.stacks import Frame
from cudakit.units import Unavailable

SITE = Stack(
    (
        Frame("forward", "/home/ada/llm/model/attention.py", 97),
        Frame("step", "/home/ada/llm/train/loop.py", 214),
    )
)
SIZE, BLOCKS = Column("size", "number"), Column("blocks", "number")
SHARE, AT = Column("share", "bar"), Column("allocated at", "stack")


def drawn(table: Table, width: int) -> list[str]:
    return [line.plain.rstrip() for line in table_lines(table, width)]


def test_numbers_are_right_aligned_and_text_left_aligned() -> None:
    table = Table((Column("pool"), SIZE), ((Text("large"), Bytes(2048)), (Text("s"), Bytes(9))))
    assert drawn(table, 80) == [
        "pool       size",
        "───────────────",
        "large  2.00 KiB",
        "s           9 B",
    ]


def test_bar_length_is_its_share_and_nonzero_is_visible() -> None:
    shares = (1.0, 0.5, 0.0125, 1e-9, 0.0, 7.0, -0.5)
    table = Table((SHARE,), tuple((Ratio(share),) for share in shares))
    assert drawn(table, 80)[2:] == [
        "██████████   100%",
        "█████       50.0%",
        "▏            1.2%",
        "▏           <0.1%",
        "             0.0%",
        "██████████   700%",
        "           -50.0%",
    ]


def test_bar_without_a_value_is_not_available() -> None:
    cells = ((Unavailable("no total"),), (Ratio(float("nan")),))
    assert drawn(Table((SHARE,), cells), 80)[2:] == ["n/a", "n/a"]


def test_total_row_is_last_and_has_no_bar() -> None:
    table = Table((SIZE, SHARE), ((Bytes(8), Ratio(0.5)),), total_row=(Bytes(16), Ratio(1)))
    assert drawn(table, 80)[-2:] == ["───────────────────────", "16 B               100%"]


def test_wide_table_cuts_bars_before_stacks() -> None:
    table = Table((SIZE, SHARE, AT), ((Bytes(8 << 30), Ratio(0.5), SITE),))
    assert drawn(table, 58)[2:] == ["8.00 GiB  █████       50.0%  model/attention.py:97 forward"]
    assert drawn(table, 53)[2:] == ["8.00 GiB  ██▌    50.0%  model/attention.py:97 forward"]
    assert drawn(table, 42)[2:] == ["8.00 GiB   50.0%  …/attention.py:97 forwa…"]


def test_header_wraps_before_cells_are_cut() -> None:
    wide = Column("largest free block", "number")
    table = Table((wide, AT), ((Bytes(8 << 30), SITE),))
    assert drawn(table, 39) == [
        " largest",
        "    free",
        "   block  allocated at",
        "───────────────────────────────────────",
        "8.00 GiB  model/attention.py:97 forward",
    ]


def test_stacks_that_look_the_same_get_a_second_line() -> None:
    def stack(line: int) -> Stack:
        frame = Frame("linear", "/site-packages/torch/nn/functional.py", line)
        return Stack((frame, Frame("forward", "/llm/model/attention.py", 97)), 1, distinct_index=0)

    other = Stack((Frame("step", "/llm/train/loop.py", 7),))
    table = Table((AT,), ((stack(1),), (stack(2),), (other,)))
    assert drawn(table, 30)[2:] == [
        "model/attention.py:97 forward",
        "  (…/functional.py:1 linear)",
        "model/attention.py:97 forward",
        "  (…/functional.py:2 linear)",
        "train/loop.py:7 step",
    ]


def test_optional_columns_are_hidden_first() -> None:
    columns = (Column("first", "number", is_optional=True), *(Column(n, "number") for n in "ab"))
    rows = ((Count(10**7), Count(10**8), Count(10**9)),)
    table = Table(columns, rows, caption="First: the first one. B: the last one.")
    assert drawn(table, 30)[2:] == [
        "100,000,000  1,000,000,000",
        "Columns hidden at this width:",
        "first.",
        "B: the last one.",
    ]


def test_columns_left_out_are_named() -> None:
    columns = (SIZE, SHARE, *(Column(f"count {i}", "number") for i in range(4)), AT)
    row = (Bytes(8 << 30), Ratio(0.5), *(Count(10**7 + i) for i in range(4)), SITE)
    assert drawn(Table(columns, (row,)), 60)[2:] == [
        "8.00 GiB  10,000,000  10,000,001  …/attention.py:97 forward",
        "Columns hidden at this width: share, count 2, count 3.",
    ]


def test_numbers_are_never_cut_on_a_terminal_of_eighty() -> None:
    numbers = tuple(Column(f"n{i}", "number") for i in range(5))
    row = (*(Bytes(1023 << 20) for _ in numbers), SITE)
    lines = drawn(Table((*numbers, AT), (row,)), 78)
    assert lines[-1].count("1023 MiB") == 5


def test_wide_terminal_shows_callers() -> None:
    table = Table((SIZE, AT), ((Bytes(8), SITE),))
    assert "←" not in drawn(table, 115)[-1]
    assert drawn(table, 116)[-1] == " 8 B  model/attention.py:97 forward ← train/loop.py:214 step"


def test_long_text_wraps_to_four_lines_with_an_ellipsis() -> None:
    table = Table((SIZE, Column("remark")), ((Bytes(8), Text("one two three four " * 5)),))
    assert drawn(table, 24)[2:] == [
        " 8 B  one two three four",
        "      one two three four",
        "      one two three four",
        "      one two three fou…",
    ]


def test_table_without_rows_shows_none_and_its_caption() -> None:
    lines = drawn(Table((Column("name"), SIZE), (), "Nothing was freed."), 80)
    assert lines[2:] == ["(none)", "Nothing was freed."]


def test_wide_characters_keep_the_columns_aligned() -> None:
    table = Table((Column("name"), BLOCKS), ((Text("注意"), Count(1)), (Text("abcd"), Count(2))))
    assert drawn(table, 80)[2:] == ["注意       1", "abcd       2"]


FAINT = Document(
    "Devices",
    (
        Table(
            (Column("device"), Column("memory", "number")),
            ((Text("shown"), Count(1)), (Text("hidden"), Count(2))),
            faint_rows=frozenset({1}),
        ),
    ),
)


def test_faint_row_is_dim_and_the_others_are_not() -> None:
    shown, hidden = console.render(FAINT, width=60, color=True).splitlines()[-2:]

    assert "shown" in shown
    assert "\x1b[2m" not in shown
    assert "\x1b[2mhidden" in hidden


def test_faint_row_without_color_is_plain() -> None:
    last = console.render(FAINT, width=60, color=False).splitlines()[-1]

    assert last.split() == ["hidden", "2"]


# --- Escaping, wrapping and cutting of text for a terminal -----------------------------------------

WORDS = st.lists(st.text("ab漢🙂", min_size=1, max_size=12), max_size=12).map(" ".join)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("plain [bold] {text} 漢字 é", "plain [bold] {text} 漢字 é"),
        ("\x1b[2Jgone", r"\x1b[2Jgone"),
        ("two\nlines\r\tand a tab", r"two\nlines\r\tand a tab"),
        ("\u202eright to left", r"\u202eright to left"),
        ("zero\u200bwidth\ufeff", r"zero\u200bwidth\ufeff"),
        ("c1 \x9b31m", r"c1 \x9b31m"),
        ("lone \ud800 surrogate", r"lone \ud800 surrogate"),
        ("line\u2028separator", r"line\u2028separator"),
        ("heart\ufe0f", r"heart\ufe0f"),
        ("unassigned \U000e0fff", r"unassigned \U000e0fff"),
    ],
)
def test_invisible_characters_are_escaped(written: str, shown: str) -> None:
    assert escape(written) == shown


def test_large_text_is_cut_before_it_is_escaped() -> None:
    start = time.perf_counter()
    assert escape("\x1b" * 50_000_000, limit=10) == r"\x1b\x1b\…"
    assert len(escape("x" * 50_000_000)) == MAX_TEXT_LENGTH
    assert time.perf_counter() - start < 5, "to escape the whole text takes minutes"


def test_text_of_exactly_the_limit_is_not_cut() -> None:
    assert escape("x" * 10, limit=10) == "x" * 10
    assert escape("x" * 11, limit=10) == "x" * 9 + "…"


@given(st.text(st.characters(exclude_categories=())), st.integers(1, 50))
def test_escaped_text_is_printable_and_short(text: str, limit: int) -> None:
    safe = escape(text, limit=limit)
    assert safe.isprintable()
    assert len(safe) <= limit
    assert escape(safe, limit=limit) == safe


@given(WORDS, st.integers(2, 30))
def test_wrapped_lines_fit_and_lose_no_word(text: str, width: int) -> None:
    lines = wrap(text, width)
    assert all(cell_len(line) <= width for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


def test_lines_break_at_spaces_and_inside_overlong_words() -> None:
    assert wrap("one two three", 8) == ["one two", "three"]
    assert wrap("a extraordinary", 8) == ["a", "extraord", "inary"]


def test_word_of_combining_marks_is_kept() -> None:
    assert wrap(":: \u0301 x", 2) == ["::", "\u0301 x"]


def test_words_after_the_last_line_become_an_ellipsis() -> None:
    assert wrap("one two three four", 8, max_lines=2) == ["one two", "three f…"]
    assert wrap("one two", 8, max_lines=1) == ["one two"]


def test_cut_before_a_wide_character_fits() -> None:
    assert cut("漢字漢字", 5) == "漢字…"
    assert cell_len(cut("漢字漢字", 4)) == 4
    assert cut("漢字", 4) == "漢字"
    assert cut("漢字", 0) == ""
