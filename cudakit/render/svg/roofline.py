"""The roofline: operations per byte against operations per second, under what bounds both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np

from cudakit.document import Array, Chart, Columns
from cudakit.render.markup import Markup, element
from cudakit.render.svg.places import dots, outline, places
from cudakit.render.svg.plot import LegendItem, figure, series_class, stretched
from cudakit.render.svg.scale import Axis, log_axis

_WIDTH, _HEIGHT = 2400, 1000
# The picture reaches so much beyond cases and ridges.
_MARGIN = 3.0


def roofline(columns: Columns) -> Markup:
    """Draw a dot for each case of ``roofline``, and the roof that it stays under (Williams et al., 2009).

    The arrays are ``case`` (decoded by ``text``), ``operations_per_byte``, ``operations_per_s``,
    ``peak_operations_per_s`` and ``peak_bytes_per_s``, all positive.
    """
    arrays = columns.arrays
    at, reached = arrays["operations_per_byte"], arrays["operations_per_s"]
    peaks = np.stack((arrays["peak_operations_per_s"], arrays["peak_bytes_per_s"]), axis=1)
    ridges = peaks[:, 0] / peaks[:, 1]
    x = _axis(np.concatenate((at, ridges)), "count")
    roofs = np.minimum(peaks[:, 0], peaks[:, 1] * x.low)
    y = _axis(np.concatenate((reached, peaks[:, 0], roofs)), "rate", above=1.5, below=1.5)
    names = columns.text["case"]
    drawing = [
        *(_roof(peak, x, y) for peak in np.unique(peaks, axis=0)),
        *_cases(at, reached, x, y),
    ]
    title = "Operations per second under the roof"
    return figure(
        Chart("scatter", title, at, (), x_label="operations per byte"),
        stretched(drawing, width=_WIDTH, height=_HEIGHT),
        x=x,
        y=y,
        legend=[LegendItem(name) for name in names],
        description=f"{title}: {', '.join(names[:8])}",
    )


def _axis(
    values: Array, unit: Literal["count", "rate"], *, below: float = _MARGIN, above: float = _MARGIN
) -> Axis:
    return log_axis(float(values.min()) / below, float(values.max()) * above, unit)


def _roof(peak: Array, x: Axis, y: Axis) -> Markup:
    """Draw bandwidth times operations per byte, and from where they meet on peak arithmetic."""
    per_s, bytes_per_s = (float(amount) for amount in peak)
    corners = np.array([x.low, per_s / bytes_per_s, x.high])
    heights = np.minimum(corners * bytes_per_s, per_s)
    path = outline(places(x.shares(corners), _WIDTH), places(1 - y.shares(heights), _HEIGHT))
    return element("path", class_="line roof", d=path)


def _cases(at: Array, reached: Array, x: Axis, y: Axis) -> Iterator[Markup]:
    across, down = places(x.shares(at), _WIDTH), places(1 - y.shares(reached), _HEIGHT)
    for i, place in enumerate(zip(across, down, strict=True)):
        yield element(
            "path", class_=f"scatter case {series_class(i)}", d=dots(*([one] for one in place))
        )
