"""Draw a race: streams as lanes, calls in order, and the synchronization between them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cudakit.report.document import Column, Columns, Count, Node, Table, Text, Value, View
from cudakit.report.picture import Drawing, Figure, Key, Legend, Shape, percent, shape
from cudakit.sanitize.hints import call_site
from cudakit.sanitize.races import FoundRace, LastSync, RaceKind, Side, SyncKind
from cudakit.trace.names import short_kernel

# Maximum number of characters of a kernel name in the diagram.
_MAX_LABEL_LENGTH = 32
_HOST = "the host"
_NO_ROW = -1


@dataclass(frozen=True, slots=True)
class Step:
    """A call of the diagram."""

    lane: str  # name of the stream, or the host
    seq: int  # number of the call; 0 if unknown
    label: str
    site: str  # call site
    is_racing_operation: bool = (
        False  # whether the call enqueued one of the two operations that race
    )
    # The earlier call that this call waits for, or should wait for if it enqueued the later operation.
    awaited_step: Step | None = None


def diagram(race: FoundRace, race_number: int) -> tuple[Node, ...]:
    """Return the calls as Columns, and the View that draws them."""
    names = _lane_names(race)
    steps = sorted(_steps(race, *names), key=lambda step: step.seq or math.inf)
    has_host_lane = any(step.lane == _HOST for step in steps) and _HOST not in names
    lanes = tuple(dict.fromkeys((_HOST, *names) if has_host_lane else names))
    name = f"race-{race_number}"
    return (
        _columns(name, steps, lanes),
        View("race", (name,), race_diagram, fallback=_table(steps, lanes)),
    )


def is_used_after_free(race: FoundRace) -> bool:
    """Return whether the later operation uses memory that the earlier one freed: no wait prevents this."""
    return race.kind is RaceKind.USE_AFTER_FREE and race.previous.operation == "free"


def _steps(race: FoundRace, earlier_lane: str, later_lane: str) -> Iterator[Step]:
    previous_step = _operation_step(race.previous, earlier_lane)
    if is_used_after_free(race):
        yield previous_step
        yield _operation_step(race.current, later_lane)
        return
    if race.last_sync:
        yield from _sync_steps(race.last_sync, earlier_lane, later_lane)
    yield previous_step
    yield _operation_step(race.current, later_lane, awaited_step=previous_step)


def _sync_steps(sync: LastSync, earlier_lane: str, later_lane: str) -> Iterator[Step]:
    """Yield the call that waited, after the call that recorded the event or enqueued the host function."""
    stream_name = earlier_lane.partition(" (")[0]
    record_label = ""  # a single call both records and waits
    match sync.kind:
        case SyncKind.EVENT:
            lane, record_label, wait_label = later_lane, "event record", "wait for the event"
        case SyncKind.HOST if sync.recorded_seq != sync.waited_seq:
            lane, record_label, wait_label = _HOST, "host function enqueued", "host function runs"
        case SyncKind.HOST:
            lane, wait_label = _HOST, f"wait for {stream_name}"
        case SyncKind.DEFAULT_STREAM:
            lane, wait_label = later_lane, f"implicit wait for {stream_name}"
    record_step = None
    if record_label:
        recorded_at = call_site(sync.recorded_stack)
        record_step = Step(earlier_lane, sync.recorded_seq, record_label, recorded_at)
        yield record_step
    waited_at = call_site(sync.waited_stack)
    yield Step(lane, sync.waited_seq, wait_label, waited_at, awaited_step=record_step)


def _operation_step(side: Side, lane: str, awaited_step: Step | None = None) -> Step:
    label = (
        short_kernel(side.kernel, max_length=_MAX_LABEL_LENGTH)
        if side.kernel and not side.collective
        else side.operation_name
    )
    return Step(lane, side.seq, label, call_site(side.stack), True, awaited_step)


def _lane_names(race: FoundRace) -> tuple[str, str]:
    """Return the names of both lanes. If the streams have the same name, use the graph nodes or contexts."""
    sides = (race.previous, race.current)
    earlier_lane, later_lane = (side.stream for side in sides)
    if earlier_lane != later_lane:
        return earlier_lane, later_lane
    if race.current.graph:
        earlier_lane, later_lane = (f"node {side.node} of graph {side.graph}" for side in sides)
    else:
        earlier_lane, later_lane = (f"{side.stream}, context {side.context}" for side in sides)
    return earlier_lane, later_lane


def _columns(name: str, steps: Sequence[Step], lanes: tuple[str, ...]) -> Columns:
    rows = range(len(steps))
    awaited_rows = [
        steps.index(step.awaited_step) if step.awaited_step else _NO_ROW for step in steps
    ]
    return Columns(
        name,
        {
            "lane": np.array([lanes.index(step.lane) for step in steps]),
            "seq": np.array([step.seq for step in steps], np.uint64),
            "label": np.array(rows),
            "place": np.array(rows),
            "operation": np.array([step.is_racing_operation for step in steps]),
            "after": np.array(awaited_rows),
        },
        text={
            "lane": tuple(map(_lane_title, lanes)),
            "label": tuple(step.label for step in steps),
            "place": tuple(step.site for step in steps),
        },
    )


def _table(steps: Sequence[Step], lanes: tuple[str, ...]) -> Table:
    operation_lanes = {step.lane for step in steps if step.is_racing_operation}
    # A narrow terminal hides the lane of the host before the lanes of the race.
    columns = (
        Column("call", "number"),
        *(Column(_lane_title(lane), is_optional=lane not in operation_lanes) for lane in lanes),
    )
    rows: list[tuple[Value, ...]] = []
    for row_steps in _steps_by_row(steps):
        seq = row_steps[0].seq
        texts = {
            step.lane: f"{step.label} ({step.site})" if step.site else step.label
            for step in reversed(row_steps)
        }
        cells = (Text(texts.get(lane, "")) for lane in lanes)
        rows.append((Count(seq) if seq else Text("?"), *cells))
    return Table(columns, tuple(rows), caption=_describe_missing_sync(steps))


def _lane_title(lane: str) -> str:
    """Return the name of a stream or of the host without its article."""
    return lane.removeprefix("the ")


def _describe_missing_sync(steps: Sequence[Step]) -> str:
    earlier_step, later_step = (step for step in steps if step.is_racing_operation)
    if later_step.awaited_step is None:
        return f"the {later_step.label} is enqueued after the free, and may run after it"
    if 0 < earlier_step.seq < later_step.seq:
        return f"no synchronization orders call {later_step.seq:,} after call {earlier_step.seq:,}"
    return f"no synchronization makes {later_step.lane} wait for {earlier_step.lane}"


def _steps_by_row(steps: Sequence[Step]) -> Iterator[list[Step]]:
    """Yield the steps of each row; a wait and its work share a row if one call performs both."""
    row_steps: list[Step] = []
    for step in steps:
        if row_steps and not (
            step.awaited_step is row_steps[-1]
            and step.seq == row_steps[-1].seq > 0
            and not step.is_racing_operation
            and step.lane != row_steps[-1].lane
        ):
            yield row_steps
            row_steps = []
        row_steps.append(step)
    yield row_steps


# Sizes in pixels. The width of the drawing is that of the page.
_BOX_HEIGHT = 42
_LANE_HEIGHT = 104
_BASELINES = (17, 33)  # baselines of the two lines of text in a box
_TEXT_INSET = 10
_MAX_LANE_NAME_LENGTH = 26

_MAX_BOX_STEPS = 1.8  # maximum width of a box, in steps of the time axis
_GAP_STEPS = 0.16  # distance to the next box of the lane, in steps of the time axis
_SYNC_CLASS, _MISSING_SYNC_CLASS = "order", "missing"  # classes of the arrows
_LEGEND = ((_SYNC_CLASS, "synchronization"), (_MISSING_SYNC_CLASS, "missing synchronization"))


@dataclass(frozen=True, slots=True)
class _Call:
    """A call in the drawing; ``left`` and ``width`` are fractions of the drawing's width."""

    lane: int
    left: float
    width: float
    label: str
    remark: str
    is_operation: bool
    awaited_row: int

    @property
    def top(self) -> int:
        return self.lane * _LANE_HEIGHT

    @property
    def arrow_class(self) -> str:
        return _MISSING_SYNC_CLASS if self.is_operation else _SYNC_CLASS

    @property
    def middle(self) -> str:
        return percent(self.left + self.width / 2)


