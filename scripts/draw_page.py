"""Draw the pictures of the memory page and the profile page in the documentation, from recordings.

    python scripts/draw_page.py [NAME]...

Writes docs/images/memory-page-light.png, memory-page-dark.png and profile-page-light.png. Needs Chromium.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Picture:
    """A picture of the interactive page of a recording."""

    name: str
    command: str  # command of cudakit that writes the page
    recording: str  # file in examples
    state: str  # state of the page, in the hash of its address
    scheme: Literal["light", "dark"] = "light"
    height: int = 1400


# Two steps of the profile are visible, and a window as long as a step is selected.
_TWO_STEPS = "view=4600000000-4609500000&window=4601500000-4605300000&by=line"
PICTURES = (
    Picture("memory-page-light", "memviz", "memory/kv_cache.pkl.gz", "tab=map"),
    Picture(
        "memory-page-dark", "memviz", "memory/varying_lengths.pkl.gz", "tab=layout", scheme="dark"
    ),
    Picture("profile-page-light", "profile", "profile/ddp.plog", _TWO_STEPS, height=1620),
)


def draw(browser: Browser, picture: Picture) -> None:
    """Write the page of a recording, open it and take a screenshot."""
    with tempfile.TemporaryDirectory() as folder:
        page_file = Path(folder) / "page.html"
        recording = f"examples/{picture.recording}"
        command = ["-P", "-m", "cudakit", picture.command, recording, "-q", "-o", str(page_file)]
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        size = {"width": 1280, "height": picture.height}
        page = browser.new_page(viewport=size, color_scheme=picture.scheme)
        page.goto(f"{page_file.as_uri()}#{picture.state}")
        page.wait_for_selector('.explorer[data-ready="true"]')
        page.screenshot(path=ROOT / "docs" / "images" / f"{picture.name}.png")
        page.close()


def main() -> None:
    """Draw the pictures whose names are given, or all of them."""
    names = sys.argv[1:]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for picture in PICTURES:
            if not names or picture.name in names:
                draw(browser, picture)
        browser.close()


if __name__ == "__main__":
    main()
