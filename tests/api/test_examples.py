"""The examples of the public functions run."""

from __future__ import annotations

import doctest
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import cudakit

# Marks a documentation example that needs a device.
SKIPPED = "# doctest: +SKIP"
MODULES = ("cudakit.api", "cudakit.api.profiler", "cudakit.gpu.cuda.current", "cudakit.gpu.nvtx")


def shown() -> Iterator[Any]:
    public = [getattr(cudakit, name) for name in cudakit.__all__ if name != "__version__"]
    for value in (*public, cudakit.profiler.start, cudakit.profiler.stop):
        text = getattr(value, "__doc__", None) or ""
        if ">>>" in text and getattr(value, "__module__", "") in MODULES:
            marks = [pytest.mark.gpu] if SKIPPED in text else []
            yield pytest.param(value, marks=marks, id=value.__name__)


@pytest.mark.parametrize("function", list(shown()))
def test_an_example_answers_what_it_shows(function: Callable[..., object]) -> None:
    text = (function.__doc__ or "").replace(SKIPPED, "")
    examples = doctest.DocTestParser().get_doctest(
        text, {"cudakit": cudakit}, function.__name__, None, None
    )
    said: list[str] = []

    # In a thread of its own: what an example makes current stays so.
    with ThreadPoolExecutor(1) as pool:
        results = pool.submit(doctest.DocTestRunner().run, examples, out=said.append).result()

    assert results.attempted >= (2 if ">>> import cudakit" in text else 1)
    assert results.failed == 0, "".join(said)
