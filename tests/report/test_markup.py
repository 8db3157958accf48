"""Markup: text is escaped, and attributes that the policy of the page forbids raise an error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markup_tree import read

from cudakit.report.markup import TEXT_LIMIT, TITLE_LIMIT, Markup, element, escape, join


@given(st.text(st.characters(), max_size=40))
def test_text_is_the_text_of_its_element_and_nothing_else(text: str) -> None:
    node = read(element("p", text, title=text)).one("p")
    visible = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    assert (node.text, node.attributes, node.children) == (visible, {"title": visible}, [])


def test_control_characters_and_bidirectional_overrides_become_visible() -> None:
    assert escape("a\x00\x1b\u202e\ud800\n") == r"a\x00\x1b\u202e\ud800\n"


def test_megabyte_of_text_is_cut_with_an_ellipsis() -> None:
    node = read(element("p", "x" * 2**20, title="y" * 2**20)).one("p")
    assert node.text == "x" * (TEXT_LIMIT - 1) + "…"
    assert node.attributes["title"] == "y" * (TITLE_LIMIT - 1) + "…"


def test_markup_is_not_escaped_again_and_text_beside_it_is() -> None:
    assert join((Markup("<b>"), "<b>", None)) == "<b>&lt;b&gt;"


def test_attributes_may_be_left_out_numbers_or_without_a_value() -> None:
    written = element("svg", class_=None, hidden=True, open=False, font_size=1.50, x=1234567)
    assert written == '<svg hidden font-size="1.5" x="1234567"></svg>'


@pytest.mark.parametrize(
    "attribute",
    [
        {"style": "color: red"},
        {"onclick": "x()"},
        {"href": "https://a"},
        {"href": "javascript:x()"},
    ],
)
def test_attributes_that_the_policy_forbids_are_rejected(attribute: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="content-security policy"):
        element("a", **attribute)  # type: ignore[arg-type]
