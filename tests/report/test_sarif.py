"""SARIF: required properties, and escaping of file and function names."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

import pytest
from document_views import no_picture
from hypothesis import given
from hypothesis import strategies as st

from cudakit.report.document import Document, Facts, Finding, Node, Note, Section, Stack, Text, View
from cudakit.report.sarif import render
from cudakit.stacks import Frame

LATER = Stack(
    (Frame("forward", "/v/site-packages/torch/nn.py", 9), Frame("step", "/p/train.py", 44)), 1
)
EARLIER = Stack((Frame("prefetch", "/p/data/loader.py", 31),))


def note(
    text: str = "read too early",
    *,
    rule: str = "read-after-write",
    stacks: tuple[tuple[str, Stack], ...] = (("later: kernel", LATER), ("earlier: copy", EARLIER)),
    count: int = 3,
) -> Note:
    return Note("error", text, ("wait",), Finding(rule, "Memory is read too early.", stacks, count))


def log(*nodes: Node, root: str = "") -> dict[str, Any]:
    content: dict[str, Any] = json.loads(render(Document("1 race", nodes), root=root))
    return content


def run(*nodes: Node, root: str = "") -> dict[str, Any]:
    (only,) = log(*nodes, root=root)["runs"]
    assert isinstance(only, dict)
    return only


def result(*nodes: Node, root: str = "") -> dict[str, Any]:
    (only,) = run(*nodes, root=root)["results"]
    assert isinstance(only, dict)
    return only


def objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, dict | list):
            yield from objects(inner)


def uris(value: Any) -> list[str]:
    return [
        part["artifactLocation"]["uri"] for part in objects(value) if "artifactLocation" in part
    ]


def test_log_equals_the_golden_file(golden: Callable[[str, str], None]) -> None:
    document = Document("1 race", (Section("1.", (note(),)), Note("warn", "a gap")))

    golden("run-race.sarif", render(document, root="/p"))


def test_log_has_the_properties_that_the_standard_requires() -> None:
    content = log(note(), note(rule="reuse"), Note("warn", "a gap"))

    assert content["version"] == "2.1.0"
    (only,) = content["runs"]
    driver = only["tool"]["driver"]
    assert driver["name"] == "cudakit"
    assert len({rule["id"] for rule in driver["rules"]}) == len(driver["rules"]) == 2
    assert isinstance(only["invocations"][0]["executionSuccessful"], bool)
    for sarif_result in only["results"]:
        assert sarif_result["message"]["text"]
        assert driver["rules"][sarif_result["ruleIndex"]]["id"] == sarif_result["ruleId"]
        assert sarif_result["level"] in {"none", "note", "warning", "error"}
        for flow in sarif_result["codeFlows"]:
            assert all(thread["locations"] for thread in flow["threadFlows"])
    for part in objects(content):
        assert part.get("startLine", 1) >= 1
        assert part.get("id", 1) != -1


@pytest.mark.parametrize(
    ("level", "said"), [("error", "error"), ("warn", "warning"), ("info", "note"), ("ok", "note")]
)
def test_levels_are_those_of_the_standard(level: Any, said: str) -> None:
    finding = note().finding

    assert result(Note(level, "x", finding=finding))["level"] == said


def test_result_location_is_the_call_site_of_the_first_place() -> None:
    (location,) = result(note())["locations"]

    assert location["physicalLocation"] == {
        "artifactLocation": {"uri": "file:///p/train.py"},
        "region": {"startLine": 44},
    }
    assert location["logicalLocations"][0]["fullyQualifiedName"] == "step"


def test_both_stacks_are_threads_of_one_flow_outermost_first() -> None:
    (flow,) = result(note())["codeFlows"]
    lines = [
        [
            step["location"]["physicalLocation"]["region"]["startLine"]
            for step in thread["locations"]
        ]
        for thread in flow["threadFlows"]
    ]

    assert [thread["message"]["text"] for thread in flow["threadFlows"]] == [
        "later: kernel",
        "earlier: copy",
    ]
    assert lines == [[44, 9], [31]]


def test_all_places_are_related_locations_with_their_labels() -> None:
    related = result(note())["relatedLocations"]

    assert [(place["id"], place["message"]["text"]) for place in related] == [
        (1, "later: kernel"),
        (2, "earlier: copy"),
    ]
    assert uris(related) == ["file:///p/train.py", "file:///p/data/loader.py"]


def test_message_has_the_remedies_and_occurrence_count_is_a_field() -> None:
    sarif_result = result(note())

    assert sarif_result["message"]["text"] == "read too early\nwait"
    assert sarif_result["occurrenceCount"] == 3


def test_files_below_the_root_are_named_relative_to_it() -> None:
    sarif_run = run(note(), root="/p")

    assert sarif_run["originalUriBaseIds"] == {"SRCROOT": {"uri": "file:///p/"}}
    (location,) = sarif_run["results"][0]["locations"]
    assert location["physicalLocation"]["artifactLocation"] == {
        "uri": "train.py",
        "uriBaseId": "SRCROOT",
    }
    assert "file:///v/site-packages/torch/nn.py" in uris(sarif_run)
    assert uris(run(note(), root="/pa")) == uris(run(note()))


@pytest.mark.parametrize("filename", ["", "<stdin>", "<frozen importlib>"])
def test_generated_code_has_a_name_and_no_file(filename: str) -> None:
    sarif_result = result(note(stacks=(("here", Stack((Frame("f", filename, 3),))),)))

    (location,) = sarif_result["locations"]
    assert location == {"logicalLocations": [{"fullyQualifiedName": "f", "kind": "function"}]}


def test_sarif_omits_a_place_without_a_stack() -> None:
    sarif_result = result(note(stacks=(("here", Stack(())), ("there", EARLIER))))
    assert uris(sarif_result["locations"]) == ["file:///p/data/loader.py"]
    assert len(sarif_result["relatedLocations"]) == 1

    nowhere = result(note(stacks=(("here", Stack(())),)))
    assert not {"locations", "relatedLocations", "codeFlows"} & nowhere.keys()


def test_unknown_line_has_no_region() -> None:
    (location,) = result(note(stacks=(("here", Stack((Frame("f", "/a.py", 0),))),)))["locations"]

    assert "region" not in location["physicalLocation"]


def test_notes_without_finding_are_notifications() -> None:
    nodes = (
        Facts((("a", Text("b")),)),
        View("picture", (), no_picture, fallback=Note("info", "in a view")),
        Section("s", (Note("warn", "a gap", ("do",)),)),
    )
    (invocation,) = run(*nodes)["invocations"]

    assert invocation["toolExecutionNotifications"] == [
        {"level": "note", "message": {"text": "in a view"}},
        {"level": "warning", "message": {"text": "a gap\ndo"}},
    ]
    assert run(*nodes)["results"] == []


@pytest.mark.parametrize(
    ("filename", "uri"),
    [
        ("/a b/#1?.py", "file:///a%20b/%231%3F.py"),
        ("/über/%41.py", "file:///%C3%BCber/%2541.py"),
        ("/x\udcff.py", "file:///x%FF.py"),
        ("/x\ud800.py", "file:///x%3F.py"),
        ("http:evil.py", "http%3Aevil.py"),
        ("//host/share.py", "file:////host/share.py"),
        ("C:\\x.py", "C%3A%5Cx.py"),
    ],
)
def test_path_is_escaped_as_a_uri(filename: str, uri: str) -> None:
    (location,) = result(note(stacks=(("x", Stack((Frame("f", filename, 1),))),)))["locations"]

    assert location["physicalLocation"]["artifactLocation"]["uri"] == uri


def test_text_in_brackets_is_no_link() -> None:
    link, escaped = r"[x](https://y) \[z](1)", r"\[x\](https://y) \\\[z\](1)"
    found = result(note(link, stacks=((link, LATER),)))

    assert found["message"]["text"] == f"{escaped}\nwait"
    assert found["relatedLocations"][0]["message"]["text"] == escaped
    assert found["codeFlows"][0]["threadFlows"][0]["message"]["text"] == escaped


@given(st.text(), st.text(min_size=1).filter(lambda name: not name.startswith("<")))
def test_any_text_gives_a_valid_file(text: str, filename: str) -> None:
    stack = Stack((Frame(text, f"/{filename}", 3),))
    written = render(Document(text, (note(text, stacks=((text, stack),)), Note("info", text))))

    assert written.isascii()
    (location,) = json.loads(written)["runs"][0]["results"][0]["locations"]
    uri = location["physicalLocation"]["artifactLocation"]["uri"]
    assert urlsplit(uri).scheme == "file"
    assert unquote_to_bytes(urlsplit(uri).path) == f"/{filename}".encode("utf-8", "surrogateescape")
