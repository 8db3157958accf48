"""Draw the pictures of the documentation: the terminal output in README, and the interactive pages.

    python scripts/draw_pictures.py [NAME]...

Writes docs/images/terminal.svg, memory-page-light.png, memory-page-dark.png and profile-page-light.png from
commands and recordings, without a GPU. The pages need Chromium.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
COLUMNS = 100
# Each command, and the number of output lines that the picture shows.
COMMANDS = (
    ("cudakit run --sanitize examples/races/sim_copies_race.py", 12),
    ("cudakit memviz examples/memory/retained_graph.pkl.gz", 9),
)
# The fonts that rich links. The picture must load nothing; viewers then use their default monospace font.
_WEB_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def run(command: str) -> Text:
    """Return the coloured output of a cudakit command, including standard error."""
    process = subprocess.run(
        [sys.executable, "-m", *command.split()],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": str(COLUMNS), "FORCE_COLOR": "1", "PYTHONUTF8": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,  # If there are races, the exit code is 1.
    )
    return Text.from_ansi(process.stdout)


def draw_terminal() -> str:
    """Return the SVG of all COMMANDS, with the colours and line breaks of a terminal, one below the other."""
    console = Console(
        record=True,
        width=COLUMNS,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
    )
    for index, (command, line_count) in enumerate(COMMANDS):
        if index:
            console.print()
        console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
        lines = run(command).split("\n")
        for line in lines[:line_count]:
            console.print(line)
        if len(lines) > line_count:
            console.print(Text("…", style="dim"))
    svg = console.export_svg(title="cudakit", unique_id="cudakit")
    return _WEB_FONTS.sub("", svg)


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


def draw_page(browser: Browser, picture: Picture) -> None:
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
        page.screenshot(path=IMAGES / f"{picture.name}.png")
        page.close()


def main() -> None:
    """Draw the pictures whose names are given, or all of them."""
    names = sys.argv[1:] or ["terminal", *(picture.name for picture in PICTURES)]
    if "terminal" in names:
        (IMAGES / "terminal.svg").write_text(draw_terminal(), encoding="utf-8")
    pages = [picture for picture in PICTURES if picture.name in names]
    if pages:
        from playwright.sync_api import sync_playwright

        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox"]
            )
            for picture in pages:
                draw_page(browser, picture)
            browser.close()


if __name__ == "__main__":
    main()
