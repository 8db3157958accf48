"""Parts of the tables of a report: names, stacks, and tables limited to a number of rows."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias, TypeVar

from cudakit.memory.result import DeviceDiff, DeviceMemory, FileFacts
from cudakit.report.document import Column, Node, Section, Stack, Table, Text, Value
from cudakit.stacks import Frame

_T = TypeVar("_T")
_ColumnKind: TypeAlias = Literal["number", "text", "stack", "bar"]  # kind of a Column

NO_STACK = "no stack recorded (C++ thread, or before the trace)"


def device_name(device: DeviceMemory | DeviceDiff) -> str:
    """Return the name of a device as CUDA programs write it."""
    return "pinned host memory" if device.device is None else f"cuda:{device.device}"


def moment_name(device: DeviceMemory) -> str:
    """Return the name of the moment that the tables show."""
    moment = device.at
    if moment.name == "peak" and not device.events:
        return "at the end"  # without a trace, the peak is not known
    return {"peak": "at the peak", "end": "at the end", "oom": "when memory ran out"}.get(
        moment.name, f"after event {moment.event:,}"
    )


def step_definition(device: DeviceMemory) -> str:
    """Return a clause that defines a step of the program."""
    source_kind, _, source_name = device.steps.source.partition(" ")
    if source_kind == "annotation":
        if source_name.endswith("#"):
            return f"each step is an annotation '{source_name.removesuffix('#')}' with a number"
        return f"all steps are annotations with the same name, '{source_name}'"
    if source_kind == "loop":
        return f"each step starts at {source_name.removeprefix('at ')}"
    if source_kind == "snapshot":
        return "each step starts at a snapshot event of the trace"
    return "each step is one repetition of the same sequence of allocations"


def files_name(files: Sequence[FileFacts]) -> str:
    """Return the name of the only file, or the number of files."""
    return files[0].name if len(files) == 1 else f"{len(files)} files"


def per_device(device_nodes: Iterable[tuple[str, Iterable[Node]]]) -> tuple[Node, ...]:
    """Return the nodes of a single device; for several devices, a section for each (name, nodes)."""
    sections = tuple(Section(name, _mark_distinct_frames(nodes)) for name, nodes in device_nodes)
    return sections[0].nodes if len(sections) == 1 else sections


def stack_value(frames: tuple[Frame, ...], site: int) -> Value:
    """Return a call stack, or the text for a missing one."""
    return Stack(frames, site) if frames else Text(NO_STACK)


def _mark_distinct_frames(nodes: Iterable[Node]) -> tuple[Node, ...]:
    """Return the nodes with a marked frame in each of their call stacks that looks like another.

    All tables are compared together, so that a call stack has the same name in each of them.
    """
    listed_nodes = tuple(nodes)
    distinct_indices = _distinct_indices(set(_table_stacks(listed_nodes)))

    def marked_cell(cell: Value) -> Value:
        return (
            replace(cell, distinct_index=distinct_indices[cell])
            if isinstance(cell, Stack)
            else cell
        )

    def marked_node(node: Node) -> Node:
        if isinstance(node, Section):
            return replace(node, nodes=tuple(map(marked_node, node.nodes)))
        if isinstance(node, Table):
            return replace(node, rows=tuple(tuple(map(marked_cell, row)) for row in node.rows))
        return node

    return tuple(map(marked_node, listed_nodes))


def _table_stacks(nodes: Iterable[Node]) -> Iterator[Stack]:
    for node in nodes:
        if isinstance(node, Section):
            yield from _table_stacks(node.nodes)
        elif isinstance(node, Table):
            yield from (cell for row in node.rows for cell in row if isinstance(cell, Stack))


def _distinct_indices(stacks: Iterable[Stack]) -> dict[Stack, int | None]:
    """Return the index of the frame that distinguishes each stack from those that look like it, or None.

    Stacks look alike if they have the same call site and the same function as their innermost frame.
    """
    groups: defaultdict[tuple[Frame, str | None], list[Stack]] = defaultdict(list)
    for stack in stacks:
        innermost_function = stack.frames[0].name if stack.site else None
        groups[stack.frames[stack.site], innermost_function].append(stack)
    distinct_indices = {}
    for similar_stacks in groups.values():
        frame_counts = Counter(
            position for stack in similar_stacks for position in enumerate(stack.frames)
        )
        for stack in similar_stacks:
            distinct_indices[stack] = _rarest_frame(stack, frame_counts, len(similar_stacks))
    return distinct_indices


def _rarest_frame(
    stack: Stack, frame_counts: Counter[tuple[int, Frame]], stack_count: int
) -> int | None:
    """Return the index of the innermost of the frames that the fewest of the similar stacks share.

    None if all of them share the frames of this stack: it is the only one, or the beginning of the others.
    """
    rarest_index, smallest_count = None, stack_count
    for position in enumerate(stack.frames):
        if position[0] != stack.site and frame_counts[position] < smallest_count:
            rarest_index, smallest_count = position[0], frame_counts[position]
    return rarest_index


def table(
    columns: Sequence[tuple[str, _ColumnKind, Callable[[_T], Value]]],
    items: Iterable[_T],
    caption: str = "",
) -> Table:
    """Return a table with a row per item; a column has a title, a kind, and a function of an item."""
    listed_items = list(items)
    cells = [[value_of(item) for item in listed_items] for _, _, value_of in columns]
    return Table(
        tuple(Column(title, kind) for title, kind, _ in columns),
        tuple(
            tuple(cell_column[row_index] for cell_column in cells)
            for row_index in range(len(listed_items))
        ),
        caption,
    )


def limited_table(
    columns: Sequence[tuple[str, _ColumnKind, Callable[[_T], Value]]],
    items: Sequence[_T],
    top: int,
    names: tuple[str, str] = ("call stack", "call stacks"),
    *,
    caption: str = "",
) -> Table:
    """Return a table of the first ``top`` items, 0 for all; the caption counts the rest."""
    listed_items = items if top == 0 else items[:top]
    omitted_count, (singular, plural) = len(items) - len(listed_items), names
    omitted_note = (
        f"{omitted_count:,} more {singular if omitted_count == 1 else plural}: --top 0 shows all."
        if omitted_count
        else ""
    )
    return table(columns, listed_items, " ".join(filter(None, (omitted_note, caption))))
