"""Measure the memory page and the profile page in Chromium: size, first paint, time per frame, and memory.

    python scripts/bench_page.py memory [SNAPSHOT.pkl]
    python scripts/bench_page.py profile [KERNELS]

Without a file, scripts/make_snapshots.py makes a snapshot of 1.1 million events with thousands of call
stacks. The Python side is compared with a bare pickle.load, as in scripts/bench_memviz.py. The profile is a
random training program of three streams on two devices, with an API call for each of a million kernels; its
other exports are timed, too.

Frames are measured while the script moves the cursor, zooms, pans and selects; the times are those of the
scripts of the page, without compositing. Motions of the memory page are repeated, and the lowest percentile
counts, because other programs may use the machine.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import bench_memviz
from playwright.sync_api import Page, sync_playwright

from cudakit.profile import exports
from cudakit.profile.report.page import explorer
from cudakit.report import chrome, csv, flame, html, perfetto
from cudakit.report.document import Document

ROOT = Path(__file__).resolve().parent.parent
EVENTS = 1_100_000
KERNELS = 1_000_000
RUNS = 3
MAX_FRAME_MS = 16  # limit of the script of a frame while the page is zoomed or moved

OBSERVE_TASKS = """
window.tasks = [];
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) tasks.push([entry.startTime, entry.duration]);
}).observe({ entryTypes: ["longtask"] });
"""

# Returns the 95th percentile, in milliseconds, of the frames of each tab and motion.
_MEMORY_FRAMES = """
async () => {
  const app = document.querySelector(".explorer").explorer;
  const frame = () => new Promise((resolve) => requestAnimationFrame(resolve));
  const percentiles = {};
  const measure = async (name, move, prepare) => {
    percentiles[name] = Infinity;
    for (let repeat = 0; repeat < 3; repeat++) {
      prepare();
      await frame();
      const times = [];
      for (let i = 0; i < 60; i++) {
        move(i);
        const start = performance.now();
        app.redraw();
        times.push(performance.now() - start);
        await frame();
      }
      times.sort((a, b) => a - b);
      percentiles[name] = Math.min(percentiles[name], times[57]);
    }
  };
  for (const tab of ["map", "layout", "flame", "holders", "events", "map by time"]) {
    const axis = tab.endsWith("by time") ? "time" : "event";
    app.state.set({ tab: tab.split(" ")[0], axis, view: null });
    await frame();
    await frame();
    const cursor = (i) => Math.floor((app.model.events * (i + 1)) / 61);
    const showAll = () => app.showAll();
    await measure(`${tab} cursor`, (i) => app.state.set({ cursor: cursor(i) }), showAll);
    await measure(`${tab} zoom`, (i) => app.zoom(app.axis.last * 0.6, i < 30 ? 0.8 : 1.25), showAll);
    const showPart = () => app.show(app.axis.last * 0.1, app.axis.last * 0.3);
    await measure(`${tab} pan`, () => app.pan(0.02), showPart);
  }
  return percentiles;
}
"""

# Returns the 95th percentile of the time to compute the state after an event, in milliseconds.
_STATE_QUERY = """
() => {
  const { model, grouping } = document.querySelector(".explorer").explorer;
  const times = [];
  for (let i = 0; i < 200; i++) {
    const event = Math.floor((model.events * i) / 200);
    const start = performance.now();
    model.totalsAt(event);
    model.groupsAt(event, grouping, null);
    times.push(performance.now() - start);
  }
  return times.sort((a, b) => a - b)[190];
}
"""

# Returns the 95th percentile, in milliseconds, of the frames of each motion, with each tab open.
_PROFILE_FRAMES = """
async () => {
  const app = document.querySelector(".explorer").explorer;
  const frame = () => new Promise((resolve) => requestAnimationFrame(resolve));
  const percentiles = {};
  const measure = async (name, move) => {
    const times = [];
    for (let i = 0; i < 60; i++) {
      move(i);
      const start = performance.now();
      app.redraw();
      times.push(performance.now() - start);
      await frame();
    }
    times.sort((a, b) => a - b);
    percentiles[name] = times[57];
  };
  const { duration } = app.model;
  for (const tab of ["flame", "kernels", "lines", "work"]) {
    app.state.set({ tab, window: null });
    app.showAll();
    await frame();
    await frame();
    await measure(`${tab} zoom`, (i) => app.zoom(duration * 0.6, i < 30 ? 0.7 : 1.4));
    app.show(duration * 0.1, duration * 0.3);
    await frame();
    await measure(`${tab} pan`, () => app.pan(0.02));
    const selected = (i) => [Math.round(duration * 0.1), Math.round(duration * (0.1 + 0.014 * (i + 1)))];
    await measure(`${tab} select`, (i) => app.state.set({ window: selected(i) }));
  }
  return percentiles;
}
"""

# Returns the 95th percentile of the time to sum all kernels of a window, in milliseconds.
_SUMS = """
() => {
  const { model } = document.querySelector(".explorer").explorer;
  const times = [];
  for (let i = 0; i < 100; i++) {
    const start = performance.now();
    model.sumsIn((model.duration * i) / 200, (model.duration * (i + 100)) / 200);
    times.push(performance.now() - start);
  }
  return times.sort((a, b) => a - b)[95];
}
"""


def main() -> None:
    """Print each measured figure with its limit."""
    kind, *arguments = sys.argv[1:] or ["memory"]
    with tempfile.TemporaryDirectory() as name:
        if kind == "memory":
            measure_memory(Path(name), *map(Path, arguments))
        else:
            measure_profile(Path(name), *map(int, arguments))


# --- the memory page -------------------------------------------------------------------------------


def measure_memory(folder: Path, snapshot: Path | None = None) -> None:
    """Print the figures of the page of a snapshot."""
    snapshot = snapshot or make_snapshot(folder)
    page = folder / "page.html"
    command = [*bench_memviz.CUDAKIT, "memviz", str(snapshot), "-q", "-f", "-o", str(page)]
    load_seconds, page_seconds = [], []
    for _ in range(RUNS):
        load_seconds.append(bench_memviz.time_pickle_load(str(snapshot)).seconds)
        page_seconds.append(bench_memviz.run(command)[0].seconds)
    load_s, page_s = statistics.median(load_seconds), statistics.median(page_seconds)
    show("Python side, times pickle.load", page_s / load_s, 5, f"({page_s:.2f} s, {load_s:.2f} s)")
    measure_page(page, report_memory)


def make_snapshot(folder: Path) -> Path:
    """Write a snapshot of 1.1 million events with thousands of call stacks, and return its path."""
    script = str(ROOT / "scripts" / "make_snapshots.py")
    subprocess.run(
        [sys.executable, script, str(folder), str(EVENTS)], check=True, stdout=subprocess.DEVNULL
    )
    return folder / "many_stacks.pkl"


def report_memory(page: Page) -> None:
    """Print the figures that only the memory page has."""
    free = "() => document.querySelector('.explorer').explorer.model.free.ready.then(() => performance.now())"
    show("fragmentation ready, s", page.evaluate(free) / 1e3, None)
    show_frames(page.evaluate(_MEMORY_FRAMES), without_limit="cursor")
    show("state after an event, p95, ms", page.evaluate(_STATE_QUERY), 10)


# --- the profile page ------------------------------------------------------------------------------


def measure_profile(folder: Path, kernels: int = KERNELS) -> None:
    """Print the figures of the page of a random program, and of its other exports."""
    sys.path.append(str(ROOT / "tests"))  # The random program belongs to the tests.
    from profile_recordings import training

    activities = training(kernels)
    page = folder / "page.html"
    document = Document("GPU profile", (explorer([activities]),))
    seconds = timed(lambda: page.write_text(html.render(document), encoding="utf-8"))
    show("write the page, s", seconds, None)
    measure_page(page, report_profile)
    writers: dict[str, Callable[[], Iterable[str | bytes]]] = {
        "trace.json": lambda: chrome.render(exports.trace_timeline([activities])),
        "trace.json.gz": lambda: chrome.render_compressed(exports.trace_timeline([activities])),
        "pftrace": lambda: perfetto.render(exports.trace_timeline([activities])),
        "speedscope.json": lambda: flame.speedscope(exports.flames([activities])),
        "collapsed": lambda: flame.collapsed(exports.flames([activities])),
        "csv": lambda: csv.render(exports.rows([activities])),
    }
    for suffix, write in writers.items():
        measure_export(suffix, write)


def timed(action: Callable[[], object]) -> float:
    """Return how many seconds an action takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def measure_export(suffix: str, write: Callable[[], Iterable[str | bytes]]) -> None:
    """Print the time and the size of an export."""
    size = 0

    def count_bytes() -> None:
        nonlocal size
        size = sum(len(piece if isinstance(piece, bytes) else piece.encode()) for piece in write())

    seconds = timed(count_bytes)
    show(f"write .{suffix}, s", seconds, None, f"({size / 1e6:.1f} MB)")


