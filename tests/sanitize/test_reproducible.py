"""A report does not depend on addresses, thread numbers and PIDs, because they differ between runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cudakit.report import console
from cudakit.sanitize.detector import RaceDetector
from cudakit.sanitize.findings import RaceCollector
from cudakit.sanitize.report import report as present
from cudakit.trace.kinds import EventKind
from cudakit.trace.run_log import LogReader
from cudakit.trace.spool import Batch
from cudakit.trace.trace_file import Records, layout

LOGS = Path(__file__).parents[1] / "sanitize_corpus/logs"
ADDRESSES = {
    EventKind.ALLOC: ("address",),
    EventKind.FREE: ("address",),
    EventKind.ACCESS: ("lo", "hi"),
    EventKind.COPY: ("destination", "source"),
    EventKind.FILL: ("address",),
    EventKind.MEMOP: ("address",),
}


def batches(log: str) -> list[Batch]:
    with LogReader(LOGS / f"{log}.npz") as reader:
        return list(reader.batches())


def renumbered_batch(batch: Batch) -> Batch:
    """Return the batch with another PID, and with other addresses and thread numbers."""
    records: Records = batch.records.copy()
    records["thread"] += 1000
    for kind, names in ADDRESSES.items():
        is_kind = records["kind"] == kind
        fields = records.view(layout(kind))
        for name in names:
            fields[name][is_kind] += 1 << 33
    return replace(batch, records=records, process=batch.process + 1)


def text(*batches_of_log: Batch) -> str:
    report, detector = RaceCollector(), RaceDetector()
    for batch in batches_of_log:
        detector.feed(batch, report)
    detector.finish(report)
    return console.render(present(detector.result(report)), width=100, color=False)


@pytest.mark.parametrize(
    "log",
    [
        "cupy_per_thread_stream_race",
        "cupy_columns_race",
        "cupy_async_pool_race",
        "torch_graph_branches_race",
        "torch_foreach_race",
        "torch_record_stream_race",
    ],
)
def test_report_contains_nothing_that_differs_between_runs(log: str) -> None:
    batches_of_log = batches(log)

    first, second = text(*batches_of_log), text(*map(renumbered_batch, batches_of_log))

    assert "race" in first.splitlines()[0]
    assert first == second
