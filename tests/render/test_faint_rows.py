from __future__ import annotations

from cudakit.document import Column, Count, Document, Table, Text
from cudakit.render import console, html

TABLE = Table(
    (Column("device"), Column("memory", "number")),
    ((Text("shown"), Count(1)), (Text("hidden"), Count(2))),
    faint=frozenset({1}),
)
DOCUMENT = Document("Devices", (TABLE,))


def test_a_row_that_stands_back_is_dim_on_a_terminal_and_the_others_are_not() -> None:
    shown, hidden = console.render(DOCUMENT, width=60, color=True).splitlines()[-2:]

    assert "shown" in shown
    assert "\x1b[2m" not in shown
    assert "\x1b[2mhidden" in hidden


def test_without_colour_a_row_that_stands_back_reads_like_any_other() -> None:
    last = console.render(DOCUMENT, width=60, color=False).splitlines()[-1]

    assert last.split() == ["hidden", "2"]


def test_a_row_that_stands_back_is_muted_on_a_page() -> None:
    page = html.render(DOCUMENT)

    assert page.count('<tr class="muted">') == 1
    assert page.index('<tr class="muted">') < page.index(">hidden<")
