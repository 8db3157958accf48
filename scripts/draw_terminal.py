"""Draw the terminal output of commands as an SVG image: the picture at the top of README.

    python scripts/draw_terminal.py docs/images/terminal.svg

The commands run in the root of the repository and need no GPU. Colours and line breaks are those of a
terminal with 100 columns.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parent.parent
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


def draw() -> str:
    """Return the SVG of all COMMANDS, one below the other."""
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


if __name__ == "__main__":
    image = Path(sys.argv[1])
    image.parent.mkdir(parents=True, exist_ok=True)
    image.write_text(draw(), encoding="utf-8")
