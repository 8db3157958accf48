"""Charts: curves and points as a picture, bars and matrices as tables."""

from __future__ import annotations

from rich.text import Text

from cudakit.document import Chart
from cudakit.render.console import theme
from cudakit.render.console.escape import escaped
from cudakit.render.console.figures import as_table
from cudakit.render.console.plot import plot_lines
from cudakit.render.console.table import table_lines
from cudakit.render.console.wrap import wrapped


def chart_lines(chart: Chart, width: int) -> list[Text]:
    """Draw a chart under its title; one without data says so."""
    title = escaped(chart.title)
    lines = [Text(line, theme.HEADER) for line in wrapped(title, width)] if title else []
    if len(chart.x) == 0 or not chart.series:
        return [*lines, Text("(no data)", theme.FAINT)]
    if chart.kind in ("bar", "matrix"):
        return lines + table_lines(as_table(chart), width)
    return lines + plot_lines(chart, width)
