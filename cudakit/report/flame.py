"""Write weighted call stacks: for speedscope, and as collapsed stacks for flame graph tools."""

from __future__ import annotations

import json
from collections.abc import Iterator

from cudakit.report.timeline import Flames, printable_text
from cudakit.stacks import Frame, frame_text

# Identifies the file format (speedscope, src/lib/file-format-spec.ts); no program downloads it.
_SPEEDSCOPE_FORMAT = "https://www.speedscope.app/file-format-schema.json"


def speedscope(graph: Flames) -> Iterator[str]:
    """Yield a file for speedscope (www.speedscope.app) with a profile for each Flame."""
    number_by_frame: dict[Frame, int] = {}
    profiles = []
    for flame in graph.flames:
        samples: list[list[int]] = []
        weights: list[int] = []
        for stack, weight in flame.stacks:
            samples.append(
                [number_by_frame.setdefault(frame, len(number_by_frame)) for frame in stack]
            )
            weights.append(weight)
        profiles.append(
            {
                "type": "sampled",
                "name": printable_text(flame.name),
                "unit": flame.unit,
                "startValue": 0,
                "endValue": sum(weights),
                "samples": samples,
                "weights": weights,
            }
        )
    content = {
        "$schema": _SPEEDSCOPE_FORMAT,
        "shared": {"frames": [_frame_object(frame) for frame in number_by_frame]},
        "profiles": profiles,
        "name": printable_text(graph.title),
        "activeProfileIndex": 0,
        "exporter": "cudakit",
    }
    yield json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n"


def _frame_object(frame: Frame) -> dict[str, object]:
    frame_object: dict[str, object] = {"name": printable_text(frame.name) or "?"}
    if frame.filename:
        frame_object["file"] = printable_text(frame.filename)
    if frame.line:
        frame_object["line"] = frame.line
    return frame_object


def collapsed(graph: Flames) -> Iterator[str]:
    """Yield collapsed stacks (Brendan Gregg's FlameGraph): ``outer;inner;leaf amount`` in each line.

    In a frame ``;`` becomes ``:``.
    """
    label_by_frame: dict[Frame, str] = {}
    for flame in graph.flames:
        prefix = f"{flame.prefix};" if flame.prefix and len(graph.flames) > 1 else ""
        lines = []
        for stack, weight in flame.stacks:
            for frame in stack:
                if frame not in label_by_frame:
                    label = printable_text(frame_text(frame)).replace(";", ":").strip()
                    label_by_frame[frame] = label or "?"
            lines.append(f"{prefix}{';'.join(map(label_by_frame.__getitem__, stack))} {weight}\n")
        yield "".join(lines)
