"""The MemoryResult as a Document: what to read first comes first."""

from __future__ import annotations

from collections.abc import Iterator

from cudakit.core.memory.present import pictures, tables
from cudakit.core.memory.result import DeviceMemory, MemoryResult, Oom
from cudakit.document import Document, Node, Note, Section


def report(result: MemoryResult, *, top: int = 10) -> Document:
    """Lay out the report; tables show ``top`` rows, 0 shows all."""
    several = len(result.devices) > 1
    nodes: list[Node] = []
    if several:
        nodes.append(tables.overview(result.devices))
    for device in result.devices:
        sections = tuple(_sections(device, top))
        nodes += [Section(_device_title(device), sections)] if several else sections
    return Document(_title(result), tuple(nodes))


def _title(result: MemoryResult) -> str:
    names = [file.name for file in result.files]
    return f"GPU memory of {names[0]}" if len(names) == 1 else f"GPU memory of {len(names)} files"


def _device_title(device: DeviceMemory) -> str:
    return f"{device.file}: {tables.device_name(device)}"


def _sections(device: DeviceMemory, top: int) -> Iterator[Node]:
    yield from _health(device)
    if device.ooms:
        yield Section("Out of memory", tuple(_ooms(device, top)))
    yield Section(
        "Memory", tuple(node for node in (tables.moments(device), pictures.curves(device)) if node)
    )
    when = tables.moment_name(device)
    yield Section(f"Who holds it {when}", (tables.lines(device, top), tables.holders(device, top)))
    for facet in device.facets:
        yield Section(f"By {facet.name.replace('_', ' ')} {when}", (tables.facet(facet, top),))
    yield Section(
        f"Segments {when}", (tables.segments(device, top), *pictures.layout_columns(device))
    )
    yield Section("Layout at the end", (pictures.layout(device),))
    yield Section(f"Fragmentation {when}", tuple(tables.fragmentation(device, top)))
    yield Section("Leak suspects", tuple(tables.leaks(device, top)))
    if device.churn:
        yield Section("Churn over the whole trace", (tables.churn(device, top),))


def _health(device: DeviceMemory) -> Iterator[Node]:
    health = device.health
    if device.exact:
        yield Note("ok", tables.exact_sentence(device))
    else:
        yield Note(
            "warn",
            tables.inexact_sentence(device),
            remedies=("figures before the end may be off; the end itself is exact",),
        )
    for warning in health.warnings:
        yield Note("warn", warning)
    for advice in health.advice:
        yield Note("info", advice)


def _ooms(device: DeviceMemory, top: int) -> Iterator[Node]:
    shown = device.ooms if top == 0 else device.ooms[-top:]
    if len(shown) < len(device.ooms):
        yield Note("info", f"the last {len(shown)} of {len(device.ooms)} failed allocations:")
    for oom in shown:
        yield from _oom(oom)


def _oom(oom: Oom) -> Iterator[Node]:
    yield Note("error", oom.sentence, remedies=oom.remedies)
    yield tables.oom_facts(oom)
