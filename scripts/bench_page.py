"""Measure the memory page in Chromium: size, first paint, time per frame, time of a query, and memory.

    python scripts/bench_page.py [SNAPSHOT.pkl]

Without a file, scripts/make_snapshots.py makes a snapshot of 1.1 million events with thousands of call
stacks. The Python side is compared with a bare pickle.load, as in scripts/bench_memviz.py. Frames are
measured while the script moves the cursor, zooms and pans; the times are those of the scripts of the page,
without compositing. Each motion is repeated, and the lowest percentile counts, because other programs may
use the machine.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import bench_memviz
from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
EVENTS = 1_100_000
RUNS = 3

OBSERVE_TASKS = """
window.tasks = [];
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) tasks.push([entry.startTime, entry.duration]);
}).observe({ entryTypes: ["longtask"] });
"""

# Returns the 95th percentile, in milliseconds, of the frames of each tab and motion.
_FRAMES = """
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


def main() -> None:
    """Print each measured figure with its limit."""
    with tempfile.TemporaryDirectory() as folder:
        snapshot = Path(sys.argv[1]) if len(sys.argv) > 1 else make_snapshot(Path(folder))
        html = Path(folder) / "page.html"
        command = [*bench_memviz.CUDAKIT, "memviz", str(snapshot), "-q", "-f", "-o", str(html)]
        load_seconds, page_seconds = [], []
        for _ in range(RUNS):
            load_seconds.append(bench_memviz.time_pickle_load(str(snapshot)).seconds)
            page_seconds.append(bench_memviz.run(command)[0].seconds)
        load, page = statistics.median(load_seconds), statistics.median(page_seconds)
        show("Python side, times pickle.load", page / load, 5, f"({page:.2f} s, {load:.2f} s)")
        show("file, MB", html.stat().st_size / 1e6, 10)
        measure_page(html)


def make_snapshot(folder: Path) -> Path:
    """Write a snapshot of 1.1 million events with thousands of call stacks, and return its path."""
    script = str(ROOT / "scripts" / "make_snapshots.py")
    subprocess.run(
        [sys.executable, script, str(folder), str(EVENTS)], check=True, stdout=subprocess.DEVNULL
    )
    return folder / "many_stacks.pkl"


def measure_page(html: Path) -> None:
    """Open the page and print the figures that the browser measures."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--no-sandbox", "--enable-precise-memory-info"],
        )
        page = browser.new_page(viewport={"width": 1400, "height": 1200})
        page.add_init_script(OBSERVE_TASKS)
        page.goto(html.as_uri())
        page.wait_for_selector('.explorer[data-ready="true"]', timeout=60_000)
        report(page)
        browser.close()


def report(page: Page) -> None:
    """Print the figures of a loaded page."""
    paint = page.evaluate("() => performance.getEntriesByType('paint').at(-1).startTime")
    show("first paint, s", paint / 1e3, 1.5)
    loaded = page.evaluate("() => performance.now()")
    show("all views ready, s", loaded / 1e3, None)
    free = "() => document.querySelector('.explorer').explorer.model.free.ready.then(() => performance.now())"
    show("fragmentation ready, s", page.evaluate(free) / 1e3, None)
    for name, milliseconds in page.evaluate(_FRAMES).items():
        # The limit is for zooming and panning.
        limit = None if name.endswith("cursor") else 16
        show(f"script per frame, p95, ms: {name}", milliseconds, limit)
    show("state after an event, p95, ms", page.evaluate(_STATE_QUERY), 10)
    show("heap, MB", page.evaluate("() => performance.memory.usedJSHeapSize / 1e6"), 300)
    longest = page.evaluate(
        "loaded => Math.max(0, ...tasks.filter(t => t[0] > loaded).map(t => t[1]))", loaded
    )
    show("longest task after load, ms", longest, 200)


def show(name: str, value: float, limit: float | None, remark: str = "") -> None:
    """Print a figure and its limit."""
    bound = "" if limit is None else f"limit {limit:g}"
    mark = "" if limit is None else "ok" if value <= limit else "ABOVE"
    print(f"{name:44} {value:9.2f}  {bound:12} {mark} {remark}".rstrip())


if __name__ == "__main__":
    main()
