"""The View ``bench``: curves along an axis, the roofline, and how samples are spread."""

from __future__ import annotations

from collections.abc import Sequence

from cudakit.document import Columns
from cudakit.render.markup import Markup
from cudakit.render.svg.roofline import roofline
from cudakit.render.svg.spread import spread
from cudakit.render.svg.sweep import sweep


def bench(columns: Sequence[Columns]) -> Markup:
    """Draw what the name of the Columns says: ``sweep AXIS``, ``roofline`` or ``samples``."""
    (found,) = columns
    if found.name == "samples":
        return spread(found)
    return roofline(found) if found.name == "roofline" else sweep(found)
