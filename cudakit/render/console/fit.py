"""How wide each column of a table may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

GAP = 2

Kind = Literal["number", "text", "stack", "bar"]
# What gives way first: a header that wraps loses nothing, callers are an extra, a bar's figure stays,
# a stack still names its site when cut.
_YIELDING: tuple[tuple[Kind, Literal["enough", "least"]], ...] = (
    ("number", "least"),
    ("stack", "enough"),
    ("bar", "least"),
    ("stack", "least"),
    ("text", "least"),
)
# What goes first where even the least widths do not fit; of one kind, the rightmost.
_DROPPED: tuple[Kind, ...] = ("bar", "number", "text", "stack")


@dataclass(frozen=True, slots=True)
class Need:
    """The widths in cells that a column would like, can do without loss, and can do with at all."""

    kind: Kind
    natural: int
    enough: int
    least: int


def fitted(needs: Sequence[Need], width: int) -> dict[int, int]:
    """Give each column its width, so that all with their gaps fit; a column left out has none."""
    shown = _shown(needs, width)
    room = width - GAP * (len(shown) - 1)
    widths = {index: min(needs[index].natural, room) for index in shown}
    for kind, floor in _YIELDING:
        members = [index for index in shown if needs[index].kind == kind]
        _shrink(widths, {index: getattr(needs[index], floor) for index in members}, room)
    return widths


def _shown(needs: Sequence[Need], width: int) -> list[int]:
    shown = list(range(len(needs)))
    order = sorted(shown, key=lambda index: (_DROPPED.index(needs[index].kind), -index))
    for index in order[:-1]:
        if sum(needs[i].least + GAP for i in shown) - GAP <= width:
            break
        shown.remove(index)
    return shown


def _shrink(widths: dict[int, int], least: dict[int, int], room: int) -> None:
    """Take cells from the widest of the columns in ``least`` until all fit or none can give."""
    while sum(widths.values()) > room:
        giving = [index for index, floor in least.items() if widths[index] > floor]
        if not giving:
            return
        widths[max(giving, key=widths.__getitem__)] -= 1
