"""A damaged trace file gives a result or an error message, never an exception."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudakit.gpu.sim import Sim
from cudakit.report import console, json
from cudakit.sanitize.detector import RaceDetector
from cudakit.sanitize.findings import RaceCollector
from cudakit.sanitize.report import report
from cudakit.trace.spool import Spool, SpoolWriter
from cudakit.trace.trace_file import Clock


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the trace of a program with copies, fills, events, a graph, and a race."""
    directory = tmp_path_factory.mktemp("trace")
    writer = SpoolWriter(directory, clock=Clock.VIRTUAL)
    gpu = Sim(sink=writer.write)
    first, second = gpu.stream(), gpu.stream()
    memory, host = gpu.malloc(4096), gpu.host_malloc(4096)
    event = gpu.event(timing=False)
    gpu.copy(memory, host, 4096, first)
    gpu.record(event, first)
    gpu.fill(memory, 1, 4096, second)
    gpu.wait(second, event)
    gpu.copy(host, memory, 64, second)
    pooled = gpu.malloc(64, first)
    gpu.free(pooled, second)
    gpu.sync()
    gpu.close()
    writer.close()
    (path,) = directory.iterdir()
    return path.read_bytes()


def analyzed(content: bytes) -> tuple[str, list[str]]:
    """Return the report on a trace file and the errors of the spool."""
    with TemporaryDirectory() as name:
        (Path(name) / "1-000000.trace").write_bytes(content)
        detector, found_report, spool = RaceDetector(), RaceCollector(), Spool(Path(name))
        for batch in spool.batches():
            detector.feed(batch, found_report)
        detector.finish(found_report)
        spool.close()
        result = detector.result(found_report, incomplete=spool.error_messages)
    json.render(result)
    return console.render(report(result), width=100, color=False), spool.error_messages


def test_intact_trace_has_one_race(trace: bytes) -> None:
    text, damaged = analyzed(trace)

    assert "race" in text.splitlines()[0]
    assert damaged == []


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_changed_bytes_never_raise(trace: bytes, data: st.DataObject) -> None:
    content = bytearray(trace)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(content) - 1))
        content[position] = data.draw(st.integers(0, 255))

    analyzed(bytes(content))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_cut_or_extended_trace_never_raises(trace: bytes, data: st.DataObject) -> None:
    end = data.draw(st.integers(0, len(trace)))
    analyzed(trace[:end] + data.draw(st.binary(max_size=64)))
