"""The Trees of a Document as a file for speedscope, an interactive flame graph."""

from __future__ import annotations

import json
import math

from cudakit.document import Bytes, Change, Document, Seconds, Tree
from cudakit.render.collapsed import stacks, trees
from cudakit.render.columns import valid_utf8

# Names the file format (speedscope, src/lib/file-format-spec.ts); nothing is fetched from it.
_FORMAT = "https://www.speedscope.app/file-format-schema.json"


def render(document: Document) -> str:
    """Write every Tree as a profile of weighted stacks, named after its root's label.

    The weight of a node is its amount beyond the sum of its children: bytes, seconds, or a count
    without a unit. Frames are shared between profiles by label.

    Raises UsageError if the document has no Tree, TypeError if its values do not add up (a Ratio).
    """
    frames: dict[str, int] = {}
    profiles = [_profile(tree, frames) for tree in trees(document)]
    content = {
        "$schema": _FORMAT,
        "shared": {"frames": [{"name": name} for name in frames]},
        "profiles": profiles,
        "name": document.title,
        "activeProfileIndex": 0,
        "exporter": "cudakit",
    }
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return valid_utf8(text) + "\n"


def _profile(tree: Tree, frames: dict[str, int]) -> dict[str, object]:
    """Make a sampled profile, entering its labels into ``frames``, label to index."""
    samples: list[list[int]] = []
    weights: list[float] = []
    seconds = isinstance(tree.value, Seconds)
    for path, amount in stacks(tree, lambda label: frames.setdefault(label, len(frames))):
        samples.append(path.copy())
        weights.append(amount / 1e9 if seconds else amount)
    return {
        "type": "sampled",
        "name": tree.label,
        "unit": _unit(tree),
        "startValue": 0,
        "endValue": math.fsum(weights) if seconds else sum(weights),
        "samples": samples,
        "weights": weights,
    }


def _unit(tree: Tree) -> str:
    match tree.value:
        case Bytes() | Change():
            return "bytes"
        case Seconds():
            return "seconds"
    return "none"
