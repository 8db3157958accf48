"""The loop that runs the steps of a program, found in sequences of call stacks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from memory import builders

from cudakit.memory.analyze.loops import find_loop, is_inside_one_call
from cudakit.memory.snapshot import Snapshot
from cudakit.stacks import Frame

TORCH = "/usr/lib/python3/site-packages/torch/"
MODULE = Frame("_call_impl", f"{TORCH}nn/modules/module.py", 1750)
LINEAR = Frame("forward", f"{TORCH}nn/modules/linear.py", 134)
GELU = Frame("forward", f"{TORCH}nn/modules/activation.py", 816)


def program(*stacks: tuple[Frame, ...]) -> tuple[Snapshot, list[int]]:
    """Return a snapshot with these call stacks, outermost frame first, and the id of each."""
    frames = list(dict.fromkeys(frame for stack in stacks for frame in stack))
    distinct = list(dict.fromkeys(stacks))
    table = ((), *(tuple(frames.index(frame) for frame in stack[::-1]) for stack in distinct))
    snapshot = replace(builders.snapshot(), frames=tuple(frames), stacks=table)
    return snapshot, [distinct.index(stack) + 1 for stack in stacks]


def loop(*stacks: tuple[Frame, ...]) -> tuple[str, list[int]] | None:
    snapshot, ids = program(*stacks)
    found = find_loop(snapshot, np.array(ids, np.int32), 3)
    return None if found is None else (found.first_line, found.starts.tolist())


def main(line: int) -> Frame:
    return Frame("main", "/home/ada/train.py", line)


def step(line: int) -> Frame:
    return Frame("train_step", "/home/ada/train.py", line)


def test_each_jump_back_to_an_earlier_line_starts_an_iteration() -> None:
    setup = [(main(10),), (main(11),)]
    body = [(main(20),), (main(21),), (main(21),), (main(22),)]
    assert loop(*setup, *body * 4) == ("train.py:20 main", [2, 6, 10, 14])


def test_loop_in_a_called_function_is_found_below_its_call() -> None:
    body = [(main(30), step(5)), (main(30), step(6)), (main(30), step(8))]
    assert loop((main(10),), *body * 3) == ("train.py:5 train_step", [1, 4, 7])


def test_outer_loop_is_found_before_the_loop_inside_it() -> None:
    layers = [(main(21), step(5)), (main(21), step(6))] * 3
    body = [(main(20),), *layers, (main(22),)]
    assert loop(*body * 3) == ("train.py:20 main", [0, 8, 16])


def test_nested_loop_of_one_function_does_not_start_iterations() -> None:
    body = [(main(20),), *[(main(23),), (main(24),)] * 3]
    assert loop(*body * 3) == ("train.py:20 main", [0, 7, 14])


def test_two_iterations_are_not_a_loop() -> None:
    assert loop(*[(main(20),), (main(21),)] * 2) is None


def test_layers_of_a_network_are_not_a_loop() -> None:
    layers = [(main(20), MODULE, LINEAR), (main(20), MODULE, GELU)]
    assert loop(*layers * 10) is None


def test_allocations_without_a_call_stack_do_not_hide_the_loop() -> None:
    body = [(main(20),), (), (main(21),), ()]
    snapshot, _ = program((main(20),), (main(21),))
    ids = [[1, 0, 2, 0][i % 4] for i in range(len(body) * 3)]
    found = find_loop(snapshot, np.array(ids, np.int32), 3)
    assert found is not None
    assert found.starts.tolist() == [0, 4, 8]


def test_empty_sequence_has_no_loop() -> None:
    assert loop() is None
    assert find_loop(builders.snapshot(), np.zeros(5, np.int32), 3) is None


def test_stacks_are_inside_one_call_if_they_share_it() -> None:
    snapshot, ids = program(
        (main(20), MODULE, LINEAR), (main(20), MODULE, GELU), (main(20),), (main(21), MODULE, GELU)
    )
    inside = [is_inside_one_call(snapshot, np.array(ids[:n], np.int32)) for n in (1, 2, 3)]
    assert inside == [True, True, False]
    assert not is_inside_one_call(snapshot, np.array([ids[0], ids[3]], np.int32))
