"""The picture of README shows the current output of the commands."""

from __future__ import annotations

import html
import re
from pathlib import Path

import draw_pictures

PICTURE = Path(__file__).parents[2] / "docs/images/terminal.svg"


def words(svg: str) -> str:
    """Return the visible text of an SVG without spaces; layout and colors do not affect the result."""
    text = re.sub(r"<style>.*?</style>|<[^>]*>", "", svg, flags=re.DOTALL)
    return "".join(html.unescape(text).split())


def test_picture_of_readme_shows_current_output_of_commands() -> None:
    assert words(draw_pictures.draw_terminal()) == words(PICTURE.read_text(encoding="utf-8")), (
        "run: python scripts/draw_pictures.py terminal"
    )


def test_picture_of_readme_loads_nothing_from_network() -> None:
    assert "url(" not in re.sub(r"url\(#[^)]*\)", "", PICTURE.read_text(encoding="utf-8"))
