"""The evidence for the answer of a report, and the recommended settings. Only HTML pages show them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from cudakit.memory.analyze.call_sites import site_name
from cudakit.memory.present.rows import NO_STACK, moment_name
from cudakit.memory.result import DeviceMemory, DiffRow, Leak, Oom
from cudakit.memory.verdict import replays_sentence
from cudakit.units import format_bytes, format_count, format_ratio

_MAX_EVIDENCE_LINES = 3


def evidence(device: DeviceMemory) -> tuple[str, ...]:
    """Return the figures that support the cause: sizes, replays, growth, or the largest call sites."""
    if device.ooms:
        return tuple(_failure_evidence(device.ooms[-1]))
    if device.leaks:
        return tuple(
            _growth_evidence(leak, device.steps.count)
            for leak in device.leaks[:_MAX_EVIDENCE_LINES]
        )
    if device.steps.rising:
        return tuple(map(_rise_evidence, device.steps.site_growth[:_MAX_EVIDENCE_LINES]))
    # The sentence of the cause names the largest call site already.
    lines = device.lines[1:_MAX_EVIDENCE_LINES]
    return tuple(
        f"next {moment_name(device)}: {NO_STACK if line.frame is None else site_name(line.frame)},"
        f" {format_bytes(line.bytes)} ({format_ratio(line.share)})"
        for line in lines
    )


def recommended_settings(device: DeviceMemory) -> str:
    """Return the recommended settings as the assignment of a shell variable; "" if none is recommended."""
    variable = device.snapshot.calls.settings_variable
    for oom in device.ooms[-1:]:
        for remedy_replay in oom.replays:
            if remedy_replay.recommended and remedy_replay.settings is not None:
                return f"{variable}={shlex.quote(remedy_replay.settings)}"
    return ""


def _failure_evidence(oom: Oom) -> Iterator[str]:
    yield (
        f"requested {format_bytes(oom.size_bytes)}; free on the device"
        f" {format_bytes(oom.device_free_bytes)}; free in segments {format_bytes(oom.free_bytes)}; largest"
        f" free block {format_bytes(oom.largest_hole_bytes)}"
    )
    yield from (f"another cause: {cause.sentence}" for cause in oom.causes[1:])
    helpful_changes = [remedy_replay.change for remedy_replay in oom.replays if remedy_replay.helps]
    if sentence := replays_sentence(oom):
        yield sentence.removesuffix(".")
    elif helpful_changes:
        yield (
            f"of {format_count(len(oom.replays))} changes that were replayed, {len(helpful_changes)} let the"
            f" request succeed: {', '.join(helpful_changes)}"
        )


def _growth_evidence(leak: Leak, step_count: int) -> str:
    site_text = site_name(leak.stack[leak.site]) if leak.stack else NO_STACK
    return (
        f"{site_text}: from {format_bytes(leak.growth[0])} to {format_bytes(leak.growth[-1])} over"
        f" {format_count(step_count)} moments between steps, {format_bytes(leak.bytes_per_step)} per step"
    )


def _rise_evidence(row: DiffRow) -> str:
    site_text = site_name(row.stack[row.site]) if row.stack else NO_STACK
    return (
        f"{site_text}: {format_bytes(row.before_bytes)} at the peak of the first step,"
        f" {format_bytes(row.after_bytes)} at the peak of the last one"
    )