def report_profile(page: Page) -> None:
    """Print the figures that only the profile page has."""
    show_frames(page.evaluate(_PROFILE_FRAMES), without_limit="select")
    show("sums of a window, p95, ms", page.evaluate(_SUMS), 10)


# --- both pages ------------------------------------------------------------------------------------


def measure_page(path: Path, report: Callable[[Page], None]) -> None:
    """Open a page and print the figures that the browser measures; ``report`` prints those of this page."""
    show("file, MB", path.stat().st_size / 1e6, 10)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--no-sandbox", "--enable-precise-memory-info"],
        )
        page = browser.new_page(viewport={"width": 1400, "height": 1200})
        page.add_init_script(OBSERVE_TASKS)
        page.goto(path.as_uri())
        page.wait_for_selector('.explorer[data-ready="true"]', timeout=60_000)
        paint = page.evaluate("() => performance.getEntriesByType('paint').at(-1).startTime")
        show("first paint, s", paint / 1e3, 1.5)
        loaded = page.evaluate("() => performance.now()")
        show("all views ready, s", loaded / 1e3, None)
        report(page)
        show("heap, MB", page.evaluate("() => performance.memory.usedJSHeapSize / 1e6"), 300)
        longest = page.evaluate(
            "loaded => Math.max(0, ...tasks.filter(t => t[0] > loaded).map(t => t[1]))", loaded
        )
        show("longest task after load, ms", longest, 200)
        browser.close()


def show_frames(percentiles: dict[str, float], *, without_limit: str) -> None:
    """Print the time of the frames of each motion; motions of one name have no limit."""
    for name, milliseconds in percentiles.items():
        limit = None if name.endswith(without_limit) else MAX_FRAME_MS
        show(f"script per frame, p95, ms: {name}", milliseconds, limit)


def show(name: str, value: float, limit: float | None, remark: str = "") -> None:
    """Print a figure and its limit."""
    bound = "" if limit is None else f"limit {limit:g}"
    mark = "" if limit is None else "ok" if value <= limit else "ABOVE"
    print(f"{name:44} {value:9.2f}  {bound:12} {mark} {remark}".rstrip())


if __name__ == "__main__":
    main()
