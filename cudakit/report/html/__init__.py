"""Render a Document as one HTML file that needs no network."""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files

from cudakit.report.document import (
    LEVELS,
    NO_STACK,
    SYMBOLS,
    Chart,
    Column,
    Columns,
    Document,
    Explorer,
    Facts,
    Node,
    Note,
    Ratio,
    Section,
    Stack,
    Table,
    Text,
    Value,
    View,
    distinct_caller,
    format_place,
    format_value,
    leaf,
    site,
    walk,
)
from cudakit.report.escape import Markup, element, escape, join
from cudakit.report.html.explorer import explorer, joined_script
from cudakit.report.picture import Figure, NoData, Plot
from cudakit.report.svg import chart, figure, plot
from cudakit.stacks import Frame
from cudakit.units import Unavailable

_NEWLINE = Markup("\n")


def render(document: Document, *, footer: str = "") -> str:
    """Return a document as a page without external references.

    The page has scripts only if the document has Explorers, or settings to copy. ``footer`` says how the page
    was made.

    The content-security policy allows only the stylesheet and the scripts of the page, by their hashes (CSP
    Level 3, section 2.3.1), so that no text of the document can load, run or restyle anything.
    """
    style = files("cudakit.report").joinpath("assets/page.css").read_text(encoding="utf-8")
    nodes = list(walk(document.nodes))
    # The name and the package of each script.
    script_names = {
        *((node.kind, node.package) for node in nodes if isinstance(node, Explorer)),
        *(
            ("copy_settings", "cudakit.report")
            for node in nodes
            if isinstance(node, Note) and node.settings
        ),
    }
    scripts = [joined_script(name, package) for name, package in sorted(script_names)]
    contents = _table_of_contents(document)
    place = Place(2, "part", {node.name: node for node in nodes if isinstance(node, Columns)})
    main = element(
        "main",
        element("h1", document.title),
        *_on_lines(draw_nodes(document.nodes, place)),
        element("footer", footer) if footer else None,
        class_="interactive" if any(isinstance(node, Explorer) for node in nodes) else None,
    )
    body = element(
        "body",
        _arrow_heads(),
        contents,
        _NEWLINE,
        main,
        *(element("script", Markup(script)) for script in scripts),
        class_="with-contents" if contents else None,
    )
    page = element("html", _head(document.title, style, scripts), _NEWLINE, body, lang="en")
    return f"<!DOCTYPE html>\n{page}\n"


def _on_lines(elements: Iterable[Markup]) -> Iterator[Markup]:
    """Yield elements, each on a line of its own."""
    for one in elements:
        yield _NEWLINE
        yield one
    yield _NEWLINE


def _head(title: str, style: str, scripts: Sequence[str]) -> Markup:
    script_sources = "".join(f" '{_digest(script)}'" for script in scripts)
    script_policy = f"script-src{script_sources}; " if scripts else ""
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; {script_policy}img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    elements = (
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="referrer", content="no-referrer"),
        # Without this link, a browser requests an icon from the server.
        element("link", rel="icon", href="data:,"),
        element("title", title),
        element("style", Markup(style)),
    )
    return element("head", *_on_lines(elements))


def _digest(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode('ascii')}"


def _table_of_contents(document: Document) -> Markup | None:
    """Return links to the sections, or None for fewer than two; ``draw_nodes`` sets the anchors."""
    links = [
        element("li", element("a", escape(node.title, limit=80), href=f"#part-{index}"))
        for index, node in enumerate(document.nodes)
        if isinstance(node, Section) and not is_empty(node)
    ]
    if len(links) < 2:
        return None
    return element("nav", element("ul", *links), aria_label="Contents")


def _arrow_heads() -> Markup:
    """Return the arrow heads that the stylesheet refers to."""
    heads = (
        element(
            "marker",
            element("path", class_=f"head {kind}", d="M0 0l8 4l-8 4z"),
            id=f"head-{kind}",
            refX=8,
            refY=4,
            markerWidth=8,
            markerHeight=8,
            markerUnits="userSpaceOnUse",
            orient="auto",
        )
        for kind in ("order", "missing")
    )
    return element(
        "svg", element("defs", *heads), class_="hidden", width=0, height=0, aria_hidden="true"
    )


# --- nodes -----------------------------------------------------------------------------------------

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
    content = _on_lines(draw_nodes(section.nodes, inner_place))
    if section.is_folded:
        folded = element("details", element("summary", heading), *content, class_="folded")
        return element("section", folded, id=place.anchor)
    return element("section", heading, *content, id=place.anchor)


def _note_element(note: Note) -> Markup:
    settings = None
    if note.settings:
        # The script copy_settings.js shows the button.
        button = element("button", "copy", type="button", hidden=True)
        settings = element("div", element("code", note.settings), button, class_="settings")
    evidence = [element("li", line) for line in note.evidence]
    sentence = element(
        "div",
        element("strong", LEVELS[note.level]),
        " ",
        element("span", note.text),
        *(element("span", remedy, class_="hint") for remedy in note.remedies),
        element("ul", *evidence, class_="evidence") if evidence else None,
        settings,
    )
    badge = element("span", SYMBOLS[note.level], class_="badge", aria_hidden="true")
    return element("div", badge, sentence, class_=f"note {note.level}")


