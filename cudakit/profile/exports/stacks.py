"""Write the GPU time of call stacks: for speedscope, and as collapsed stacks for flame graph tools."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import BinaryIO

import numpy as np

from cudakit.profile.activities import Activities
from cudakit.profile.call_sites import NO_STACK, frame_text
from cudakit.profile.exports.texts import cache_texts, printable_text
from cudakit.profile.exports.tracks import distinct_rows
from cudakit.profile.timeline import Timeline, timeline
from cudakit.stacks import Frame

# Identifies the file format (speedscope, src/lib/file-format-spec.ts); no program downloads it.
_SPEEDSCOPE_FORMAT = "https://www.speedscope.app/file-format-schema.json"


def write_collapsed(activities: Sequence[Activities], file: BinaryIO) -> None:
    """Write collapsed stacks (Brendan Gregg's FlameGraph): ``outer;inner;kernel nanoseconds`` in each line.

    In a frame ``;`` becomes ``:``. If there are several processes, the first frame of a stack is the process.
    """
    for process_activities in activities:
        prefix = f"process {process_activities.process};" if len(activities) > 1 else ""
        for line in _collapsed_lines(timeline(process_activities)):
            file.write(f"{prefix}{line}\n".encode())


def _collapsed_lines(process_timeline: Timeline) -> Iterator[str]:
    stack_text = cache_texts(lambda site: _join_frames(process_timeline.stacks[site]))
    name_text = cache_texts(lambda name_index: _collapsed_label(process_timeline.names[name_index]))
    for site, name_index, duration_ns in stack_times(process_timeline):
        yield f"{stack_text(site)};{name_text(name_index)} {duration_ns}"


def _join_frames(stack: Sequence[Frame]) -> str:
    return ";".join(_collapsed_label(frame_text(frame)) for frame in reversed(stack)) or NO_STACK


def _collapsed_label(text: str) -> str:
    return printable_text(text).replace(";", ":")


def stack_times(process_timeline: Timeline) -> Iterator[tuple[int, int, int]]:
    """Yield each distinct (site, name) of GPU work and its GPU time in ns, first occurrence first."""
    work = process_timeline.work
    if not len(work.start_ns):
        return
    first_indices, row_numbers = distinct_rows(work.site, work.name)
    durations = work.end_ns - work.start_ns
    # Sums of integers as floating-point numbers are exact below 2**53 ns, which is 104 days.
    totals = np.bincount(row_numbers, durations, len(first_indices)).astype(np.int64)
    key_order = np.argsort(first_indices)
    yield from zip(
        work.site[first_indices][key_order].tolist(),
        work.name[first_indices][key_order].tolist(),
        totals[key_order].tolist(),
        strict=True,
    )


def write_speedscope(activities: Sequence[Activities], file: BinaryIO) -> None:
    """Write a speedscope file: for each process, call stacks with their kernels, weighted by GPU time."""
    number_by_frame: dict[Frame, int] = {}
    profiles = [
        _profile(timeline(process_activities), number_by_frame) for process_activities in activities
    ]
    content = {
        "$schema": _SPEEDSCOPE_FORMAT,
        "shared": {"frames": [_speedscope_frame(frame) for frame in number_by_frame]},
        "profiles": profiles,
        "name": "GPU time by call stack",
        "activeProfileIndex": 0,
        "exporter": "cudakit",
    }
    encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
    for text in encoder.iterencode(content):
        file.write(text.encode())
    file.write(b"\n")


def _speedscope_frame(frame: Frame) -> dict[str, object]:
    frame_object: dict[str, object] = {"name": printable_text(frame.name) or "?"}
    if frame.filename:
        frame_object["file"] = printable_text(frame.filename)
    if frame.line:
        frame_object["line"] = frame.line
    return frame_object


def _profile(process_timeline: Timeline, number_by_frame: dict[Frame, int]) -> dict[str, object]:
    samples: list[list[int]] = []
    weights: list[int] = []
    for site, name_index, duration_ns in stack_times(process_timeline):
        stack = process_timeline.stacks[site] or (Frame(NO_STACK, "", 0),)
        path = (*reversed(stack), Frame(process_timeline.names[name_index], "", 0))
        samples.append([number_by_frame.setdefault(frame, len(number_by_frame)) for frame in path])
        weights.append(duration_ns)
    simulated_text = " (simulated)" if process_timeline.simulated else ""
    return {
        "type": "sampled",
        "name": f"process {process_timeline.process}{simulated_text}",
        "unit": "nanoseconds",
        "startValue": 0,
        "endValue": sum(weights),
        "samples": samples,
        "weights": weights,
    }
