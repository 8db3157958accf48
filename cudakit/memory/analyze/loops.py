"""Find the loop of the program that runs its steps, from the call stacks of the allocations.

Line numbers within one call of a function rise, until a loop starts its next iteration. So in the outermost
function whose allocations go back to an earlier line several times, each such jump starts a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cudakit.memory.snapshot import Ids, Ints, Snapshot
from cudakit.stacks import Frame

# The search ends at calls of a network, of the backward pass and of an optimizer: loops in these run over
# layers or parameters, not over steps.
_INNER_CALLS = frozenset({"_call_impl", "_wrapped_call_impl", "backward", "profile_hook_step"})
_INNER_FILES = ("torch/nn/", "torch/optim/", "torch/autograd/")
_MAX_DEPTH = 64
_MAX_STACKS = 100_000


@dataclass(frozen=True, slots=True)
class Loop:
    """The loop that runs the steps of a program."""

    first_line: str  # line at which each iteration starts, such as "train.py:40 train"
    starts: Ints  # index of the first allocation of each iteration


def find_loop(snapshot: Snapshot, stacks: Ids, min_iterations: int) -> Loop | None:
    """Return the outermost loop with enough iterations in a sequence of call stacks, or None."""
    allocation_indices = np.flatnonzero(stacks)  # stack 0 is empty
    distinct_stacks, stack_rows = np.unique(stacks[allocation_indices], return_inverse=True)
    if len(distinct_stacks) > _MAX_STACKS:
        return None
    stack_rows = stack_rows.reshape(-1)  # the row in ``frames`` of each allocation
    # Frame ids of each call stack by depth: column 0 is the outermost frame; -1 is beyond the innermost one.
    frames = _frames_by_depth(snapshot, distinct_stacks.tolist())
    for depth in range(frames.shape[1]):
        count_by_stack = np.bincount(stack_rows, minlength=len(frames))
        function, line_by_stack = _busiest_function(snapshot, frames[:, depth], count_by_stack)
        if not function or _is_inner_function(function):
            return None
        allocation_lines = line_by_stack[stack_rows]
        is_in_function = allocation_lines >= 0
        if not is_in_function.any():  # only a damaged file has a frame with a negative line
            return None
        allocation_indices, stack_rows, allocation_lines = (
            allocation_indices[is_in_function],
            stack_rows[is_in_function],
            allocation_lines[is_in_function],
        )
        iteration_starts = _iteration_starts(allocation_lines)
        if len(iteration_starts) >= min_iterations:
            name, path = function
            file_name = path.replace(chr(92), "/").rpartition("/")[2]
            first_line = int(allocation_lines[iteration_starts[0]])
            return Loop(f"{file_name}:{first_line} {name}", allocation_indices[iteration_starts])
        allocation_frames = frames[stack_rows, depth]
        is_in_busiest_frame = allocation_frames == np.bincount(allocation_frames).argmax()
        allocation_indices, stack_rows = (
            allocation_indices[is_in_busiest_frame],
            stack_rows[is_in_busiest_frame],
        )
    return None


def _frames_by_depth(snapshot: Snapshot, stacks: list[int]) -> Ids:
    outer_first_stacks = [snapshot.stacks[stack_index][::-1][:_MAX_DEPTH] for stack_index in stacks]
    frame_table = np.full(
        (len(outer_first_stacks), max(map(len, outer_first_stacks), default=0)), -1, np.int32
    )
    for path_row, outer_first_stack in zip(frame_table, outer_first_stacks, strict=True):
        path_row[: len(outer_first_stack)] = outer_first_stack
    return frame_table


def _busiest_function(
    snapshot: Snapshot, frames: Ids, count_by_stack: Ints
) -> tuple[tuple[str, str] | None, Ints]:
    """Return the function with most allocations, as name and file, and its line in each call stack.

    For each call stack, ``frames`` has the frame at one depth; ``count_by_stack`` counts the allocations.
    The line is -1 for call stacks without this function.
    """
    n_frames = len(snapshot.frames)
    count_by_frame = np.bincount(frames + 1, weights=count_by_stack, minlength=n_frames + 1)[1:]
    count_by_function: dict[tuple[str, str], float] = {}
    used_frames = np.flatnonzero(count_by_frame).tolist()
    for frame_index in used_frames:
        function_key = snapshot.frames[frame_index].name, snapshot.frames[frame_index].filename
        count_by_function[function_key] = count_by_function.get(function_key, 0) + float(
            count_by_frame[frame_index]
        )
    function = max(
        count_by_function, key=lambda function_key: count_by_function[function_key], default=None
    )
    line_by_frame = np.full(n_frames + 1, -1, np.int64)  # the last item is for frame -1
    for frame_index in used_frames:
        if (snapshot.frames[frame_index].name, snapshot.frames[frame_index].filename) == function:
            line_by_frame[frame_index] = snapshot.frames[frame_index].line
    return function, line_by_frame[frames]


def is_inside_one_call(snapshot: Snapshot, stacks: Ids) -> bool:
    """Return whether all these call stacks are in one call of a network, a backward pass or an optimizer."""
    outer_first_stacks = [snapshot.stacks[stack][::-1] for stack in np.unique(stacks).tolist()]
    for frames in zip(*outer_first_stacks, strict=False):
        if len(set(frames)) > 1:
            return False
        if is_inner_call(snapshot.frames[frames[0]]):
            return True
    return False


def is_inner_call(frame: Frame) -> bool:
    """Return whether a frame is a call of a network, of the backward pass or of an optimizer."""
    return _is_inner_function((frame.name, frame.filename))


def _is_inner_function(function: tuple[str, str]) -> bool:
    name, path = function
    return name in _INNER_CALLS or any(path_part in path for path_part in _INNER_FILES)


def _iteration_starts(lines: Ints) -> Ints:
    """Return the indices at which an iteration starts.

    The jumps of a nested loop lead to later lines, so only jumps to the first line of the outer loop count.
    """
    jump_indices = np.flatnonzero(np.diff(lines) < 0) + 1
    if not len(jump_indices):
        return jump_indices
    target_lines, jump_counts = np.unique(lines[jump_indices], return_counts=True)
    frequent_targets = target_lines[jump_counts >= min(2, int(jump_counts.max()))]
    jump_indices = jump_indices[lines[jump_indices] == frequent_targets.min()]
    # The first iteration starts at its first line, without a jump.
    first_line_indices = np.flatnonzero(lines[: jump_indices[0]] == lines[jump_indices[0]])
    return np.append(first_line_indices[:1], jump_indices)
