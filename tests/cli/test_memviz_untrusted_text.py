"""Texts of a snapshot are untrusted: outputs escape them."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from invocation import Cli, CliRun
from memory.load import files
from memory.load.files import KIB, LARGE, MIB, SMALL, block, event, frame, segment

ATTACKS = {
    "escape sequences": "\x1b[2J\x1b]0;title\x07\x1b[31mred\x9b31m",
    "control characters": "a\r\nb\tc\x00d\x08e\x7ff\x85g\u2028h\x0b\x0c",
    "console markup": "[red]text[/red] [bold [link=https://example.org]x[/link] [/] :smile: \\[",
    "bidirectional": "\u202egpj.exe\u202c \u2066x\u2069 \u200f\u200b\ufeff",
    "markup": "</style></script><script>alert(1)</script><img src=x onerror=alert(1)> ]]> <!-- &amp;",
    "attributes": "\" onmouseover=\"alert(1)\" x='\" ' onload='alert(1)' `",
    "formulas": '=HYPERLINK("https://example.org"),"x"\n+1\n@sum',
    "separators": "a;b;c 5\nroot;x 99999999\n",
    "lone surrogates": "\ud800x\udfff\udc80",
    "a flood": "A" * 20_000,
    "wide and joined": "漢字" * 300 + "e" + "\u0301" * 300 + "👩\u200d👩\u200d👧",
}

EVERY = pytest.mark.parametrize("text", ATTACKS.values(), ids=ATTACKS.keys())


def hostile(text: str) -> dict[str, Any]:
    """Return a snapshot with a text in every place for texts."""
    stack = [frame(text, 7, text), frame(text, 8, f"/home/{text}.py")]
    trace = [
        event("segment_alloc", SMALL, 2 * MIB, frames=stack),
        event("alloc", SMALL, 1000, frames=stack, compile_context=text, user_metadata=text),
        event("alloc", LARGE, 20 * MIB, frames=stack, category=text, user_metadata=f"{{{text}}}"),
        event(text, SMALL, 5, frames=stack),
        files.failed(2**40, device_free=MIB) | {"frames": stack},
    ]
    pieces = [block(SMALL, KIB, 1000, "active_allocated", frames=stack)]
    return files.snapshot(
        segments=[segment(SMALL, 2 * MIB, pieces, segment_type=text, frames=stack)],
        device_traces=[files.numbered(trace)],
        allocator_settings={"PYTORCH_CUDA_ALLOC_CONF": text, text: text},
        external_annotations=[
            {"name": text, "stage": stage, "device": 0, "time_us": 1_700_000_000_000_000 + i}
            for i, stage in enumerate(("START", "END", "START", text))
        ],
    )


def run(cli: Cli, tmp_path: Path, text: str, *options: str | Path) -> CliRun:
    # Invalid UTF-8 of a pickle becomes escapes.
    form = "plain.json" if "\ud800" in text else "protocol-4.pkl"
    path = tmp_path / form
    path.write_bytes(files.FORMS[form](hostile(text)))
    run = cli("memviz", path, *options)
    assert (run.exit_code, run.stderr) == (0, "")
    return run


def is_harmless(text: str) -> bool:
    return text.replace("\n", "").isprintable()


@EVERY
def test_terminal_report_has_no_control_characters(cli: Cli, tmp_path: Path, text: str) -> None:
    stdout = run(cli, tmp_path, text, "--top", "0").stdout
    assert is_harmless(stdout)
    assert len(stdout) < 50_000


@EVERY
def test_colored_report_contains_only_our_escape_sequences(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    plain = Counter(_sequences(run(cli, tmp_path, "plain").stdout))
    stdout = Counter(_sequences(run(cli, tmp_path, text).stdout))
    assert set(stdout) <= set(plain)


def _sequences(text: str) -> list[str]:
    left = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert is_harmless(left)
    return re.findall(r"\x1b\[[0-9;]*m", text)


@EVERY
def test_json_contains_untrusted_text_escaped(cli: Cli, tmp_path: Path, text: str) -> None:
    stdout = run(cli, tmp_path, text, "--json").stdout
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]", stdout)
    (device,) = json.loads(stdout)["devices"]
    assert text in {frame["name"] for holder in device["holders"] for frame in holder["stack"]}
    assert text in {group["name"] for facet in device["facets"] for group in facet["groups"]}


class Page(HTMLParser):
    """Counts elements and attributes, and collects texts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.shape: set[tuple[str, str]] = set()
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.shape |= {(tag, name) for name, _ in attributes} | {(tag, "")}


@EVERY
def test_page_has_no_element_from_untrusted_text(cli: Cli, tmp_path: Path, text: str) -> None:
    target = tmp_path / "page.html"
    run(cli, tmp_path, "plain", "-q", "--json", "-o", target)
    plain_page = target.read_text()
    plain = Page(plain_page)
    run(cli, tmp_path, text, "-q", "--json", "-o", target, "--force")
    page = target.read_text()
    assert Page(page).shape <= plain.shape | {("details", ""), ("summary", ""), ("td", "title")}
    assert page.lower().count("<script") == plain_page.lower().count("<script")
    assert is_harmless(page)
    assert len(page) < 2_000_000


@EVERY
def test_exports_escape_untrusted_text(cli: Cli, tmp_path: Path, text: str) -> None:
    suffixes = ("csv", "perfetto.json", "collapsed", "speedscope.json")
    targets = {suffix: tmp_path / f"report.{suffix}" for suffix in suffixes}
    options = [part for path in targets.values() for part in ("-o", path)]
    run(cli, tmp_path, text, "-q", "--json", *options)
    json.loads(targets["perfetto.json"].read_text())
    json.loads(targets["speedscope.json"].read_text())
    with targets["csv"].open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) >= 2
    assert all(row["device"] == "0" for row in rows)
    assert not any(cell.startswith(("=", "+", "@")) for row in rows for cell in row.values())
    for line in targets["collapsed"].read_text().splitlines():
        stack, _, count = line.rpartition(" ")
        assert count.isdecimal()
        assert stack.startswith("cuda:0;")


def test_long_texts_are_shortened_on_the_terminal(cli: Cli, tmp_path: Path) -> None:
    assert len(run(cli, tmp_path, "A" * MIB, "--top", "0").stdout) < 50_000
