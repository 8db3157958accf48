from __future__ import annotations

import asyncio
import ctypes
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cmp_to_key
from inspect import isfunction
from types import FrameType
from typing import Any

import pytest

_frames = pytest.importorskip(
    "cudakit.record._frames", reason="no compiler was there when cudakit was installed"
)

Stack = list[tuple[str, str, int]]


class Frame(ctypes.Structure):
    _fields_ = [
        ("function", ctypes.c_char * 256),
        ("file", ctypes.c_char * 512),
        ("line", ctypes.c_int32),
    ]


Words = ctypes.POINTER(ctypes.c_uint64)


class Walker(ctypes.Structure):
    """``struct ck_walker``. Functions called through ctypes run without the GIL."""

    _fields_ = [
        ("walk", ctypes.CFUNCTYPE(ctypes.c_int, Words, Words, Words, ctypes.c_int)),
        (
            "resolve",
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.POINTER(Frame)),
        ),
        ("program_call", ctypes.CFUNCTYPE(ctypes.c_uint32)),
    ]


WALKER = Walker.from_address(_frames.walker)


def walk_and_resolve(limit: int = 64) -> tuple[list[int], Stack]:
    """Walk and resolve without the GIL, as the recorder does; return the keys, too."""
    keys, codes, offsets = ((ctypes.c_uint64 * limit)() for _ in range(3))
    depth = WALKER.walk(keys, codes, offsets, limit)
    frames = []
    for code, offset in zip(codes[:depth], offsets[:depth], strict=True):
        frame = Frame()
        assert WALKER.resolve(code, offset, frame) == 0
        frames.append((frame.function.decode(), frame.file.decode(), frame.line))
    return keys[1:depth], frames[
        1:
    ]  # without the frame of this function, whose instruction differs


