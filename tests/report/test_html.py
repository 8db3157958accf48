"""The HTML page: every node, escaping of all text, and the content-security policy."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from base64 import b64encode
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markup_tree import Node, read

from cudakit.report.document import (
    Bytes,
    Chart,
    Column,
    Columns,
    Count,
    Document,
    Explorer,
    ExplorerData,
    Facts,
    Marker,
    Note,
    Rate,
    Ratio,
    Seconds,
    Section,
    Series,
    Stack,
    Table,
    Text,
    View,
)
from cudakit.report.document import Node as DocumentNode
from cudakit.report.escape import TEXT_LIMIT, TITLE_LIMIT, Markup, element, escape, join
from cudakit.report.html import render
from cudakit.report.picture import Caption, Drawing, Figure, Key, Legend, name_beside, shape
from cudakit.stacks import Frame
from cudakit.units import Unavailable

MIB = 2**20

HOSTILE = (
    "<script>alert(1)</script>",
    "</style><img src=x onerror=alert(1)>",
    "\"' onload=alert(1) x='",
    "</title></svg><b>&amp;&lt;",
    "<!-- ]]> --> <![CDATA[",
    "\x00\x07\x1b[31m\r\n\t",
    "\u202egnp.exe\u2066\u2028\ufeff",
    "\ud800 lone \udfff",
    "&#60;b&#62; &nosuch; %3Cb%3E ${x} {x}",
)

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)


def report(text: str = "name") -> Document:
    """Return a document with every kind of node and value, and the same text in every place."""
    stack = Stack(
        (Frame("malloc", "", 0), Frame(text, f"dir/{text}.py", 7), Frame("main", "m.py", 1)), 1
    )
    return Document(
        text,
        (
            Note("error", f"{text} ran out", remedies=(text,)),
            Facts(((text, Text(text)), ("held", Bytes(3 * MIB)), ("power", Unavailable(text)))),
            Section(
                text,
                (
                    table(text, stack),
                    *charts(text),
                ),
            ),
            Section("Layout", (*layout_columns(text), layout_view())),
        ),
    )


def table(text: str, stack: Stack) -> Table:
    return Table(
        (Column("size", "number"), Column("share", "bar"), Column(text), Column("at", "stack")),
        (
            (Bytes(2 * MIB), Ratio(0.5), Text(text), stack),
            (Count(7), Ratio(0.0), Seconds(1.5), Stack(())),
        ),
        caption=text,
        total_row=(Bytes(4 * MIB), Ratio(1.0), Rate(1e9, text), Frame(text, text, 3)),
    )


def charts(text: str) -> tuple[Chart, ...]:
    x = np.arange(4)
    curves = (Series(text, x * MIB), Series("b", x[::-1] * MIB))
    return (
        Chart(text, x, curves, text, "seconds", markers=(Marker(1.0, text, "error"),)),
        Chart(text, x, curves, y_unit="count"),
    )


def layout_columns(text: str = "default") -> tuple[Columns, Columns]:
    segments = Columns(
        "segments",
        {
            "address": np.array([2**40, 2**41], np.uint64),
            "size": np.array([20 * MIB, 2 * MIB]),
            "stream": np.array([0, 0]),
            "pool": np.array([0, 0]),
            "kind": np.array([0, 1], np.uint8),
        },
        {"pool": (text,), "kind": ("large", text)},
    )
    blocks = Columns(
        "blocks",
        {
            "segment": np.array([0, 0, 0, 1]),
            "offset": np.array([0, 8 * MIB, 12 * MIB, 0]),
            "size": np.array([8 * MIB, 4 * MIB, 8 * MIB, MIB]),
            "requested": np.array([6 * MIB, 0, 0, MIB]),
            "state": np.array([1, 2, 0, 1], np.uint8),
        },
    )
    return segments, blocks


def draw_layout(columns: Sequence[Columns]) -> Figure:
    """Draw a bar for each segment, with the texts of the columns in labels and tooltips."""
    segments, blocks = columns
    names = segments.text["pool"] + segments.text["kind"]
    bars = [
        shape(
            "rect",
            title=name,
            class_="free",
            x=0,
            y=20 * i,
            width=10 * len(blocks.arrays),
            height=18,
        )
        for i, name in enumerate(names)
    ]
    labels = [name_beside(name, y=20 * i) for i, name in enumerate(names)]
    return Figure(
        "layout",
        (
            Legend((Key(shape("rect", class_="used"), names[0], names[-1]),), width=24),
            Drawing(f"Layout of {names[0]}", (*bars, *labels), 80, description=names[-1]),
            Caption(names[0]),
        ),
    )


def layout_view() -> View:
    names = ("segments", "blocks")
    return View("layout", names, draw_layout, Note("info", "no picture here"))


def body(*nodes: DocumentNode) -> Node:
    return read(render(Document("Title", nodes))).one("main")


# --- safety ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", HOSTILE)
def test_text_cannot_close_its_element(text: str) -> None:
    assert read(render(report(text))).skeleton() == read(render(report())).skeleton()


@settings(max_examples=15, deadline=None)
@given(st.text(st.characters() | st.sampled_from("<>&\"'/=`"), min_size=1, max_size=12))
def test_arbitrary_text_cannot_close_its_element(text: str) -> None:
    assert read(render(report(text))).skeleton() == read(render(report())).skeleton()


def test_markup_in_text_is_shown_literally() -> None:
    words = read(render(report(HOSTILE[0]))).one("main").one("h1").text
    assert words == HOSTILE[0]


def test_policy_allows_only_the_stylesheet_of_the_page() -> None:
    page = read(render(report()))
    digest = b64encode(sha256(page.one("style").text.encode()).digest()).decode()
    (policy,) = (
        node.attributes["content"]
        for node in page.all("meta")
        if node.attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def test_policy_of_a_page_with_many_scripts_is_complete() -> None:
    kinds = ("memory", "memory_devices", "memory_difference")
    explorers = [
        Explorer(kind, "cudakit.memory.report", lambda: ExplorerData({}, {})) for kind in kinds
    ]
    page = read(render(Document("pages", (*explorers, Note("info", "a", settings="b:1")))))

    digests = [
        b64encode(sha256(script.text.encode()).digest()).decode()
        for script in page.all("script")
        if "type" not in script.attributes
    ]
    (policy,) = (
        node.attributes["content"]
        for node in page.all("meta")
        if node.attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert len(digests) == 4
    script_sources = " ".join(f"'sha256-{digest}'" for digest in digests)
    assert f"; script-src {script_sources}; " in str(policy)
    assert str(policy).endswith("; base-uri 'none'; form-action 'none'")


def test_page_has_no_external_references() -> None:
    page = read(render(report()))
    nodes = page.walk()
    assert not {"script", "iframe", "img", "base", "form", "object"} & {node.tag for node in nodes}
    names = {name for node in nodes for name in node.attributes}
    assert not {
        n for n in names if n in ("style", "src", "srcset") or n.startswith(("on", "xlink"))
    }
    links = {node.attributes["href"] for node in nodes if "href" in node.attributes}
    assert all(link is not None and link.startswith(("#", "data:,")) for link in links)
    style = page.one("style").text
    assert all(url.startswith("url(#") for url in re.findall(r"url\([^)]*\)", style))
    assert "@import" not in style
    assert "http" not in style


def test_any_text_can_be_written_as_utf_8() -> None:
    assert render(report("\ud800")).encode()


def test_megabyte_in_every_text_gives_a_small_page() -> None:
    assert len(render(report("x" * MIB))) < 300_000


# --- structure -------------------------------------------------------------------------------------


def test_headings_go_down_one_level_at_a_time() -> None:
    main = body(Section("a", (Section("b", (Section("c", (Note("ok", "."),)),)),)))
    headings = [n for n in main.walk() if re.fullmatch("h[1-6]", n.tag)]
    assert [(n.tag, n.text) for n in headings] == [
        ("h1", "Title"),
        ("h2", "a"),
        ("h3", "b"),
        ("h4", "c"),
    ]


def test_contents_link_every_section_at_the_top() -> None:
    page = read(render(report()))
    links = [node.attributes["href"] for node in page.one("nav").all("a")]
    identities = [node.attributes["id"] for node in page.walk() if "id" in node.attributes]
    assert [f"#{identity}" for identity in identities if identity in str(links)] == links
    assert len(identities) == len(set(identities))


def test_section_with_nothing_to_show_is_left_out() -> None:
    page = read(render(Document("t", (Section("empty", layout_columns()), Note("ok", "fine")))))
    assert not page.all("section")
    assert not page.all("nav")


def test_every_picture_has_a_title_or_label() -> None:
    pictures = [n for n in read(render(report())).all("svg") if n.attributes.get("role") == "img"]
    assert len(pictures) == 3
    assert all([child.tag for child in n.children[:2]] == ["title", "desc"] for n in pictures)


def test_small_report_equals_the_golden_file(golden: Callable[[str, str], None]) -> None:
    page = render(report("name"))
    style = read(page).one("style").text
    digest = b64encode(sha256(style.encode()).digest()).decode()
    golden("html-report.html", page.replace(style, "").replace(digest, "DIGEST"))


# --- nodes -----------------------------------------------------------------------------------------


def test_note_has_its_level_as_a_word() -> None:
    main = body(Note("warn", "Old driver.", remedies=("Update it.",)))
    assert main.one("div", "warn").words == "!Warning Old driver.Update it."


def test_note_shows_its_evidence_and_its_settings_as_text_to_copy() -> None:
    settings = "VARIABLE='<b>a:1'"
    note = Note("info", "Set it.", evidence=("1 < 2",), settings=settings)
    page = read(render(Document("Title", (note,))))
    assert page.one("ul", "evidence").words == "1 < 2"
    assert page.one("code").words == settings
    assert "hidden" in page.one("button").attributes
    digest = b64encode(sha256(page.one("script").text.encode()).digest()).decode()
    (policy,) = [meta.attributes["content"] for meta in page.all("meta")[1:2]]
    assert f"script-src 'sha256-{digest}'" in (policy or "")


def test_page_without_settings_or_explorers_has_no_script() -> None:
    assert not read(render(Document("Title", (Note("info", "Set it."),)))).all("script")


def test_unavailable_fact_has_its_reason() -> None:
    main = body(Facts((("power", Unavailable("not permitted")),)))
    assert main.one("dd").words == "n/a: not permitted"


def test_cells_have_the_class_of_their_column() -> None:
    row = body(table("t", Stack(()))).one("tbody").all("tr")[0]
    assert [node.attributes["class"] for node in row.children] == ["number", "bar", "text", "stack"]


def test_bar_length_is_its_ratio_and_nonzero_is_visible() -> None:
    ratios = (0.0, 1e-6, 0.5, 7.0)
    main = body(Table((Column("share", "bar"),), tuple((Ratio(ratio),) for ratio in ratios)))
    widths = [float(node.attributes["width"] or "") for node in main.all("rect", "fill")]
    assert widths == [0, 1, 36, 72]


def test_stack_opens_from_its_site_to_all_frames() -> None:
    stack = Stack(
        (Frame("malloc", "", 0), Frame("step", "a/b/train.py", 7), Frame("main", "m.py", 1)), 1
    )
    details = body(Table((Column("at", "stack"),), ((stack,),))).one("details")
    assert details.one("summary").words == "step b/train.py:7 → malloc"
    frames = [item.words for item in details.one("ol").children]
    assert frames == ["malloc", "step a/b/train.py:7", "main m.py:1"]


def test_first_hundred_frames_of_a_deep_stack_are_listed() -> None:
    stack = Stack((Frame("f", "f.py", 1),) * 5000, 9999)
    items = body(Table((Column("at", "stack"),), ((stack,),))).one("ol").children
    assert len(items) == 101
    assert items[-1].words == "4,900 more frames"


def test_empty_table_has_a_sentence() -> None:
    assert body(Table((Column("a"),), ())).all("p")[0].words == "nothing to list"


def test_faint_row_is_muted() -> None:
    rows = ((Text("shown"),), (Text("hidden"),))
    table_ = body(Table((Column("device"),), rows, faint_rows=frozenset({1}))).one("tbody")

    assert [row.words for row in table_.all("tr", "muted")] == ["hidden"]


def test_view_finds_columns_in_other_sections() -> None:
    main = body(layout_view(), Section("data", (Section("deep", layout_columns()),)))
    assert "no picture here" not in main.words
    assert main.all("figure", "layout")


def test_view_without_its_columns_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"missing Columns: \['segments', 'blocks'\]"):
        body(layout_view())


# --- a real browser --------------------------------------------------------------------------------


def console(page: str, place: Path) -> list[str]:
    """Open a page in a browser, and return the messages of its console."""
    file = place / "page.html"
    file.write_text(page, encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    flags += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    flags += ["--enable-logging=stderr"]
    run = subprocess.run(
        [
            CHROMIUM,
            *flags,
            f"--user-data-dir={place / 'profile'}",
            f"--screenshot={place / 'page.png'}",
            file.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
        env={**os.environ, "HOME": str(place)},
    )
    assert (place / "page.png").stat().st_size > 0
    return [line for line in run.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium on PATH")
def test_browser_reports_no_policy_violation(tmp_path: Path) -> None:
    assert console(render(report(HOSTILE[1])), tmp_path) == []


@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium on PATH")
def test_browser_reports_a_style_attribute_and_an_external_image(
    tmp_path: Path,
) -> None:
    foreign = '<p style="color: red"></p><img src="https://localhost/x.png"></main>'
    complaints = console(render(report()).replace("</main>", foreign), tmp_path)
    assert len(complaints) == 2
    assert all("Content Security Policy" in line for line in complaints)


# --- Markup: text is escaped, and attributes that the policy of the page forbids raise an error ----


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