def race_diagram(columns: Sequence[Columns]) -> Figure:
    """Draw the calls that led to a race, from left to right in their order.

    The Columns have one row per call: ``lane``, ``label`` and ``place`` (decoded by ``text``), ``seq``,
    ``operation`` (whether the call enqueued one of the two racing operations), ``after`` (the row of the
    earlier call that this call waits for, or should wait for if its operation races; -1 if there is none).
    """
    (call_columns,) = columns
    calls = tuple(_calls(call_columns))
    lanes = call_columns.text["lane"]
    shapes = (
        *(_draw_lane(name, i * _LANE_HEIGHT + _BOX_HEIGHT / 2) for i, name in enumerate(lanes)),
        *(_draw_arrow(calls[call.awaited_row], call) for call in calls if call.awaited_row >= 0),
        *map(_draw_box, calls),
    )
    title = "The two operations and the synchronization between their streams"
    drawing = Drawing(title, shapes, height=(len(lanes) - 1) * _LANE_HEIGHT + _BOX_HEIGHT)
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
    step_width = 1 / (len(lanes) - 1 + _MAX_BOX_STEPS)
    for i, (lane, seq, operation, awaited_row, label, site) in enumerate(rows):
        remark = " · ".join(filter(None, (site, f"call {seq:,}" if seq else "")))
        # The call takes the steps to the next call of its lane.
        distances = (j - i for j in range(i + 1, len(lanes)) if lanes[j] == lane)
        width = min(next(distances, _MAX_BOX_STEPS), _MAX_BOX_STEPS) - _GAP_STEPS
        yield _Call(lane, i * step_width, width * step_width, label, remark, operation, awaited_row)


