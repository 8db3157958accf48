"""The diagram of a race: streams as lanes, calls in their order, and the order between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cudakit.document import Columns
from cudakit.document.picture import Drawing, Figure, Key, Legend, Shape, percent, shape

# Pixels, but for the width: the drawing is as wide as the page allows.
_BOX = 42
_LANE = 104
_LINES = (17, 33)  # of text in a box
_INSET = 10
_LANE_LETTERS = 26

_WIDEST = 1.8  # steps of the time axis that a box may be wide
_GAP = 0.16  # to the next box of the lane
_ORDER, _MISSING = "order", "missing"
_LEGEND = ((_ORDER, "order there is"), (_MISSING, "order that is missing"))


@dataclass(frozen=True, slots=True)
class _Call:
    """A call as it is drawn; ``left`` and ``width`` are shares of the drawing's width."""

    lane: int
    left: float
    width: float
    label: str
    remark: str
    operation: bool
    after: int

    @property
    def top(self) -> int:
        return self.lane * _LANE

    @property
    def middle(self) -> str:
        return percent(self.left + self.width / 2)


def race_diagram(columns: Sequence[Columns]) -> Figure:
    """Draw the calls that led to a race, from left to right in their order.

    The Columns have an item a call: ``lane``, ``label`` and ``place`` (decoded by ``text``), ``seq``,
    ``operation`` (whether it is one of the two that race), ``after`` (the row of the call that its lane
    waits for with it or, of an operation, should wait for; -1 for none).
    """
    (calls_,) = columns
    calls = tuple(_calls(calls_))
    lanes = calls_.text["lane"]
    shapes = (
        *(_drawn_lane(name, i * _LANE) for i, name in enumerate(lanes)),
        *(_arrow(calls[call.after], call) for call in calls if call.after >= 0),
        *map(_box, calls),
    )
    title = "The two operations and the order between them"
    drawing = Drawing(title, shapes, height=(len(lanes) - 1) * _LANE + _BOX)
    return Figure("race", (_legend(calls), drawing))


def _calls(columns: Columns) -> Iterator[_Call]:
    rows = zip(
        *(columns.arrays[name].tolist() for name in ("lane", "seq", "operation", "after")),
        *(
            [columns.text[name][i] for i in columns.arrays[name].tolist()]
            for name in ("label", "place")
        ),
        strict=True,
    )
    lanes: list[int] = columns.arrays["lane"].tolist()
    step = 1 / (len(lanes) - 1 + _WIDEST)
    for i, (lane, seq, operation, after, label, place) in enumerate(rows):
        remark = " · ".join(filter(None, (place, f"call {seq:,}" if seq else "")))
        width = _room(lanes, i) - _GAP
        yield _Call(lane, i * step, width * step, label, remark, operation, after)


def _room(lanes: Sequence[int], i: int) -> float:
    """Count the steps to the next call of the same lane."""
    ahead = (j - i for j in range(i + 1, len(lanes)) if lanes[j] == lanes[i])
    return min(next(ahead, _WIDEST), _WIDEST)


def _drawn_lane(name: str, top: int) -> Shape:
    middle = top + _BOX / 2
    label = shape(
        "text",
        name,
        title=name,
        longest=_LANE_LETTERS,
        class_="tick end",
        x=-12,
        y=middle,
        dy="0.32em",
    )
    return shape("g", label, shape("line", class_="grid", x1=0, x2="100%", y1=middle, y2=middle))


def _box(call: _Call) -> Shape:
    texts = (
        shape("text", text, class_=kind, x=_INSET, y=y)
        for text, kind, y in zip((call.label, call.remark), ("name", "tick"), _LINES, strict=True)
    )
    return shape(
        "svg",
        shape("rect", class_="box", width="100%", height="100%", rx=5),
        *texts,
        title=" · ".join(filter(None, (call.label, call.remark))),
        class_="operation" if call.operation else "call",
        x=percent(call.left),
        y=call.top,
        width=percent(call.width),
        height=_BOX,
    )


def _arrow(start: _Call, end: _Call) -> Shape:
    """Draw the order of two calls through the space between their lanes."""
    down = end.lane >= start.lane
    return shape(
        "line",
        class_=_MISSING if end.operation else _ORDER,
        x1=start.middle,
        y1=start.top + _BOX if down else start.top,
        x2=end.middle,
        y2=end.top if down else end.top + _BOX,
    )


def _legend(calls: Sequence[_Call]) -> Legend:
    drawn = {_MISSING if call.operation else _ORDER for call in calls if call.after >= 0}
    keys = (
        Key(shape("line", class_=kind, x1=0, x2=36, y1=6, y2=6), words)
        for kind, words in _LEGEND
        if kind in drawn
    )
    return Legend(tuple(keys), width=42)
