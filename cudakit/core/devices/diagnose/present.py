"""Present the result of doctor as a Document: findings in full, checks that passed in one line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Literal

from cudakit.core.devices.diagnose.check import (
    DeviceLine,
    DoctorResult,
    Explanation,
    Judged,
    Status,
)
from cudakit.document import (
    Bytes,
    Column,
    Count,
    Document,
    Facts,
    Node,
    Note,
    Section,
    Table,
    Text,
    Value,
)
from cudakit.units import Unavailable

_LEVELS: dict[Status, Literal["ok", "info", "warn", "error"]] = {
    Status.OK: "ok",
    Status.UNKNOWN: "info",
    Status.WARN: "warn",
    Status.FAIL: "error",
}


def report(result: DoctorResult) -> Document:
    """Return all checks by theme, and a summary at the end."""
    themes = groupby(result.checks, key=lambda check: check.theme)
    sections = [
        Section(_heading(theme, checks), tuple(_blocks(checks)))
        for theme, checks in ((theme, tuple(members)) for theme, members in themes)
    ]
    return Document(_title(result), (*sections, _summary(result)))


def paste(result: DoctorResult) -> Document:
    """Return a report to paste: versions, devices, and every check with its evidence."""
    wrong = tuple(check for check in result.checks if check.status is not Status.OK)
    passed = tuple(check for check in result.checks if check.status is Status.OK)
    facts = Facts(tuple((label, Text(value)) for label, value in result.about.items()))
    nodes: tuple[Node, ...] = (Section("Versions", (facts,)),)
    if result.devices:
        nodes += (Section("GPUs", (_device_table(result.devices),)),)
    if wrong:
        nodes += (Section("Not well", tuple(_blocks(wrong))),)
    shown = (node for check in passed for node in _with_evidence(check, check.evidence))
    nodes += (Section("Well", tuple(shown)),)
    return Document(_title(result), (*nodes, _summary(result)))


def explanation(explained: Explanation) -> Document:
    """Return the explanation of a check."""
    paragraphs = explained.explanation.split("\n\n")
    notes = tuple(Note("info", " ".join(text.split())) for text in paragraphs)
    return Document(f"{explained.id}: {explained.title}", notes)


# --- words -----------------------------------------------------------------------------------------


def _title(result: DoctorResult) -> str:
    label = "Simulated: " if result.simulated else ""
    if result.failures:
        return f"{label}{_plural(result.failures, 'check')} failed"
    if result.warnings:
        return f"{label}no check failed, {_plural(result.warnings, 'warning')}"
    return f"{label}no check found anything wrong"


def _heading(theme: str, checks: Sequence[Judged]) -> str:
    counts = Counter(check.status for check in checks)
    failed, warned, unknown = counts[Status.FAIL], counts[Status.WARN], counts[Status.UNKNOWN]
    if not failed and not warned:
        if unknown == len(checks):
            return f"{theme}: not judged"
        return f"{theme}: ok{f', {unknown} not judged' if unknown else ''}"
    parts = [f"{failed} failed"] if failed else []
    parts += [_plural(warned, "warning")] if warned else []
    return f"{theme}: {', '.join(parts)}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _summary(result: DoctorResult) -> Note:
    counts = result.counts
    text = (
        f"{_plural(len(result.checks), 'check')}: {counts['fail']} failed, "
        f"{_plural(counts['warn'], 'warning')}, {counts['ok']} ok, {counts['unknown']} not judged"
    )
    worst = next((check for check in result.checks if check.status is result.status), None)
    if worst is None or result.status < Status.WARN:
        return Note("ok", text)
    more = (f"cudakit doctor --explain {worst.id} says more of a check",)
    return Note(_LEVELS[result.status], text, more)


# --- nodes -----------------------------------------------------------------------------------------


def _blocks(checks: Sequence[Judged]) -> Iterator[Node]:
    """Yield one line for a passed check, findings with their evidence, unknown ones grouped by reason."""
    for check in checks:
        if check.status is Status.OK:
            yield Note("ok", f"{check.id} {check.summary}")
        elif check.status is not Status.UNKNOWN:
            yield from _with_evidence(check, _new_evidence(check))
    reasons: dict[str, list[str]] = {}
    for check in checks:
        if check.status is Status.UNKNOWN:
            reasons.setdefault(check.summary, []).append(check.id)
    for reason, ids in reasons.items():
        yield Note("info", f"{', '.join(ids)} not judged: {reason}")


def _new_evidence(check: Judged) -> dict[str, str]:
    """Return the evidence that the summary does not contain."""
    return {
        label: value
        for label, value in check.evidence.items()
        if label not in check.summary or value not in check.summary
    }


def _with_evidence(check: Judged, evidence: Mapping[str, str]) -> Iterator[Node]:
    yield Note(_LEVELS[check.status], f"{check.id} {check.summary}", check.fix)
    if evidence:
        yield Facts(tuple((label, Text(value)) for label, value in evidence.items()))


def _device_table(devices: Sequence[DeviceLine]) -> Table:
    columns = (
        Column("GPU", "number"),
        Column("name"),
        Column("compute capability"),
        Column("memory", "number"),
        Column("PCI"),
        Column("UUID"),
    )
    return Table(columns, tuple(map(_device_row, devices)))


def _device_row(device: DeviceLine) -> tuple[Value, ...]:
    memory = device.memory_bytes
    return (
        Count(device.index),
        _text(device.name),
        _text(device.compute_capability),
        memory if isinstance(memory, Unavailable) else Bytes(memory),
        _text(device.pci_bus_id),
        _text(device.uuid),
    )


def _text(value: str | Unavailable) -> Text | Unavailable:
    return value if isinstance(value, Unavailable) else Text(value)
