"""The View ``bench``: curves along an axis, the roofline, peers, and how samples are spread."""

from __future__ import annotations

from collections.abc import Sequence

from cudakit.document import Columns
from cudakit.render.markup import Markup
from cudakit.render.svg.beside import beside
from cudakit.render.svg.roofline import roofline
from cudakit.render.svg.spread import spread
from cudakit.render.svg.sweep import sweep


def bench(columns: Sequence[Columns]) -> Markup:
    """Draw what the name of the first Columns says: sweep AXIS, roofline, beside PEER, or samples.

    Samples need the Columns ``results`` too.
    """
    first, *others = columns
    match first.name.split(" ")[0]:
        case "samples":
            return spread(first, *others)
        case "roofline":
            return roofline(first)
        case "beside":
            return beside(first)
        case _:
            return sweep(first)
