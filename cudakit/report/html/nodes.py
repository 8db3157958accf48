"""Render the nodes of a document as HTML, one function for each kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cudakit.report.document import (
    Chart,
    Columns,
    Document,
    Explorer,
    Facts,
    Node,
    Note,
    Section,
    Stack,
    Table,
    Text,
    Value,
    View,
    walk,
)
from cudakit.report.html.explorer import explorer
from cudakit.report.html.table import fact, table
from cudakit.report.markup import Markup, element
from cudakit.report.picture import Figure, NoData, Picture, Plot
from cudakit.report.svg.chart import chart
from cudakit.report.svg.figure import figure
from cudakit.report.svg.plot import plot
from cudakit.report.values import LEVELS, SYMBOLS
from cudakit.stacks import Frame
from cudakit.units import Unavailable

_DEEPEST_HEADING = 6
# Number of characters that fit on two lines of a fact.
_MAX_SHORT_TEXT = 40


@dataclass(frozen=True, slots=True)
class Place:
    """The position of a node: the level of the next heading and the anchor; and all Columns by name."""

    level: int
    anchor: str
    columns: Mapping[str, Columns]


def draw_nodes(nodes: Sequence[Node], place: Place) -> Iterator[Markup]:
    """Yield nodes as HTML, without empty sections.

    Raises ValueError if a View names Columns that the document does not have.
    """
    for index, node in enumerate(nodes):
        if not is_empty(node):
            yield _draw_node(node, Place(place.level, f"{place.anchor}-{index}", place.columns))


def columns_of(document: Document) -> dict[str, Columns]:
    """Return all Columns of a document by name."""
    return {node.name: node for node in walk(document.nodes) if isinstance(node, Columns)}


def is_empty(node: Node) -> bool:
    """Return whether a page shows nothing for a node. Columns are for Views and exports."""
    match node:
        case Section():
            return all(map(is_empty, node.nodes))
        case Facts():
            return not node.rows
        case _:
            return isinstance(node, Columns)


def _draw_node(node: Node, place: Place) -> Markup:
    match node:
        case Section():
            return _section_element(node, place)
        case Note():
            return _note_element(node)
        case Facts():
            return _facts_element(node)
        case Table():
            return table(node)
        case Chart():
            return chart(node)
        case View():
            return _view_element(node, place)
        case Explorer():
            return explorer(node)
        case Columns():
            return Markup()


def _section_element(section: Section, place: Place) -> Markup:
    inner_place = Place(min(place.level + 1, _DEEPEST_HEADING), place.anchor, place.columns)
    heading = element(f"h{place.level}", section.title)
    content = (
        *(
            line
            for node_element in draw_nodes(section.nodes, inner_place)
            for line in (Markup("\n"), node_element)
        ),
        Markup("\n"),
    )
    if section.is_folded:
        folded_element = element("details", element("summary", heading), *content, class_="folded")
        return element("section", folded_element, id=place.anchor)
    return element("section", heading, *content, id=place.anchor)


def _note_element(note: Note) -> Markup:
    badge = element("span", SYMBOLS[note.level], class_="badge", aria_hidden="true")
    level_element = element("strong", LEVELS[note.level])
    hints = (element("span", remedy, class_="hint") for remedy in note.remedies)
    evidence_items = [element("li", line) for line in note.evidence]
    sentence = element(
        "div",
        level_element,
        " ",
        element("span", note.text),
        *hints,
        element("ul", *evidence_items, class_="evidence") if evidence_items else None,
        _settings_element(note.settings),
    )
    return element("div", badge, sentence, class_=f"note {note.level}")


def _settings_element(settings: str) -> Markup | None:
    """Return settings with a button that copies them; the script copy_settings.js shows the button."""
    if not settings:
        return None
    button = element("button", "copy", type="button", hidden=True)
    return element("div", element("code", settings), button, class_="settings")


def _facts_element(facts: Facts) -> Markup:
    """Return labelled values: short ones as cards, and one below the other if one of them is long."""
    previous_labels = (None, *(label for label, _ in facts.rows[:-1]))
    fact_elements = (
        element(
            "div",
            element("dt", "" if label == previous_label else label),
            element("dd", fact(value)),
        )
        for previous_label, (label, value) in zip(previous_labels, facts.rows, strict=True)
    )
    has_long_value = any(_is_long(value) for _, value in facts.rows)
    return element("dl", *fact_elements, class_="facts list" if has_long_value else "facts")


def _is_long(value: Value) -> bool:
    match value:
        case Stack() | Frame():
            return True
        case Text(sentence) | Unavailable(sentence):
            return len(sentence) > _MAX_SHORT_TEXT
        case _:
            return False


def _view_element(view: View, place: Place) -> Markup:
    missing_names = [name for name in view.columns if name not in place.columns]
    if missing_names:
        raise ValueError(f"the view {view.kind!r} names missing Columns: {missing_names}")
    return _picture(view.draw([place.columns[name] for name in view.columns]))


def _picture(picture: Picture) -> Markup:
    match picture:
        case Figure():
            return figure(picture)
        case Plot():
            return plot(picture)
        case NoData(text):
            return element("p", text, class_="muted")
