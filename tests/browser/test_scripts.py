"""Tests of single script modules, which Chromium loads from their sources as ES modules."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, Route

import cudakit.memory.report
import cudakit.report
from cudakit.report.html.explorer import pack
from cudakit.units import format_bytes, format_count

FOLDERS = [
    Path(package.__file__ or "").parent / "assets"
    for package in (cudakit.report, cudakit.memory.report)
]
MODULES = sorted(path.stem for folder in FOLDERS for path in folder.glob("*.js"))


@pytest.fixture
def modules(browser: Browser) -> Iterator[Page]:
    """Yield an empty page that can import the script modules from ``/NAME.js``."""
    page = browser.new_page()
    page.route("http://modules/**", answer)
    page.goto("http://modules/")
    yield page
    page.close()


def answer(route: Route) -> None:
    """Answer a request for a module with its source, and other requests with an empty page."""
    name = route.request.url.rsplit("/", 1)[1]
    sources = [folder / name for folder in FOLDERS if name and (folder / name).is_file()]
    if sources:
        route.fulfill(body=sources[0].read_text(), content_type="text/javascript")
    else:
        route.fulfill(body="<!DOCTYPE html>", content_type="text/html")


def call(page: Page, module: str, code: str, argument: Any = None) -> Any:
    """Return the value of a JavaScript expression of ``m``, a module, and ``x``, the argument."""
    return page.evaluate(
        f"async x => {{ const m = await import('/{module}.js'); return {code}; }}", argument
    )


@pytest.mark.parametrize("name", MODULES)
def test_each_script_is_a_module_that_loads(modules: Page, name: str) -> None:
    errors: list[str] = []
    modules.on("pageerror", lambda error: errors.append(str(error)))
    assert call(modules, name, "typeof m") == "object"
    assert errors == []


def test_sizes_and_counts_read_as_in_the_terminal(modules: Page) -> None:
    rng = random.Random(0)
    sizes = [0, 1, 1023, 1024, *(rng.randrange(2 ** rng.randrange(1, 50)) for _ in range(500))]
    assert call(modules, "canvas", "x.map(m.formatBytes)", sizes) == list(map(format_bytes, sizes))
    assert call(modules, "canvas", "x.map(m.formatCount)", sizes) == list(map(format_count, sizes))


def test_packed_arrays_are_read_back(modules: Page) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "bytes": rng.integers(0, 256, 1000, dtype=np.uint8),
        "flags": rng.integers(0, 2, 10).astype(bool),
        "rising": np.cumsum(rng.integers(0, 5, 1000)),
        "signed": rng.integers(-(1 << 31), 1 << 31, 1000),
        "unsigned": rng.integers(0, 1 << 32, 1000),
        "large": rng.integers(0, 1 << 53, 1000),
        "large and signed": rng.integers(-(1 << 53), 1 << 53, 1000),
        "rising and large": np.cumsum(rng.integers(0, 1 << 40, 1000)),
        "empty": np.zeros(0, np.int64),
        "single": np.array([-7]),
    }
    read = call(
        modules,
        "arrays",
        "m.unpackArrays(...x).then(arrays => "
        "Object.fromEntries(Object.entries(arrays).map(([name, values]) => [name, [...values]])))",
        list(pack(arrays)),
    )
    assert read == {name: array.astype(np.int64).tolist() for name, array in arrays.items()}


def test_truncated_arrays_are_an_error(modules: Page) -> None:
    descriptions, text = pack({"numbers": np.arange(100)[::-1]})
    descriptions[0]["length"] += 1
    message = call(
        modules,
        "arrays",
        "m.unpackArrays(...x).catch(error => error.message)",
        [descriptions, text],
    )
    assert "bytes of data" in message


def test_readers_of_the_hash_reject_what_is_not_valid(modules: Page) -> None:
    numbers = ["5", "-1", "9", "10", "-2", "1e3", "", "5 ", "0x1", "99999999999999999999"]
    read = call(
        modules, "page_state", "x.map(m.numberReader(-1, 9)).map(v => v ?? 'invalid')", numbers
    )
    assert read == [5, -1, 9, *["invalid"] * 7]
    ranges = ["1-5", "-1-5", "5-1", "3-3", "1-50", "a-b", "1--5", "-1--0"]
    read = call(
        modules, "page_state", "x.map(m.rangeReader(-1, 9)).map(v => v ?? 'invalid')", ranges
    )
    assert read == [[1, 5], [-1, 5], *["invalid"] * 5, [-1, 0]]


def test_states_with_different_prefixes_share_the_hash(modules: Page) -> None:
    modules.evaluate("() => { location.hash = '#cursor=3&2.cursor=4&other=1'; }")
    hash_text = call(
        modules,
        "page_state",
        """(async () => {
          const readers = { cursor: m.numberReader(0, 9), text: (text) => text };
          const defaults = { cursor: 0, text: "" };
          const [first, second] = ["", "2."].map(prefix => new m.PageState(defaults, readers, prefix));
          const loaded = [first.get("cursor"), second.get("cursor")];
          second.set({ cursor: 5, text: "a&b=c" });
          second.notify();
          await new Promise(resolve => setTimeout(resolve, 300));
          return [loaded, location.hash];
        })()""",
    )
    assert hash_text == [[3, 4], "#cursor=3&other=1&2.cursor=5&2.text=a%26b%3Dc"]


def test_call_tree_adds_up_the_amounts_of_callees(modules: Page) -> None:
    tree = (
        "new m.CallTree([0, 0, 1, 1], [0, 0, 1, 2], [['a', 'x.py', 1], ['b', '', 0], ['c', '', 0]])"
    )
    assert call(modules, "flame", f"[...{tree}.totals([1, 2, 3, 4])]") == [10, 9, 3, 4]
    assert call(modules, "flame", f"{tree}.children(1, [10, 9, 3, 4])") == [3, 2]
    assert call(modules, "flame", f"{tree}.path(3)") == [2, 0]
    assert call(modules, "flame", f"{tree}.texts") == ["x.py:1 a", "b", "c"]


@pytest.mark.parametrize("kind", ["event", "time"])
def test_columns_of_an_axis_cover_every_event_once(modules: Page, kind: str) -> None:
    times = [0, 0, 5, 5, 5, 90, 91, 100]
    columns = call(
        modules,
        "memory_axis",
        f"""(() => {{
          const model = {{ events: x.length, arrays: {{ time_us: Float64Array.from(x) }} }};
          const axis = new m.Axis(model, "{kind}");
          const {{ from, to }} = axis.columns(axis.first, axis.last, 7);
          return [...from].map((first, column) => [first, to[column]]);
        }})()""",
        times,
    )
    assert columns[0][0] == -1
    assert columns[-1][1] == len(times) - 1
    # Each column starts with the state that the last one ended with, or with a newer one.
    for (_, last), (first, _) in pairwise(columns):
        assert last <= first <= last + 1


def test_axis_labels_have_as_many_digits_as_their_step_needs(modules: Page) -> None:
    labels = call(
        modules,
        "memory_axis",
        """(() => {
          const model = { events: 2, arrays: { time_us: Float64Array.from([0, 5e6]) } };
          const axis = new m.Axis(model, "time");
          return x.map(([value, step]) => axis.tickText(value, step));
        })()""",
        [[0, 1e6], [3.4e6, 2e5], [3_421_000, 1000], [20, 10], [1500, 500]],
    )
    assert labels == ["+0 s", "+3.4 s", "+3.421 s", "+20 us", "+1.5 ms"]