def _draw_lane(name: str, y: float) -> Shape:
    label = shape(
        "text",
        name,
        title=name,
        max_length=_MAX_LANE_NAME_LENGTH,
        class_="tick end",
        x=-12,
        y=y,
        dy="0.32em",
    )
    return shape("g", label, shape("line", class_="grid", x1=0, x2="100%", y1=y, y2=y))


def _draw_box(call: _Call) -> Shape:
    texts = (
        shape("text", text, class_=kind, x=_TEXT_INSET, y=y)
        for text, kind, y in zip(
            (call.label, call.remark), ("name", "tick"), _BASELINES, strict=True
        )
    )
    return shape(
        "svg",
        shape("rect", class_="box", width="100%", height="100%", rx=5),
        *texts,
        title=" · ".join(filter(None, (call.label, call.remark))),
        class_="operation" if call.is_operation else "call",
        x=percent(call.left),
        y=call.top,
        width=percent(call.width),
        height=_BOX_HEIGHT,
    )


def _draw_arrow(start_call: _Call, end_call: _Call) -> Shape:
    """Draw an arrow between two calls, through the space between their lanes."""
    is_downward = end_call.lane >= start_call.lane
    return shape(
        "line",
        class_=end_call.arrow_class,
        x1=start_call.middle,
        y1=start_call.top + _BOX_HEIGHT if is_downward else start_call.top,
        x2=end_call.middle,
        y2=end_call.top if is_downward else end_call.top + _BOX_HEIGHT,
    )


def _legend(calls: Sequence[_Call]) -> Legend:
    drawn_classes = {call.arrow_class for call in calls if call.awaited_row >= 0}
    legend_keys = (
        Key(shape("line", class_=kind, x1=0, x2=36, y1=6, y2=6), label)
        for kind, label in _LEGEND
        if kind in drawn_classes
    )
    return Legend(tuple(legend_keys), width=42)
