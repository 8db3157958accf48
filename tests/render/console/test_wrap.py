"""Words into lines."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from cudakit.render.console.wrap import cut, wrapped

WORDS = st.lists(st.text("ab漢🙂", min_size=1, max_size=12), max_size=12).map(" ".join)


@given(WORDS, st.integers(2, 30))
def test_no_line_is_too_wide_and_no_word_is_lost(text: str, width: int) -> None:
    lines = wrapped(text, width)
    assert all(cell_len(line) <= width for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


def test_lines_break_at_spaces_and_inside_a_word_only_where_it_fits_on_no_line() -> None:
    assert wrapped("one two three", 8) == ["one two", "three"]
    assert wrapped("a extraordinary", 8) == ["a", "extraord", "inary"]


def test_a_word_of_marks_alone_takes_no_room_and_is_kept() -> None:
    assert wrapped(":: \u0301 x", 2) == ["::", "\u0301 x"]


def test_words_beyond_the_last_line_allowed_leave_an_ellipsis() -> None:
    assert wrapped("one two three four", 8, most=2) == ["one two", "three f…"]
    assert wrapped("one two", 8, most=1) == ["one two"]


def test_cut_text_fits_also_where_a_wide_character_would_not() -> None:
    assert cut("漢字漢字", 5) == "漢字…"
    assert cell_len(cut("漢字漢字", 4)) == 4
    assert cut("漢字", 4) == "漢字"
    assert cut("漢字", 0) == ""
