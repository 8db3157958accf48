"""Parts of the tables of a report: names, stacks, and tables limited to a number of rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias, TypeVar

from cudakit.core.memory.result import DeviceDiff, DeviceMemory, FileFacts
from cudakit.document import Column, Frame, Node, Section, Stack, Table, Text, Value

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
        return f"each step is an annotation '{source_name}'"
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
    sections = tuple(Section(name, tuple(nodes)) for name, nodes in device_nodes)
    return sections[0].nodes if len(sections) == 1 else sections


def stack_value(frames: tuple[Frame, ...], site: int) -> Value:
    """Return a call stack, or the text for a missing one."""
    return Stack(frames, site) if frames else Text(NO_STACK)


def mark_differing_frames(stacks: Sequence[Value]) -> list[Value]:
    """Return the call stacks of a table; in those that look alike, the first differing frame is marked.

    Stacks look alike if they have the same call site and the same function as their innermost frame. The
    first differing frame is searched from the innermost frame outwards.
    """
    stacks_by_text: defaultdict[tuple[Frame, str | None], list[int]] = defaultdict(list)
    for row_number, stack in enumerate(stacks):
        if isinstance(stack, Stack):
            innermost_function = stack.frames[0].name if stack.site else None
            stacks_by_text[stack.frames[stack.site], innermost_function].append(row_number)
    marked_stacks = list(stacks)
    for row_numbers in stacks_by_text.values():
        similar_stacks = [
            stack
            for stack in (stacks[row_number] for row_number in row_numbers)
            if isinstance(stack, Stack)
        ]
        for row_number, stack in zip(row_numbers, similar_stacks, strict=True):
            marked_stacks[row_number] = replace(
                stack, distinct_index=_first_difference(stack, similar_stacks)
            )
    return marked_stacks


def _first_difference(stack: Stack, similar_stacks: Sequence[Stack]) -> int | None:
    """Return the index of the first frame in which a stack differs from another of its group.

    None if no other stack has other frames, or if this stack is the beginning of the others.
    """
    for index, frame in enumerate(stack.frames):
        if index != stack.site and any(
            other_stack.frames[index : index + 1] != (frame,) for other_stack in similar_stacks
        ):
            return index
    return None


def table(
    columns: Sequence[tuple[str, _ColumnKind, Callable[[_T], Value]]],
    items: Iterable[_T],
    caption: str = "",
) -> Table:
    """Return a table with a row per item; a column has a title, a kind, and a function of an item."""
    listed_items = list(items)
    cells = [
        mark_differing_frames([value_of(item) for item in listed_items])
        if kind == "stack"
        else [value_of(item) for item in listed_items]
        for _, kind, value_of in columns
    ]
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
