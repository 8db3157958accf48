"""Escaping, wrapping and cutting of text for a terminal."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from cudakit.report.console.text import MAX_TEXT_LENGTH, cut, escape, wrap

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
