"""The pictures that a page can draw from Columns, by the kind of View."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from cudakit.document import Columns
from cudakit.render.markup import Markup
from cudakit.render.svg.bench import bench
from cudakit.render.svg.layout import memory_layout
from cudakit.render.svg.race import race

# A kind that is not here shows the fallback of its View.
VIEWS: Final[Mapping[str, Callable[[Sequence[Columns]], Markup]]] = {
    "memory-layout": memory_layout,
    "race": race,
    "bench": bench,
}
