"""Styles with the sixteen colors of the terminal; color is never the only difference."""

from __future__ import annotations

from typing import Final

TITLE: Final = "bold"
HEADING: Final = "bold cyan"
HEADER: Final = "bold"
TOTAL: Final = "bold"
FAINT: Final = "dim"
PLAIN: Final = ""
BAR: Final = "cyan"

OK: Final = "green"
INFO: Final = "cyan"
WARN: Final = "yellow"
ERROR: Final = "bold red"

LEVELS: Final = {"ok": OK, "info": INFO, "warn": WARN, "error": ERROR}
SERIES: Final = ("cyan", "magenta", "yellow")
