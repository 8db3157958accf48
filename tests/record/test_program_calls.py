"""Tests the numbers of program calls: executions of an instruction in the program's own code."""

from __future__ import annotations

import asyncio
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

_frames = pytest.importorskip(
    "cudakit.record._frames", reason="no compiler was there when cudakit was installed"
)

from test_stacks import LIBRARY_FILES, PROGRAM_FILES  # noqa: E402 after the skip

from cudakit.stacks import LIBRARY_FILE, TYPED_CODE, is_library  # noqa: E402

LIBRARY = """
from cudakit.record import _frames

def number():
    return _frames.program_call()

def numbers(count=2):
    return {number() for _ in range(count)}

def numbers_around(callback):
    return {number(), (callback(), number())[1]}

def generated(count):
    for _ in range(count):
        yield number()

class Object:
    def __call__(self):
        return numbers()

    def __add__(self, other):
        return numbers()

async def awaited():
    return numbers()
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A library in a directory site-packages, which returns numbers of program calls."""
    if sys.version_info < (3, 12):
        pytest.skip("Python numbers program calls from 3.12 on")
    if not _frames.watch_program_calls(LIBRARY_FILE, TYPED_CODE):
        pytest.skip("other tools use all free tools of sys.monitoring")
    directory = tmp_path_factory.mktemp("environment") / "site-packages"
    directory.mkdir()
    (directory / "numbering.py").write_text(LIBRARY)
    sys.path.insert(0, str(directory))
    yield importlib.import_module("numbering")
    sys.path.remove(str(directory))


def test_work_of_one_call_has_one_number(library: Any) -> None:
    (first,) = library.numbers()
    (second,) = library.numbers()

    assert 0 < first < second


def test_calls_of_one_line_have_different_numbers(library: Any) -> None:
    assert len({library.number(), library.number(), library.number()}) == 3
    assert len({library.number() for _ in range(3)}) == 3


def test_each_iteration_of_a_loop_is_another_call(library: Any) -> None:
    numbers = []
    for _ in range(3):
        try:
            numbers.append(library.number())
            raise ValueError
        except ValueError:
            continue
    while len(numbers) < 6:
        numbers.append(library.number())

    assert len(set(numbers)) == 6


def test_function_that_is_called_again_has_another_number(library: Any) -> None:
    def helper() -> int:
        return int(library.number())

    def recursive(depth: int) -> list[int]:
        return [library.number(), *(recursive(depth - 1) if depth else ())]

    assert len({helper(), helper(), *map(partial(call, helper), range(3))}) == 5
    assert len({*recursive(3), *recursive(3)}) == 8


def call(function: Callable[[], int], _: object) -> int:
    return function()


def test_callback_of_the_program_does_not_end_the_call(library: Any) -> None:
    numbers_in_callback: list[int] = []

    around = library.numbers_around(lambda: numbers_in_callback.append(library.number()))

    assert len(around) == 1
    assert not around & set(numbers_in_callback)


def test_operators_and_objects_are_calls(library: Any) -> None:
    thing = library.Object()

    numbers = [thing(), thing + thing, thing + thing]

    assert [len(each) for each in numbers] == [1, 1, 1]
    assert len(set.union(*numbers)) == 3


def test_generator_of_a_library_runs_in_the_call_that_resumes_it(library: Any) -> None:
    assert len({number for number in library.generated(3)}) == 3  # noqa: C416 a loop of the program
    assert len(set(list(library.generated(3)))) == 1  # noqa: C414 one call of list


def test_generator_of_the_program_makes_a_call_in_each_resumption(library: Any) -> None:
    def generator() -> Iterator[int]:
        yield library.number()
        yield library.number()

    assert len({*generator(), *generator()}) == 4


def test_calls_through_c_are_distinguished_by_their_arguments(library: Any) -> None:
    first, second = map(library.numbers, (2, 3))

    assert len(first) == len(second) == 1
    assert first != second


def test_coroutine_of_a_library_runs_in_the_call_that_awaits_it(library: Any) -> None:
    async def twice() -> list[set[int]]:
        return [await library.awaited() for _ in range(2)]

    first, second = asyncio.run(twice())

    assert len(first) == len(second) == 1
    assert first != second


def test_frame_is_known_after_many_other_frames(library: Any) -> None:
    def other_frames() -> Iterator[int]:
        yield 1

    generators = [other_frames() for _ in range(4_000)]  # frames at different addresses
    assert sum(map(next, generators)) == 4_000

    first, second = library.numbers(), library.numbers()
    assert 0 not in first | second
    assert first != second


def test_thread_without_frames_of_the_program_has_no_number(library: Any) -> None:
    numbers: list[set[int]] = []
    work = threading.Thread(target=library.numbers_around, args=(partial(numbers.append, set()),))
    work.start()
    work.join()
    in_function = threading.Thread(target=lambda: numbers.append(library.numbers()))
    in_function.start()
    in_function.join()

    assert numbers[0] == set()
    assert len(numbers[1]) == 1
    assert 0 not in numbers[1]


@pytest.mark.parametrize("path", [*PROGRAM_FILES, *LIBRARY_FILES])
def test_program_files_are_those_of_stacks(library: Any, path: str) -> None:
    namespace: dict[str, Any] = {"number": library.number}

    exec(compile("numbers = {number(), number()}", path, "exec"), namespace)  # noqa: S102 of this test

    # Two calls in the program's own code; in a library, they belong to the call of exec.
    assert len(namespace["numbers"]) == (2 if not is_library(path) else 1)
