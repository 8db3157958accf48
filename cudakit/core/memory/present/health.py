"""How far the file can be trusted, in notes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from cudakit.core.memory.present.rows import device_name
from cudakit.core.memory.result import DeviceMemory
from cudakit.document import Note


def notes(device: DeviceMemory) -> Iterator[Note]:
    """Say whether trace and final state agree, and what to record differently."""
    health = device.health
    if device.exact:
        yield Note("ok", _exact_sentence(device))
    else:
        yield Note(
            "warn",
            _inexact_sentence(device),
            remedies=("figures before the end may be off; the end itself is exact",),
        )
    for warning in health.warnings:
        yield Note("warn", warning)
    for advice in health.advice:
        yield Note("info", advice)


def _exact_sentence(device: DeviceMemory) -> str:
    """Say that the file can be trusted, and how far back it reaches."""
    if not device.events:
        return f"{device_name(device)}: the state at the end, without a trace"
    reach = (
        "from an empty allocator on"
        if device.health.begins_complete
        else "of a program that held memory before the first one"
    )
    return (
        f"{device_name(device)}: {device.events:,} events {reach}; "
        "the trace agrees with the state at its end"
    )


def _inexact_sentence(device: DeviceMemory) -> str:
    """Say how trace and final state disagree."""
    counts = device.health.contradictions
    words = ", ".join(
        f"{getattr(counts, field.name):,} {field.name.replace('_', ' ')}"
        for field in fields(counts)
        if getattr(counts, field.name)
    )
    return (
        f"{device_name(device)}: the trace of {device.events:,} events and the state at its end "
        f"disagree {device.inconsistencies:,} times ({words or 'entries passed over'})"
    )
