"""The peak of each step: a chart, a table, and the growth by call site."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cudakit.memory.analyze.step_peaks import evenly_spaced
from cudakit.memory.present.rows import (
    limited_table,
    stack_value,
    step_definition,
    table,
)
from cudakit.memory.result import DeviceMemory
from cudakit.report.document import Bytes, Change, Chart, Count, Node, Series, Text
from cudakit.units import capitalized, format_count


def step_peaks(device: DeviceMemory, top: int) -> Iterator[Node]:
    """Show the peaks of the steps, and the memory that grew between the first and the last step."""
    peaks = device.steps.peaks
    first_peak_bytes = peaks[0].requested_bytes
    yield Chart(
        title="Requested memory of each step",
        x=np.array([peak.step for peak in peaks], np.float64),
        series=(
            Series("peak", np.array([peak.requested_bytes for peak in peaks], np.int64)),
            Series("at the start", np.array([peak.start_bytes for peak in peaks], np.int64)),
        ),
        x_label="step",
        x_end=peaks[-1].step + 1,
    )
    listed_peaks = (
        peaks if top == 0 else [peaks[index] for index in evenly_spaced(len(peaks), max(top, 2))]
    )
    omitted_count = len(peaks) - len(listed_peaks)
    step_noun = "step" if omitted_count == 1 else "steps"
    yield table(
        (
            ("step", "number", lambda peak: Count(peak.step)),
            ("peak", "number", lambda peak: Bytes(peak.requested_bytes)),
            ("change", "number", lambda peak: Change(peak.requested_bytes - first_peak_bytes)),
            ("at the start", "number", lambda peak: Bytes(peak.start_bytes)),
            ("reserved", "number", lambda peak: Bytes(peak.reserved_bytes)),
            (
                "event of the peak",
                "number",
                lambda peak: Count(peak.peak_event) if peak.peak_event >= 0 else Text("-"),
            ),
        ),
        listed_peaks,
        (
            f"{format_count(omitted_count)} more {step_noun}: --top 0 shows all. "
            if omitted_count
            else ""
        )
        + "Reserved: the most within the step; all other sizes are requested memory. Change: of the peak,"
        f" since the first step. {capitalized(step_definition(device))}; the table counts steps from 0."
        + (' Event "-": before the first event.' if peaks[0].peak_event < 0 else ""),
    )
    if device.steps.site_growth:
        yield limited_table(
            (
                ("change", "number", lambda row: Change(row.change_bytes)),
                ("first step", "number", lambda row: Bytes(row.before_bytes)),
                ("last step", "number", lambda row: Bytes(row.after_bytes)),
                ("blocks", "number", lambda row: Count(row.after_count)),
                ("call stack", "stack", lambda row: stack_value(row.stack, row.site)),
            ),
            device.steps.site_growth,
            top,
            caption="Requested memory at the peak of the first and of the last"
            " step. Blocks: at the peak of the last step.",
        )
