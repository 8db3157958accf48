"""Draw the pictures of the memory page in the documentation, from the snapshots in examples/memory.

    python scripts/draw_page.py

Writes docs/images/memory-page-light.png and memory-page-dark.png. Needs Chromium.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
SIZE = {"width": 1280, "height": 1400}


def draw(browser: Browser, example: str, tab: str, scheme: Literal["light", "dark"]) -> None:
    """Draw the page of an example with a tab open."""
    with tempfile.TemporaryDirectory() as folder:
        page_file = Path(folder) / "page.html"
        snapshot = f"examples/memory/{example}.pkl.gz"
        command = [
            sys.executable,
            "-P",
            "-m",
            "cudakit",
            "memviz",
            snapshot,
            "-q",
            "-o",
            str(page_file),
        ]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        page = browser.new_page(viewport=SIZE, color_scheme=scheme)
        page.goto(page_file.as_uri() + f"#tab={tab}")
        page.wait_for_selector('.explorer[data-ready="true"]')
        page.screenshot(path=ROOT / "docs" / "images" / f"memory-page-{scheme}.png")
        page.close()


def main() -> None:
    """Draw both pictures."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        draw(browser, "kv_cache", "map", "light")
        draw(browser, "varying_lengths", "layout", "dark")
        browser.close()


if __name__ == "__main__":
    main()
