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
# A column of a table: its title, its kind, and the function that returns the value of an item.
ColumnSpec: TypeAlias = tuple[str, Literal["number", "text", "stack", "bar"], Callable[[_T], Value]]

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
    indices = _distinct_indices(set(_table_stacks(listed_nodes)))

    def marked_cell(cell: Value) -> Value:
        return replace(cell, distinct_index=indices[cell]) if isinstance(cell, Stack) else cell

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
    distinct_indices: dict[Stack, int | None] = {}
    for similar in groups.values():
        counts = Counter(position for stack in similar for position in enumerate(stack.frames))
        for stack in similar:
            # The innermost of the frames that the fewest of the similar stacks share. None if all of them
            # share the frames of this stack: it is the only one, or the beginning of the others.
            fewest = len(similar)
            distinct_indices[stack] = None
            for index, frame in enumerate(stack.frames):
                if index != stack.site and counts[index, frame] < fewest:
                    distinct_indices[stack], fewest = index, counts[index, frame]
    return distinct_indices


def table(
    columns: Sequence[ColumnSpec[_T]],
    items: Iterable[_T],
    caption: str = "",
) -> Table:
    """Return a table with a row per item."""
    return Table(
        tuple(Column(title, kind) for title, kind, _ in columns),
        tuple(tuple(value_of(item) for _, _, value_of in columns) for item in items),
        caption,
    )


def limited_table(
    columns: Sequence[ColumnSpec[_T]],
    items: Sequence[_T],
    top: int,
    names: tuple[str, str] = ("call stack", "call stacks"),
    *,
    caption: str = "",
) -> Table:
    """Return a table of the first ``top`` items, 0 for all; the caption counts the rest."""
    listed_items = items if top == 0 else items[:top]
    if omitted_count := len(items) - len(listed_items):
        noun = names[omitted_count != 1]
        caption = f"{omitted_count:,} more {noun}: --top 0 shows all. {caption}".rstrip()
    return table(columns, listed_items, caption)
