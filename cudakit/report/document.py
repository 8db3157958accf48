"""The elements of reports: values, nodes and the Document.

A feature creates a Document from raw, typed values. A renderer formats and escapes it. This package depends
on no feature and no output format.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from cudakit.stacks import Frame
from cudakit.units import (
    Unavailable,
    format_bytes,
    format_count,
    format_rate,
    format_ratio,
    format_seconds,
)

if TYPE_CHECKING:
    import numpy.typing as npt  # slow to import, and most documents hold no array

    from cudakit.report.picture import Picture


# --- values ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bytes:
    """A size or amount of memory in bytes; ``derived`` marks a computed, not recorded, value."""

    value: int
    derived: bool = False


@dataclass(frozen=True, slots=True)
class Change:
    """A difference in bytes between two states, shown with its sign."""

    value: int


@dataclass(frozen=True, slots=True)
class Seconds:
    """A duration in seconds."""

    value: float


@dataclass(frozen=True, slots=True)
class Rate:
    """An amount per second; ``unit`` names the amount (``B``, ``FLOP``)."""

    value: float
    unit: str


@dataclass(frozen=True, slots=True)
class Ratio:
    """A share or a relative change: 0.25 is 25%."""

    value: float


@dataclass(frozen=True, slots=True)
class Count:
    """A count, such as the number of kernel launches."""

    value: int


@dataclass(frozen=True, slots=True)
class Text:
    """Text, possibly from an untrusted file: renderers escape it."""

    value: str


@dataclass(frozen=True, slots=True)
class Stack:
    """A call stack, innermost frame first; empty means that none was recorded.

    ``site`` is the index of the call site, the innermost frame outside of libraries: the frame to show if
    only one fits. ``distinct_index`` is the index of the frame that distinguishes the stack from others
    of the report that look alike; None if there are no others.
    """

    frames: tuple[Frame, ...]
    site: int = 0
    distinct_index: int | None = None


Value: TypeAlias = (
    Bytes | Change | Seconds | Rate | Ratio | Count | Text | Frame | Stack | Unavailable
)

# --- nodes -----------------------------------------------------------------------------------------

Array: TypeAlias = "npt.NDArray[Any]"


@dataclass(frozen=True, slots=True)
class Facts:
    """Labelled single values, in reading order."""

    rows: tuple[tuple[str, Value], ...]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a Table; ``kind`` selects how its cells are aligned and shortened.

    A terminal too narrow for all columns hides optional columns first.
    """

    name: str
    kind: Literal["number", "text", "stack", "bar"] = "text"
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of values; ``total_row`` comes last, ``caption`` is a sentence below the table.

    A cell of a ``bar`` column is a Ratio, drawn as a bar and its number. ``faint_rows`` has the indices of
    rows in a muted style, for example GPUs that CUDA does not see.
    """

    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    caption: str = ""
    total_row: tuple[Value, ...] | None = None
    faint_rows: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Series:
    """A curve of a Chart, with one y for each x; with ``step`` each value is constant up to the next x."""

    name: str
    y: Array
    step: bool = True


@dataclass(frozen=True, slots=True)
class Marker:
    """A named instant on a chart's x axis."""

    x: float
    label: str
    level: Literal["info", "warn", "error"] = "info"


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves over a common x axis; ``x_unit`` and ``y_unit`` select the format of the axis labels.

    ``x_end`` is the x up to which a curve with steps keeps its last value; None ends it at the last x.
    """

    title: str
    x: Array
    series: tuple[Series, ...]
    x_label: str = ""
    x_unit: Literal["seconds", "count"] = "count"
    y_unit: Literal["bytes", "seconds", "count", "ratio"] = "bytes"
    markers: tuple[Marker, ...] = ()
    x_end: float | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """A defect of the program with its locations, for structured formats such as SARIF."""

    rule: str  # stable name of the kind of defect, such as "read-after-write"
    meaning: str  # one sentence that explains the rule
    places: tuple[tuple[str, Stack], ...]  # labelled call stacks, the most relevant one first
    count: int = 1  # number of occurrences of the defect


@dataclass(frozen=True, slots=True)
class Note:
    """An important sentence and its remedies, the most promising one first.

    ``finding`` has the same fact for structured formats such as SARIF. Only HTML pages show ``evidence``,
    figures that support the sentence, and ``settings``, a text that a reader can copy into a shell.
    """

    level: Literal["ok", "info", "warn", "error"]
    text: str
    remedies: tuple[str, ...] = ()
    finding: Finding | None = None
    evidence: tuple[str, ...] = ()
    settings: str = ""


@dataclass(frozen=True, slots=True)
class Columns:
    """Named arrays of one length, the data of a View or an export.

    ``text`` maps the name of an array of ids to the texts of the ids.
    """

    name: str
    arrays: Mapping[str, Array]
    text: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class View:
    """A picture that HTML pages draw from Columns; other formats show the ``fallback``.

    ``columns`` names Columns of the same document. ``draw`` gets them in this order and returns the picture.
    """

    kind: str
    columns: tuple[str, ...]
    draw: Callable[[Sequence[Columns]], Picture]
    fallback: Node


@dataclass(frozen=True, slots=True)
class ExplorerData:
    """The data of an Explorer: named arrays, and texts and numbers that JSON can hold."""

    arrays: Mapping[str, Array]
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Explorer:
    """An interactive picture of HTML pages; other formats leave it out.

    The script that draws the picture is the file "assets/KIND.js" of the package ``package``, where KIND is
    ``kind``. ``data`` is called only if a page is written.
    """

    kind: str
    package: str
    data: Callable[[], ExplorerData]


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and the nodes under it. HTML pages show only the heading of a folded section at first."""

    title: str
    nodes: tuple[Node, ...]
    is_folded: bool = False


