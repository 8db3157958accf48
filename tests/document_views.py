"""The ``draw`` function of Views in tests of formats that show the fallback."""

from __future__ import annotations

from collections.abc import Sequence

from cudakit.report.document import Columns
from cudakit.report.picture import NoData


def no_picture(_: Sequence[Columns]) -> NoData:
    """Draw nothing."""
    return NoData("no picture")
