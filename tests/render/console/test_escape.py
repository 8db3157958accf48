"""Text from a file, made safe to print."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudakit.render.console.escape import LIMIT, escaped


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
def test_what_cannot_be_seen_is_written_out(written: str, shown: str) -> None:
    assert escaped(written) == shown


def test_a_megabyte_of_text_is_cut_at_once() -> None:
    start = time.perf_counter()
    assert escaped("\x1b" * 1_000_000, limit=10) == r"\x1b\x1b\…"
    assert len(escaped("x" * 1_000_000)) == LIMIT
    assert time.perf_counter() - start < 0.1


def test_text_of_just_the_limit_is_whole() -> None:
    assert escaped("x" * 10, limit=10) == "x" * 10
    assert escaped("x" * 11, limit=10) == "x" * 9 + "…"


@given(st.text(st.characters(exclude_categories=())), st.integers(1, 50))
def test_whatever_goes_in_what_comes_out_is_printable_and_short(text: str, limit: int) -> None:
    safe = escaped(text, limit=limit)
    assert safe.isprintable()
    assert len(safe) <= limit
    assert escaped(safe, limit=limit) == safe
