"""The common vocabulary of reports: what can be shown, by whatever renderer.

A feature makes a Document of typed, raw values; a renderer formats and escapes it. Nothing here depends on
a feature, a terminal or a page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from cudakit.units import Unavailable

if TYPE_CHECKING:
    import numpy.typing as npt  # slow to import, and most documents hold no array

    from cudakit.document.picture import Picture

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
    """A share or a relative change: 0.25 is 25 %."""

    value: float


@dataclass(frozen=True, slots=True)
class Count:
    """A number of things."""

    value: int


@dataclass(frozen=True, slots=True)
class Text:
    """Text, possibly from an untrusted file: renderers escape it."""

    value: str


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a call stack; ``line`` 0 means unknown (C++ without debug information)."""

    name: str
    filename: str
    line: int


@dataclass(frozen=True, slots=True)
class Stack:
    """A call stack, innermost frame first; empty means that none was recorded.

    ``site`` is the index of the frame to show where only one fits: the innermost frame outside libraries.
    """

    frames: tuple[Frame, ...]
    site: int = 0


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
    """A table's column; ``kind`` selects the alignment of its cells and how they are shortened."""

    name: str
    kind: Literal["number", "text", "stack", "bar"] = "text"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of values; ``caption`` describes the rows left out, ``total_row`` is the last row.

    A cell of a ``bar`` column is a Ratio and is drawn as a bar beside its number. ``faint`` has the indices
    of rows in a muted style, such as those of GPUs that CUDA does not see.
    """

    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    caption: str = ""
    total_row: tuple[Value, ...] | None = None
    faint: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Tree:
    """A labelled amount of memory and its parts, the data of a flame graph: only exports write it."""

    label: str
    size_bytes: int
    children: tuple[Tree, ...] = ()


@dataclass(frozen=True, slots=True)
class Series:
    """One curve of a Chart, as long as its ``x``; ``step`` holds each value to the next x."""

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
    """Curves over a common axis. ``x_unit`` and ``y_unit`` name a Value kind for the axis labels."""

    title: str
    x: Array
    series: tuple[Series, ...]
    x_label: str = ""
    x_unit: Literal["seconds", "count"] = "count"
    y_unit: Literal["bytes", "seconds", "count", "ratio"] = "bytes"
    markers: tuple[Marker, ...] = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """A defect of the program and its locations, for tools that read structured results."""

    rule: str  # a stable name: "read-after-write"
    meaning: str  # of the rule, one sentence
    places: tuple[tuple[str, Stack], ...]  # label and stack; the most relevant one first
    count: int = 1  # number of occurrences


@dataclass(frozen=True, slots=True)
class Note:
    """One important sentence, and what to do about it, the most promising remedy first.

    ``finding`` is the same fact for formats that other tools read.
    """

    level: Literal["ok", "info", "warn", "error"]
    text: str
    remedies: tuple[str, ...] = ()
    finding: Finding | None = None


@dataclass(frozen=True, slots=True)
class Columns:
    """Named arrays of one length, the data under a View or an export; ``text`` decodes an id column."""

    name: str
    arrays: Mapping[str, Array]
    text: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class View:
    """A picture that a page draws from Columns; a terminal shows the ``fallback``.

    ``columns`` names Columns of the same document; ``draw`` gets them in this order.
    """

    kind: str
    columns: tuple[str, ...]
    draw: Callable[[Sequence[Columns]], Picture]
    fallback: Node


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and the nodes under it."""

    title: str
    nodes: tuple[Node, ...]


Node: TypeAlias = Facts | Table | Tree | Chart | Note | Columns | View | Section


@dataclass(frozen=True, slots=True)
class Document:
    """The report of one command."""

    title: str
    nodes: tuple[Node, ...]


def walk(nodes: Iterable[Node]) -> Iterator[Node]:
    """Yield nodes in reading order, with those of Sections and the fallbacks of Views."""
    for node in nodes:
        yield node
        if isinstance(node, Section):
            yield from walk(node.nodes)
        elif isinstance(node, View):
            yield from walk((node.fallback,))