def caller_stack() -> Stack:
    """Return the caller's stack as the interpreter reports it."""
    frame: FrameType | None = sys._getframe(1)
    stack = []
    while frame:
        code = frame.f_code
        stack.append((code.co_qualname, code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return stack


def walked_and_expected() -> tuple[Stack, Stack]:
    return _frames.stack(1024), caller_stack()


def test_stack_equals_interpreter_stack() -> None:
    def outer() -> tuple[Stack, Stack]:
        def inner() -> tuple[Stack, Stack]:
            return walked_and_expected()

        return inner()

    walked_stacks, expected = outer()

    assert walked_stacks == expected
    assert [function.rpartition(".")[2] for function, *_ in walked_stacks[:3]] == [
        "walked_and_expected",
        "inner",
        "outer",
    ]
    assert walked_stacks[0][1] == __file__


def test_generators_and_comprehensions_have_frames() -> None:
    def generator() -> Iterator[tuple[Stack, Stack]]:
        yield walked_and_expected()
        yield from (walked_and_expected() for _ in range(2))

    [chosen] = [[walked_and_expected() for _ in range(1)] for _ in range(1)]

    for walked_stack, expected in [*generator(), *chosen]:
        assert walked_stack == expected


def test_coroutine_frames_are_in_stack_of_running_task() -> None:
    async def inner() -> tuple[Stack, Stack]:
        await asyncio.sleep(0)
        return walked_and_expected()

    async def outer() -> tuple[Stack, Stack]:
        return await inner()

    # The main thread of a worker that has tested pages has a running event loop, that of Playwright.
    with ThreadPoolExecutor(1) as pool:
        walked_stacks, expected = pool.submit(lambda: asyncio.run(outer())).result()

    assert walked_stacks == expected
    assert "inner" in walked_stacks[1][0]
    assert "outer" in walked_stacks[2][0]


def test_callback_from_c_is_linked_to_its_caller() -> None:
    stacks = []

    def compared(left: int, right: int) -> int:
        stacks.append(walked_and_expected())
        return left - right

    sorted([2, 1], key=cmp_to_key(compared))
    ctypes.CFUNCTYPE(None)(lambda: stacks.append(walked_and_expected()))()

    assert len(stacks) >= 2
    assert all(walked_stack == expected for walked_stack, expected in stacks)


class Made:
    """A class whose calls run ``__init__`` through a trampoline frame, in Python 3.12 and newer."""

    def __init__(self) -> None:
        self.stacks = walked_and_expected()

    @property
    def member(self) -> tuple[Stack, Stack]:
        return walked_and_expected()


def test_trampoline_frames_are_skipped() -> None:
    for _ in range(100):  # enough calls that the interpreter specializes them
        instance = Made()
        for walked_stack, expected in (instance.stacks, instance.member):
            assert walked_stack == expected
            assert walked_stack[1][0].startswith("Made.")


NAMES = ["plain", "größe", "速度", "𐍈速é"]


@pytest.mark.parametrize("name", NAMES)
def test_names_and_files_may_be_non_ascii(name: str) -> None:
    scope: dict[str, Any] = {"stacks": walked_and_expected}
    code = compile(f"def {name}():\n\n return stacks()\ncall = {name}", f"<{name} ½>", "exec")
    exec(code, scope)  # noqa: S102

    walked_stacks, expected = scope["call"]()

    assert walked_stacks == expected
    assert walked_stacks[1][1:] == (f"<{name} ½>", 3)


def run_in(source: str, file: str) -> tuple[list[int], Stack]:
    scope: dict[str, Any] = {"walk_and_resolve": walk_and_resolve}
    exec(compile(source, file, "exec"), scope)  # noqa: S102
    result: tuple[list[int], Stack] = scope["result"]
    return result


@pytest.mark.parametrize("character", ["a", "é", "速", "𐍈"])
@pytest.mark.parametrize("shift", range(4))
def test_long_texts_are_cut_at_character_boundary(character: str, shift: int) -> None:
    full_name = "x" * shift + character * 600

    _, stack = run_in("result = walk_and_resolve()", full_name)

    assert stack[0][1] == full_name.encode()[:511].decode(errors="ignore")


def test_surrogates_are_replaced() -> None:
    _, stack = run_in("result = walk_and_resolve()", "a\udcffb")

    assert stack[0][1] == "a\ufffdb"


# Source that contains every form of a location: distant lines, backward lines, empty lines, wide columns.
SOURCE = (
    """
def run(values):
    first = (
        values[0]() +


        values[1]()
    ); second = values[0]() if \
        values else None
    try:
        with values[2] as entered:
            third = [value() for value in values[:2]]
    finally:
        fourth = values[
            0
        ]()
"""
    + "\n" * 300
    + " " * 4
    + "return ("
    + " " * 300
    + "values[0](), \n\n"
    + "values[1]())"
)


def test_line_of_every_instruction_equals_interpreter() -> None:
    space: dict[str, Any] = {}
    exec(compile(SOURCE, "<locations>", "exec"), space)  # noqa: S102
    large = [method.__code__ for method in vars(subprocess.Popen).values() if isfunction(method)]

    for code in [space["run"].__code__, *large]:
        for start, end, line in code.co_lines():
            for offset in range(start, end, 2):
                assert line_of(code, offset) == (line or 0)


def line_of(code: Any, offset: int) -> int:
    frame = Frame()
    assert WALKER.resolve(id(code), offset, frame) == 0
    return frame.line


def test_offset_beyond_code_has_no_line() -> None:
    assert line_of(caller_stack.__code__, 2**40) == 0


def test_null_code_cannot_be_resolved() -> None:
    assert WALKER.resolve(0, 0, Frame()) == -1


def test_deep_recursion_is_cut_at_outer_end() -> None:
    def descend(depth: int) -> Stack:
        stack: Stack = descend(depth - 1) if depth else _frames.stack(limit=500)
        return stack

    stack = descend(600)

    assert len(stack) == 500
    assert {function.rpartition(".")[2] for function, *_ in stack} == {"descend"}


@pytest.mark.parametrize("limit", [-1, 0, 1, 3])
def test_stack_respects_limit(limit: int) -> None:
    assert len(_frames.stack(limit)) == max(limit, 0)


def test_keys_identify_code_and_instruction() -> None:
    def frame_keys() -> list[int]:
        return [walk_and_resolve()[0][0], walk_and_resolve()[0][0]]

    first, second_keys = (frame_keys() for _ in range(2))

    assert first == second_keys
    assert len(set(first)) == 2


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(lambda n: ("result = walk_and_resolve()", f"<cell-{n}>"), id="file"),
        pytest.param(lambda n: ("\n" * n + "result = walk_and_resolve()", "<string>"), id="line"),
    ],
)
def test_code_at_reused_address_has_new_keys(
    program: Callable[[int], tuple[str, str]],
) -> None:
    code_by_key = {}
    for number in range(100, 300):
        keys, stack = run_in(*program(number))
        assert code_by_key.setdefault(keys[0], stack[0]) == stack[0]

    assert len(code_by_key) == 200


def descended(name: str, depth: int, failures: list[Stack]) -> None:
    """Walk repeatedly at the inner end of a recursion; every result must be the same."""
    if depth:
        return descended(name, depth - 1, failures)
    for _ in range(300):
        _, stack = walk_and_resolve()
        if [function for function, *_ in stack[:13]] != [*["descended"] * 12, name]:
            failures.append(stack)
    return None


def test_threads_see_their_own_frames() -> None:
    failures: list[Stack] = []
    finished = threading.Event()

    def left() -> None:
        descended(f"{module_name}.left", 11, failures)

    def right() -> None:
        descended(f"{module_name}.right", 11, failures)

    def busy() -> None:
        while not finished.is_set():
            _ = [str(number) for number in range(100)]

    module_name = left.__qualname__.rpartition(".")[0]
    busy_thread = threading.Thread(target=busy)
    threads_walking = [threading.Thread(target=target) for target in (left, right, left)]
    for thread in (busy_thread, *threads_walking):
        thread.start()
    for thread in threads_walking:
        thread.join()
    finished.set()
    busy_thread.join()

    assert failures == []


def test_foreign_thread_has_no_frames() -> None:
    library = ctypes.CDLL(None)
    thread, result = ctypes.c_ulong(), ctypes.c_void_p()

    # The argument `keys` may be a null pointer, because nothing is written: there is no frame.
    assert library.pthread_create(ctypes.byref(thread), None, WALKER.walk, None) == 0
    assert library.pthread_join(thread, ctypes.byref(result)) == 0

    assert not (result.value or 0) & 0xFFFFFFFF
