"""Measure the profile page of a million kernels in Chromium, and the other exports.

    python scripts/bench_profile_page.py [KERNELS]

The profile is a random training program of three streams on two devices, with an API call for each kernel.
Frames are measured while the script zooms and pans; the times are those of the scripts of the
page, without compositing. The limits are those of the memory page (scripts/bench_page.py).
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench_page import OBSERVE_TASKS, show
from playwright.sync_api import Page, sync_playwright

from cudakit.core.profile.activities import Activities
from cudakit.core.profile.exports import WRITERS
from cudakit.core.profile.present.page import explorer
from cudakit.document import Document
from cudakit.render import html

ROOT = Path(__file__).resolve().parent.parent
KERNELS = 1_000_000

# Returns the 95th percentile, in milliseconds, of the frames of each motion, with each tab open.
_FRAMES = """
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
    kernels = int(sys.argv[1]) if len(sys.argv) > 1 else KERNELS
    sys.path.append(str(ROOT / "tests"))  # The random program belongs to the tests.
    from core.profile.recordings import training

    activities = training(kernels)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        document = Document("GPU profile", (explorer([activities]),))
        seconds = timed(lambda: page.write_text(html.render(document), encoding="utf-8"))
        show("write the page, s", seconds, None)
        show("file, MB", page.stat().st_size / 1e6, 10)
        measure_page(page)
    for suffix in WRITERS:
        measure_export(suffix, activities)


def timed(action: Callable[[], object]) -> float:
    """Return how many seconds an action takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def measure_export(suffix: str, activities: Activities) -> None:
    """Print the time and the size of an export."""
    file = _CountingFile()
    seconds = timed(lambda: WRITERS[suffix]([activities], file))
    show(f"write .{suffix}, s", seconds, None, f"({file.size / 1e6:.1f} MB)")


class _CountingFile(io.BytesIO):
    """A file that counts its bytes, and does not keep them."""

    size = 0

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self.size += len(data)
        return len(data)


def measure_page(path: Path) -> None:
    """Open the page and print the figures that the browser measures."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--no-sandbox", "--enable-precise-memory-info"],
        )
        page = browser.new_page(viewport={"width": 1400, "height": 1200})
        page.add_init_script(OBSERVE_TASKS)
        page.goto(path.as_uri())
        page.wait_for_selector('.explorer[data-ready="true"]', timeout=60_000)
        report(page)
        browser.close()


def report(page: Page) -> None:
    """Print the figures of a loaded page."""
    paint = page.evaluate("() => performance.getEntriesByType('paint').at(-1).startTime")
    show("first paint, s", paint / 1e3, 1.5)
    loaded = page.evaluate("() => performance.now()")
    show("all views ready, s", loaded / 1e3, None)
    for name, milliseconds in page.evaluate(_FRAMES).items():
        # The limit is for zooming and panning.
        limit = None if name.endswith("select") else 16
        show(f"script per frame, p95, ms: {name}", milliseconds, limit)
    show("sums of a window, p95, ms", page.evaluate(_SUMS), 10)
    show("heap, MB", page.evaluate("() => performance.memory.usedJSHeapSize / 1e6"), 300)
    longest = page.evaluate(
        "loaded => Math.max(0, ...tasks.filter(t => t[0] > loaded).map(t => t[1]))", loaded
    )
    show("longest task after load, ms", longest, 200)


if __name__ == "__main__":
    main()
