"""Render a Document as one HTML file that needs no network."""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
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
from cudakit.report.picture import Figure, NoData, Picture, Plot
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
    style_sheet = files("cudakit.report").joinpath("assets/page.css").read_text(encoding="utf-8")
    scripts = [joined_script(name, package) for name, package in sorted(set(_scripts(document)))]
    page = element(
        "html",
        _head(document.title, style_sheet, scripts),
        _NEWLINE,
        _body(document, scripts, footer),
        lang="en",
    )
    return f"<!DOCTYPE html>\n{page}\n"


def _scripts(document: Document) -> Iterator[tuple[str, str]]:
    """Yield the scripts that the nodes of a document need: the name and the package of each."""
    for node in walk(document.nodes):
        if isinstance(node, Explorer):
            yield node.kind, node.package
        elif isinstance(node, Note) and node.settings:
            yield "copy_settings", "cudakit.report"


def _head(title: str, style: str, scripts: Sequence[str]) -> Markup:
    head_elements = (
        element("meta", charset="utf-8"),
        element(
            "meta", http_equiv="Content-Security-Policy", content=_content_policy(style, scripts)
        ),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="referrer", content="no-referrer"),
        # Without this link, a browser requests an icon from the server.
        element("link", rel="icon", href="data:,"),
        element("title", title),
        element("style", Markup(style)),
    )
    return element(
        "head",
        *(
            line_element
            for head_element in head_elements
            for line_element in (_NEWLINE, head_element)
        ),
        _NEWLINE,
    )


def _content_policy(style: str, scripts: Sequence[str]) -> str:
    script_sources = "".join(f" '{_digest(script)}'" for script in scripts)
    script_policy = f"script-src{script_sources}; " if scripts else ""
    return (
        f"default-src 'none'; style-src '{_digest(style)}'; {script_policy}img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode('ascii')}"


def _body(document: Document, scripts: Sequence[str], footer: str) -> Markup:
    place = Place(level=2, anchor="part", columns=columns_of(document))
    content = element(
        "main",
        element("h1", document.title),
        *(
            line_element
            for node_element in draw_nodes(document.nodes, place)
            for line_element in (_NEWLINE, node_element)
        ),
        _NEWLINE,
        element("footer", footer) if footer else None,
        class_="interactive"
        if any(isinstance(node, Explorer) for node in walk(document.nodes))
        else None,
    )
    contents = _table_of_contents(document)
    return element(
        "body",
        _arrow_heads(),
        contents,
        _NEWLINE,
        content,
        *(element("script", Markup(script)) for script in scripts),
        class_="with-contents" if contents else None,
    )


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
    arrow_heads = (_arrow_head(kind) for kind in ("order", "missing"))
    return element(
        "svg",
        element("defs", *arrow_heads),
        class_="hidden",
        width=0,
        height=0,
        aria_hidden="true",
    )


def _arrow_head(kind: str) -> Markup:
    return element(
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


# --- tables, and values in their cells and in facts ------------------------------------------------

# Maximum number of frames of a call stack: an endless recursion has thousands.
_MAX_FRAMES = 100
_BAR_WIDTH = 72


def table(node: Table) -> Markup:
    """Return a table; a table wider than the page scrolls separately."""
    table_head = element("thead", element("tr", *map(_heading_cell, node.columns)))
    table_rows = (
        line_element
        for row_number, row in enumerate(node.rows)
        for line_element in (
            _NEWLINE,
            _row_element(node.columns, row, is_faint=row_number in node.faint_rows),
        )
    )
    total_row = node.total_row
    table_element = element(
        "table",
        table_head,
        element("tbody", *table_rows) if node.rows else None,
        element("tfoot", _row_element(node.columns, total_row)) if total_row else None,
    )
    is_wide = any(column.kind == "stack" for column in node.columns)
    frame_element = element(
        "div",
        table_element,
        class_="scroll wide" if is_wide else "scroll",
        # Only an element with focus can be scrolled with the keyboard.
        tabindex=0,
        role="region",
        aria_label=_table_name(node),
    )
    empty_note = None if node.rows else element("p", "nothing to list", class_="muted")
    caption = element("p", node.caption, class_="caption") if node.caption else None
    return join((frame_element, empty_note, caption))


def _table_name(node: Table) -> str:
    return "Table of " + ", ".join(column.name for column in node.columns if column.name)


def _heading_cell(column: Column) -> Markup:
    return element("th", column.name, scope="col", class_=column.kind)


def _row_element(
    columns: Sequence[Column], values: Sequence[Value], *, is_faint: bool = False
) -> Markup:
    return element("tr", *map(_table_cell, columns, values), class_="muted" if is_faint else None)


def _table_cell(column: Column, value: Value) -> Markup:
    is_bar = column.kind == "bar" and isinstance(value, Ratio) and math.isfinite(value.value)
    content = _bar_element(value) if is_bar and isinstance(value, Ratio) else cell(value)
    return element("td", content, class_=column.kind)


def _bar_element(ratio: Ratio) -> Markup:
    bar_length = round(min(max(ratio.value, 0.0), 1.0) * _BAR_WIDTH, 1)
    # A nonzero share is always visible.
    bar_length = max(bar_length, 1.0) if ratio.value > 0 else bar_length
    bar = element(
        "svg",
        element("rect", class_="track", width=_BAR_WIDTH, height=8, rx=2),
        element("rect", class_="fill", width=bar_length, height=8, rx=2),
        width=_BAR_WIDTH,
        height=8,
        aria_hidden="true",
    )
    return join((bar, element("span", format_value(ratio))))


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
    hidden_count = len(stack.frames) - _MAX_FRAMES
    hidden_frames = (
        element("li", f"{hidden_count:,} more frames", class_="muted") if hidden_count > 0 else None
    )
    return element(
        "details",
        element("summary", _frame_element(call_site), *_leaf_text(stack)),
        element("ol", *frames, hidden_frames),
        class_="stack",
    )


def _leaf_text(stack: Stack) -> tuple[Markup | str, ...]:
    """Return the innermost frame if it is not the call site, and the caller that distinguishes the stack."""
    leaf_frame, caller = leaf(stack), distinct_caller(stack)
    arrows_and_frames = ((" → ", leaf_frame), (" ← … ", caller))
    return tuple(
        text_part
        for arrow, frame in arrows_and_frames
        if frame
        for text_part in (arrow, _frame_element(frame))
    )


def _frame_element(frame: Frame, *, full_path: bool = False) -> Markup:
    """Return the function, file and line of a frame; ``full_path`` selects the full path."""
    location = f"{frame.filename}:{frame.line}" if full_path and frame.line else format_place(frame)
    function_element = element("span", frame.name or "?", class_="function")
    return join(
        (function_element, " ", element("span", location, class_="place"))
        if location
        else (function_element,)
    )
