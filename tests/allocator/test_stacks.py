from __future__ import annotations

import dis

from allocator import test_history

from cudakit.allocator.history import Stacks, gather_stack


def outer() -> tuple[object, ...]:
    return gather_stack()


def test_frames_have_the_line_of_each_instruction() -> None:
    stacks = Stacks()
    code = test_history.program.__code__
    for instruction in dis.get_instructions(code):
        if instruction.positions and instruction.positions.lineno:
            (frame,) = stacks.frames((code, instruction.offset))
            assert frame["line"] == instruction.positions.lineno


def test_gathered_stack_begins_at_the_caller() -> None:
    frames = Stacks().frames(outer())  # type: ignore[arg-type]

    code = test_gathered_stack_begins_at_the_caller.__code__
    assert frames[0]["name"] == code.co_name
    assert frames[0]["line"] == code.co_firstlineno + 1


def test_equal_stacks_give_the_same_object() -> None:
    stacks, trail = Stacks(), (outer.__code__, 0)

    assert stacks.frames(trail) is stacks.frames((outer.__code__, 0))
    assert stacks.frames(None) == []
