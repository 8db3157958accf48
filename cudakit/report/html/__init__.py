"""Render a Document as one HTML file that needs no network."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Sequence
from hashlib import sha256
from importlib.resources import files

from cudakit.report.document import Document, Explorer, Note, Section, walk
from cudakit.report.html.explorer import joined_script
from cudakit.report.html.nodes import Place, columns_of, draw_nodes, is_empty
from cudakit.report.markup import Markup, element, escape

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
