"""The elements of reports: values, nodes and the Document.

A feature creates a Document from raw, typed values. A renderer formats and escapes it. This package depends
on no feature and no output format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from cudakit.stacks import Frame
from cudakit.units import Unavailable

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
