from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

import cudakit
from cudakit.errors import UsageError
from cudakit.gpu.nvtx import Range


class Listener:
    """An NVTX domain that records its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def push_range(self, attributes: str) -> None:
        self.calls.append(f"push {attributes}")

    def pop_range(self) -> None:
        self.calls.append("pop")

    def mark(self, attributes: str) -> None:
        self.calls.append(f"mark {attributes}")

    def get_event_attributes(self, *attributes: object) -> str:
        return str(attributes)


def test_range_covers_block() -> None:
    listener = Listener()

    with Range(listener, "block"):
        listener.mark("within")

    assert listener.calls == ["push block", "mark within", "pop"]


def test_range_ends_on_exception_and_propagates_it() -> None:
    listener = Listener()

    with pytest.raises(ZeroDivisionError), Range(listener, "block"):
        _ = 1 // 0

    assert listener.calls == ["push block", "pop"]


def test_range_is_reentrant() -> None:
    listener = Listener()
    recursive_range = Range(listener, "again")

    with recursive_range, recursive_range:
        pass

    assert listener.calls == ["push again", "push again", "pop", "pop"]


def test_decorated_function_pushes_range_at_every_call() -> None:
    listener = Listener()

    @Range(listener, "step")
    def step(number: int, *, factor: int = 2) -> int:
        """Multiply."""
        return number * factor

    assert (step(1), step(2, factor=5)) == (2, 10)
    assert listener.calls == ["push step", "pop"] * 2
    assert (step.__name__, step.__doc__) == ("step", "Multiply.")


def coroutine() -> Callable[..., object]:
    async def suspended() -> None:
        await asyncio.sleep(0)

    return suspended


def generator() -> Callable[..., object]:
    def suspended() -> Iterator[int]:
        yield 1

    return suspended


def asynchronous_generator() -> Callable[..., object]:
    async def suspended() -> AsyncIterator[int]:
        yield 1

    return suspended


@pytest.mark.parametrize("kind", [coroutine, generator, asynchronous_generator])
@pytest.mark.parametrize("calls", [True, False])
def test_generator_and_coroutine_functions_cannot_be_decorated(
    kind: Callable[[], Callable[..., object]], *, calls: bool
) -> None:
    decorator = Range(Listener(), "late") if calls else cudakit.range("late")

    with pytest.raises(UsageError, match="suspended is a coroutine or generator"):
        decorator(kind())


WITHOUT_PROFILER = """
import cudakit

def step(): ...

assert cudakit.range("one") is cudakit.range("two", domain="other", color="red", payload=1)
assert cudakit.range("step")(step) is step
with cudakit.range("block"):
    cudakit.mark("moment")
    cudakit.push_range("pushed", category="work")
    cudakit.pop_range()
"""


def test_ranges_have_no_effect_without_profiler() -> None:
    # A process of its own, because another test may have started the recorder in this one.
    completed = subprocess.run(
        [sys.executable, "-P", "-c", WITHOUT_PROFILER],
        env={name: os.environ[name] for name in os.environ if name != "NVTX_INJECTION64_PATH"},
        check=False,
        capture_output=True,
        text=True,
    )

    assert (completed.returncode, completed.stderr) == (0, "")


ANNOTATED = """
import cudakit

@cudakit.range("step", color="green", category="work")
def step():
    cudakit.mark("moment", payload=7)

with cudakit.range("outer", payload=3):
    step()
    cudakit.push_range("inner", domain="mine")
    cudakit.pop_range(domain="mine")
"""

EXPECTED_OUTPUT = """\
push cudakit outer 3
push cudakit step
mark cudakit moment 7
pop cudakit
push mine inner
pop mine
pop cudakit
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_attached_profiler_receives_ranges_and_marks(tmp_path: Path) -> None:
    library = tmp_path / "listener.so"
    source = Path(__file__).with_name("listener.c")
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", library, source],  # noqa: S607 where it was found
        check=True,
    )
    result = subprocess.run(
        [sys.executable, "-P", "-c", ANNOTATED],
        env=os.environ | {"NVTX_INJECTION64_PATH": str(library)},
        check=True,
        capture_output=True,
        text=True,
    )

    assert result.stdout == EXPECTED_OUTPUT