Node: TypeAlias = Facts | Table | Chart | Note | Columns | View | Explorer | Section


@dataclass(frozen=True, slots=True)
class Document:
    """The report of one command.

    ``closing_nodes`` repeat the summary at the end of a report that is longer than the terminal.
    """

    title: str
    nodes: tuple[Node, ...]
    closing_nodes: tuple[Node, ...] = ()


def walk(nodes: Iterable[Node]) -> Iterator[Node]:
    """Yield nodes in reading order, with those of Sections and the fallbacks of Views."""
    for node in nodes:
        yield node
        if isinstance(node, Section):
            yield from walk(node.nodes)
        elif isinstance(node, View):
            yield from walk((node.fallback,))


# --- values as plain text, which a renderer then escapes, cuts and colors --------------------------

NOT_AVAILABLE = "n/a"
NO_STACK = "no stack recorded"

# The levels of notes in words and as symbols.
LEVELS = {"ok": "OK", "info": "Note", "warn": "Warning", "error": "Error"}
SYMBOLS = {"ok": "✓", "info": "i", "warn": "!", "error": "✗"}

_INSTALL_FOLDERS = ("site-packages/", "dist-packages/")
_UNKNOWN_FILE = ("", "??")


def format_value(value: Value) -> str:
    """Format a value; ``~`` marks a derived size, a stack is its call site."""
    match value:
        case Text(text):
            return text
        case Frame():
            return format_frame(value)
        case Stack():
            return format_frame(site(value)) if value.frames else NO_STACK
        case Unavailable():
            return NOT_AVAILABLE
        case _:
            return _amount_text(value) if math.isfinite(value.value) else NOT_AVAILABLE


def site(stack: Stack) -> Frame:
    """Return the call site of a stack. Raises IndexError for an empty stack."""
    return stack.frames[min(max(stack.site, 0), len(stack.frames) - 1)]


def leaf(stack: Stack) -> Frame | None:
    """Return the frame to show beside the call site; None if it is the call site.

    This is the frame that distinguishes the stack from others, if the stack has one inside of the call site,
    else the innermost frame.
    """
    if not stack.frames:
        return None
    distinct = stack.distinct_index
    is_inside = distinct is not None and distinct < max(stack.site, 0)
    frame = stack.frames[distinct if is_inside and distinct is not None else 0]
    return None if frame == site(stack) else frame


def distinct_caller(stack: Stack) -> Frame | None:
    """Return the caller of the call site that distinguishes the stack from others; None if none does."""
    if stack.distinct_index is None or stack.distinct_index <= max(stack.site, 0):
        return None
    return stack.frames[stack.distinct_index]


def format_frame(frame: Frame) -> str:
    """Format a frame as ``train.py:15 step``, or the function alone if the file is unknown."""
    return f"{format_place(frame)} {frame.name}".strip()


def format_place(frame: Frame) -> str:
    """Format the file and line of a frame, ``loop/train.py:15``; empty if the file is unknown."""
    if frame.filename in _UNKNOWN_FILE:
        return ""
    line_text = f":{frame.line}" if frame.line > 0 else ""
    return _shorten_path(frame.filename) + line_text


def _shorten_path(path: str) -> str:
    """Shorten a path to the part after site-packages, or else to its last two components."""
    normal_path = path.replace("\\", "/")
    for folder in _INSTALL_FOLDERS:
        _, separator, path_in_folder = normal_path.rpartition(folder)
        if separator:
            return path_in_folder
    return "/".join(normal_path.rsplit("/", 2)[-2:])


def _amount_text(value: Bytes | Change | Seconds | Rate | Ratio | Count) -> str:
    match value:
        case Bytes(size_bytes, derived):
            return ("~" if derived else "") + format_bytes(size_bytes)
        case Change(size_bytes):
            return ("+" if size_bytes > 0 else "") + format_bytes(size_bytes)
        case Seconds(seconds):
            # An int is exact and gets no trailing zeros.
            return format_seconds(seconds, pad=isinstance(seconds, float)) if seconds else "0 s"
        case Rate(amount, unit):
            return format_rate(amount, unit, pad=True)
        case Ratio(ratio):
            return format_ratio(ratio)
        case Count(count):
            return format_count(count)


def x_value(chart: Chart, x: float) -> Value:
    """Return a position on the x axis as a value with its unit."""
    return _with_unit(chart.x_unit, x)


def y_value(chart: Chart, y: float) -> Value:
    """Return a value on the y axis with its unit."""
    return _with_unit(chart.y_unit, y)


def _with_unit(unit: str, number: float) -> Value:
    if not math.isfinite(number):
        return Unavailable("not a number")
    match unit:
        case "bytes":
            return Bytes(round(number))
        case "seconds":
            return Seconds(int(number) if number == int(number) else number)
        case "ratio":
            return Ratio(number)
        case _:
            return Count(round(number))
