from __future__ import annotations

from pathlib import Path

import numpy as np
import race_logs

from cudakit.trace.events import Event, Fill
from cudakit.trace.spool import Batch
from cudakit.trace.trace_file import pack


def fills(*calls: int) -> np.ndarray:
    return pack([Event(Fill(1, 0x1000, 16), seq=seq) for seq in calls], lambda _: 0)


def test_saved_batches_of_a_trace_are_read_as_one_batch(tmp_path: Path) -> None:
    batches = [
        Batch(7, fills(1, 2), [""], [()]),
        Batch(7, fills(1), [""], [()], trace_number=1),
        Batch(7, fills(3), [""], [()]),
    ]
    race_logs.save(tmp_path / "program.log", batches)

    first, second = race_logs.load(tmp_path / "program.log")
    assert (first.process, first.trace_number, first.records["seq"].tolist()) == (7, 0, [1, 2, 3])
    assert (second.trace_number, second.records["seq"].tolist()) == (1, [1])
