"""Render the Trees of a Document for speedscope, an interactive flame graph."""

from __future__ import annotations

import json

from cudakit.report.collapsed import stacks, trees
from cudakit.report.document import Document, Tree
from cudakit.report.escape import escape_invisible

# Identifies the file format (speedscope, src/lib/file-format-spec.ts); no program downloads it.
_FORMAT_URL = "https://www.speedscope.app/file-format-schema.json"


def render(document: Document) -> str:
    """Return every Tree as a profile of weighted stacks, named after the label of its root.

    The weight of a node is its size minus the sum of its children. Profiles share frames with the same label.
    Raises UsageError if the document has no Tree.
    """
    index_by_label: dict[str, int] = {}
    profiles = [_profile(tree, index_by_label) for tree in trees(document)]
    content = {
        "$schema": _FORMAT_URL,
        "shared": {"frames": [{"name": escape_invisible(name)} for name in index_by_label]},
        "profiles": profiles,
        "name": escape_invisible(document.title),
        "activeProfileIndex": 0,
        "exporter": "cudakit",
    }
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n"


def _profile(tree: Tree, index_by_label: dict[str, int]) -> dict[str, object]:
    """Return a sampled profile; add its labels to ``index_by_label``, which maps labels to indices."""
    samples: list[list[int]] = []
    weights: list[int] = []
    for path, size_bytes in stacks(
        tree, lambda label: index_by_label.setdefault(label, len(index_by_label))
    ):
        samples.append(path.copy())
        weights.append(size_bytes)
    return {
        "type": "sampled",
        "name": escape_invisible(tree.label),
        "unit": "bytes",
        "startValue": 0,
        "endValue": sum(weights),
        "samples": samples,
        "weights": weights,
    }
