"""Render the Findings of a Document as SARIF 2.1.0, which editors and code hosts show in the source.

Section numbers in comments are those of the OASIS standard, "Static Analysis Results Interchange Format
(SARIF) Version 2.1.0".
"""

from __future__ import annotations

import json
import re
from pathlib import PurePosixPath
from typing import Any, Final, TypeAlias
from urllib.parse import quote

from cudakit.report.document import Document, Finding, Note, Stack, site, walk
from cudakit.report.escape import escape_invisible
from cudakit.stacks import Frame

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_ROOT_ID = "SRCROOT"
_BRACKET_PATTERN: Final = re.compile(r"(\\*)([\[\]])")
_LEVELS: Final = {"error": "error", "warn": "warning", "info": "note", "ok": "note"}

_Object: TypeAlias = dict[str, Any]


def render(document: Document, *, root: str = "") -> str:
    """Return a log with a result for every Note that has a Finding, and a notification for every other Note.

    The location of a result is that of its first place. All places are related locations; their stacks,
    outermost frame first, are the threads of a code flow. Files in the absolute directory ``root`` are named
    relative to it. The text is ASCII: names are escaped as JSON, file names as URIs (RFC 3986).
    """
    notes = tuple(node for node in walk(document.nodes) if isinstance(node, Note))
    results = [(note, note.finding) for note in notes if note.finding is not None]
    rules = {finding.rule: finding for _, finding in results}
    rule_objects = [
        {"id": finding.rule, "shortDescription": _plain_text(finding.meaning)}
        for finding in rules.values()
    ]
    notifications = [
        {"level": _LEVELS[note.level], "message": _message_object(note)}
        for note in notes
        if note.finding is None
    ]
    run: _Object = {
        "tool": {"driver": {"name": "cudakit", "rules": rule_objects}},
        # executionSuccessful is true if the tool itself succeeded, whatever its results are (section
        # 3.20.14).
        "invocations": [{"executionSuccessful": True, "toolExecutionNotifications": notifications}],
    }
    if root:
        # The URI of a base directory ends with a slash (section 3.14.14).
        folder = f"file://{_quote_path(root.rstrip('/'))}/"
        run["originalUriBaseIds"] = {_ROOT_ID: {"uri": folder}}
    run["results"] = [
        _result_object(note, finding, list(rules).index(finding.rule), root)
        for note, finding in results
    ]
    log = {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(_escape_texts(log), indent=2) + "\n"


def _result_object(note: Note, finding: Finding, rule_index: int, root: str) -> _Object:
    labelled_stacks = [(label, stack) for label, stack in finding.places if stack.frames]
    result: _Object = {
        "ruleId": finding.rule,
        "ruleIndex": rule_index,
        "level": _LEVELS[note.level],
        "message": _message_object(note),
        "occurrenceCount": finding.count,
    }
    if labelled_stacks:
        result["locations"] = [_location_object(site(labelled_stacks[0][1]), root)]
        result["relatedLocations"] = [
            {
                "id": stack_number,
                **_location_object(site(stack), root),
                "message": _plain_text(label),
            }
            for stack_number, (label, stack) in enumerate(labelled_stacks, start=1)
        ]
        result["codeFlows"] = [
            {"threadFlows": [_thread_flow(label, stack, root) for label, stack in labelled_stacks]}
        ]
    return result


def _message_object(note: Note) -> _Object:
    return _plain_text("\n".join((note.text, *note.remedies)))


def _plain_text(text: str) -> _Object:
    """Return a plain text message without links: section 3.11.6 makes links of text in brackets."""
    return {"text": _BRACKET_PATTERN.sub(r"\1\1\\\2", text)}


def _thread_flow(label: str, stack: Stack, root: str) -> _Object:
    """Return a stack as a thread flow (SARIF, section 3.37)."""
    locations = [{"location": _location_object(frame, root)} for frame in reversed(stack.frames)]
    return {"message": _plain_text(label), "locations": locations}


def _location_object(frame: Frame, root: str) -> _Object:
    """Return the location of a frame; generated code has only a name."""
    location: _Object = {}
    if frame.name:
        location["logicalLocations"] = [{"fullyQualifiedName": frame.name, "kind": "function"}]
    if not frame.filename or frame.filename.startswith("<"):
        return location
    path = PurePosixPath(frame.filename)
    if root and path.is_relative_to(root):
        artifact = {"uri": _quote_path(str(path.relative_to(root))), "uriBaseId": _ROOT_ID}
    else:
        prefix = "file://" if path.is_absolute() else ""
        artifact = {"uri": f"{prefix}{_quote_path(frame.filename)}"}
    region = {"region": {"startLine": frame.line}} if frame.line > 0 else {}
    location["physicalLocation"] = {"artifactLocation": artifact, **region}
    return location


def _quote_path(path: str) -> str:
    try:
        path_bytes = path.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        path_bytes = path.encode("utf-8", "replace")
    # Colons are quoted: "name:rest" would parse as an absolute URI.
    return quote(path_bytes, safe="/")


def _escape_texts(value: Any) -> Any:
    """Escape invisible characters in all texts, except line ends."""
    match value:
        case str():
            return "\n".join(map(escape_invisible, value.split("\n")))
        case dict():
            return {key: _escape_texts(item) for key, item in value.items()}
        case list():
            return [_escape_texts(item) for item in value]
    return value