def _facts_element(facts: Facts) -> Markup:
    """Return labelled values: short ones as cards, and one below the other if one of them is long."""
    rows, previous, has_long_value = [], None, False
    for label, value in facts.rows:
        shown_label = "" if label == previous else label
        rows.append(element("div", element("dt", shown_label), element("dd", fact(value))))
        previous = label
        match value:
            case Stack() | Frame():
                has_long_value = True
            case Text(sentence) | Unavailable(sentence):
                has_long_value |= len(sentence) > _MAX_SHORT_TEXT
    return element("dl", *rows, class_="facts list" if has_long_value else "facts")


def _view_element(view: View, place: Place) -> Markup:
    if missing := [name for name in view.columns if name not in place.columns]:
        raise ValueError(f"the view {view.kind!r} names missing Columns: {missing}")
    match view.draw([place.columns[name] for name in view.columns]):
        case Figure() as picture:
            return figure(picture)
        case Plot() as picture:
            return plot(picture)
        case NoData(text):
            return element("p", text, class_="muted")


# --- tables, and values in their cells and in facts ------------------------------------------------

# Maximum number of frames of a call stack: an endless recursion has thousands.
_MAX_FRAMES = 100
_BAR_WIDTH = 72


def table(node: Table) -> Markup:
    """Return a table; a table wider than the page scrolls separately."""

    def row_element(values: Sequence[Value], class_: str | None = None) -> Markup:
        cells = (
            element("td", _table_cell(column, value), class_=column.kind)
            for column, value in zip(node.columns, values, strict=True)
        )
        return element("tr", *cells, class_=class_)

    head_cells = (
        element("th", column.name, scope="col", class_=column.kind) for column in node.columns
    )
    body: list[Markup] = []
    for number, row in enumerate(node.rows):
        body += _NEWLINE, row_element(row, "muted" if number in node.faint_rows else None)
    table_element = element(
        "table",
        element("thead", element("tr", *head_cells)),
        element("tbody", *body) if body else None,
        element("tfoot", row_element(node.total_row)) if node.total_row else None,
    )
    is_wide = any(column.kind == "stack" for column in node.columns)
    frame_element = element(
        "div",
        table_element,
        class_="scroll wide" if is_wide else "scroll",
        # Only an element with focus can be scrolled with the keyboard.
        tabindex=0,
        role="region",
        aria_label="Table of " + ", ".join(column.name for column in node.columns if column.name),
    )
    empty_note = None if node.rows else element("p", "nothing to list", class_="muted")
    caption = element("p", node.caption, class_="caption") if node.caption else None
    return join((frame_element, empty_note, caption))


def _table_cell(column: Column, value: Value) -> Markup:
    if column.kind == "bar" and isinstance(value, Ratio) and math.isfinite(value.value):
        bar_length = round(min(max(value.value, 0.0), 1.0) * _BAR_WIDTH, 1)
        # A nonzero share is always visible.
        bar_length = max(bar_length, 1.0) if value.value > 0 else bar_length
        bar = element(
            "svg",
            element("rect", class_="track", width=_BAR_WIDTH, height=8, rx=2),
            element("rect", class_="fill", width=bar_length, height=8, rx=2),
            width=_BAR_WIDTH,
            height=8,
            aria_hidden="true",
        )
        return join((bar, element("span", format_value(value))))
    return cell(value)


def cell(value: Value) -> Markup:
    """Return a value for a table cell; a stack is its call site, which unfolds to all frames."""
    match value:
        case Stack():
            return _stack_element(value)
        case Frame():
            return _frame_element(value)
        case Unavailable(reason):
            return element("span", format_value(value), class_="muted", title=reason)
        case _:
            return join((format_value(value),))


def fact(value: Value) -> Markup:
    """Return the markup of a value in a list of Facts. An unavailable value is shown with its reason."""
    match value:
        case Unavailable(reason):
            return element("span", f"{format_value(value)}: {reason}", class_="muted")
        case Text(text):
            return element("span", text, class_="words")
        case _:
            return cell(value)


def _stack_element(stack: Stack) -> Markup:
    if not stack.frames:
        return element("span", NO_STACK, class_="muted")
    call_site = site(stack)
    if len(stack.frames) == 1:
        return _frame_element(call_site)
    frames = (
        element(
            "li",
            _frame_element(frame, full_path=True),
            class_="site" if frame is call_site else None,
        )
        for frame in stack.frames[:_MAX_FRAMES]
    )
    hidden = len(stack.frames) - _MAX_FRAMES
    hidden_frames = element("li", f"{hidden:,} more frames", class_="muted") if hidden > 0 else None
    # The innermost frame if it is not the call site, and the caller that distinguishes the stack.
    summary: list[str] = [_frame_element(call_site)]
    for arrow, frame in ((" → ", leaf(stack)), (" ← … ", distinct_caller(stack))):
        if frame:
            summary += arrow, _frame_element(frame)
    return element(
        "details",
        element("summary", *summary),
        element("ol", *frames, hidden_frames),
        class_="stack",
    )


def _frame_element(frame: Frame, *, full_path: bool = False) -> Markup:
    """Return the function, file and line of a frame; ``full_path`` selects the full path."""
    location = f"{frame.filename}:{frame.line}" if full_path and frame.line else format_place(frame)
    function_element = element("span", frame.name or "?", class_="function")
    place = (" ", element("span", location, class_="place")) if location else ()
    return join((function_element, *place))
