"""The record of a destroyed graph frees its memory in the analysis, and changes no finding."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sanitize.random_traces import Step, steps, trace
from sanitize.test_templates import with_graph_templates

from cudakit.sanitize.detector import RaceDetector
from cudakit.sanitize.findings import RaceCollector
from cudakit.sanitize.graphs import UNKNOWN_GRAPH
from cudakit.sanitize.races import SanitizeResult
from cudakit.stacks import Frame
from cudakit.trace.events import (
    Access,
    Accessed,
    Event,
    EventBody,
    GraphDestroy,
    GraphEdge,
    GraphLaunch,
    GraphNode,
    StreamCreate,
    StreamSync,
    Template,
)
from cudakit.trace.kinds import AccessMode, EventKind, NodeType, Precision, StreamFlag
from cudakit.trace.spool import Batch
from cudakit.trace.trace_file import Records, layout, pack


def detected(batches: Sequence[Records], *, strict_threads: bool = False) -> SanitizeResult:
    """Return the result of a trace that is analyzed in batches; the kernels have no names."""
    detector = RaceDetector(strict_threads=strict_threads, report_possible=True)
    report, stacks = (
        RaceCollector(),
        [(), *((Frame("step", "train.py", n),) for n in range(1, 200))],
    )
    for records in batches:
        detector.feed(Batch(1, records, ["", "k"], stacks), report)
    detector.finish(report)
    return detector.result(report)


def packed(events: Sequence[Event]) -> Records:
    return pack(events, ["", "k"].index)


# --- findings -----------------------------------------------------------------------------------------


def graphs_of(call: Sequence[Event]) -> set[int]:
    """Return the graphs that a call adds to or launches."""
    return {
        event.body.graph
        for event in call
        if isinstance(event.body, GraphNode | GraphEdge | GraphLaunch)
    }


def with_destroyed_graphs(events: Sequence[Event], delays: Sequence[int]) -> list[list[Event]]:
    """Return the calls of a trace. Each graph is destroyed a number of calls after its last launch."""
    calls = [list(call) for _, call in groupby(events, key=lambda event: event.seq)]
    last_use = {graph: index for index, call in enumerate(calls) for graph in graphs_of(call)}
    for graph, index in sorted(last_use.items(), key=lambda item: -item[1]):
        destroyed = Event(GraphDestroy(graph, executable=graph), context=1)
        calls.insert(index + 1 + delays[graph % len(delays)], [destroyed])
    return [
        [replace(event, seq=number) for event in call] for number, call in enumerate(calls, start=1)
    ]


def in_arrival_order(calls: Sequence[list[Event]], delays: Sequence[int]) -> list[Event]:
    """Return events in the order in which they arrive: the accesses of graph launches some calls later."""
    arrivals: list[tuple[int, Event]] = []
    for index, (first, *others) in enumerate(calls):
        accessed_count = sum(isinstance(event.body, Accessed) for event in others)
        is_late = isinstance(first.body, GraphLaunch) and accessed_count > 0
        if is_late:
            assert isinstance(first.body, GraphLaunch)
            first = replace(first, body=replace(first.body, pending=accessed_count))
        arrivals.append((index, first))
        arrival = index + is_late * delays[index % len(delays)]
        arrivals += [(arrival, event) for event in others]
    arrivals.sort(key=lambda item: item[0])
    return [event for _, event in arrivals]


numbers = st.lists(st.integers(0, 9), min_size=1, max_size=5)
STEP_NAMES = (
    "kernel",
    "copy",
    "record",
    "wait",
    "sync stream",
    "graph",
    "replay",
    "repeat",
    "change node",
)


@pytest.mark.parametrize("strict_threads", [False, True])
@settings(max_examples=100, deadline=None)
@given(
    steps=steps(STEP_NAMES),
    destroyed_after=numbers,
    accessed_after=numbers,
    threads=numbers,
    batch_sizes=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    uses_templates=st.booleans(),
)
def test_findings_are_equal_with_and_without_records_of_destroyed_graphs(
    steps: list[Step],
    destroyed_after: list[int],
    accessed_after: list[int],
    threads: list[int],
    batch_sizes: list[int],
    uses_templates: bool,
    strict_threads: bool,
) -> None:
    events = trace(steps)
    if uses_templates:
        events = with_graph_templates(events)
    calls = with_destroyed_graphs(events, destroyed_after)
    records = packed(in_arrival_order(calls, accessed_after))
    records["thread"] = np.array(threads)[records["seq"] % len(threads)]
    batches = np.split(records, np.cumsum(batch_sizes * len(records))[: len(records)])
    without_destroyed = [batch[batch["kind"] != EventKind.GRAPH_DESTROY] for batch in batches]

    result = detected(batches, strict_threads=strict_threads)

    assert result == detected(without_destroyed, strict_threads=strict_threads)


def test_race_with_launch_of_a_graph_that_is_destroyed_while_it_runs_is_found() -> None:
    write = [Access(4096, 8192, AccessMode.WRITE, node=1)]
    calls: list[list[EventBody]] = [
        [StreamCreate(1, StreamFlag.NON_BLOCKING)],
        [StreamCreate(2, StreamFlag.NON_BLOCKING)],
        [GraphNode(1, 1, NodeType.COPY), *write],
        [GraphNode(2, 1, NodeType.COPY), *write],
        [GraphLaunch(1, 1, executable=1)],
        [GraphDestroy(1, executable=1)],
        [GraphLaunch(2, 2, executable=2)],
    ]
    result = detected([packed(events_of(calls))])
    (race,) = result.races
    assert (race.previous.graph, race.current.graph) == (1, 2)


def test_launch_of_destroyed_graph_is_a_gap() -> None:
    calls: list[list[EventBody]] = [
        [StreamCreate(1, StreamFlag.NON_BLOCKING)],
        [GraphNode(1, 1, NodeType.COPY), Access(4096, 8192, AccessMode.WRITE, node=1)],
        [GraphDestroy(1, executable=1)],
        [GraphLaunch(1, 1, executable=1)],
    ]
    batches = [packed([event]) for event in events_of(calls)]
    assert detected(batches).gaps == {UNKNOWN_GRAPH: 1}


# --- memory -------------------------------------------------------------------------------------------


def events_of(calls: Sequence[Sequence[EventBody]]) -> list[Event]:
    return [
        Event(body, seq=seq, context=1, thread=1, site=1)
        for seq, bodies in enumerate(calls, start=1)
        for body in bodies
    ]


def one_graph(template_id: int) -> list[list[EventBody]]:
    """Return the calls of a graph of four kernels that is instantiated, launched twice and destroyed.

    The first launch becomes the template 1 if ``template_id`` is 0, otherwise both launches use a template.
    """
    calls: list[list[EventBody]] = []
    accesses: list[EventBody] = []
    for node in range(1, 5):
        lo, pointer = 4096 * node, Precision.ASSUMED
        calls.append(
            [
                GraphNode(1, node, NodeType.LAUNCH, "k"),
                Access(lo, lo + 4096, AccessMode.WRITE, pointer, node=node),
            ]
        )
        accesses += [Access(lo + 8, lo + 64, AccessMode.WRITE, node=node), Accessed(node)]
    calls += [[GraphEdge(1, node, node + 1)] for node in range(1, 4)]
    first_launch = GraphLaunch(1, 1, executable=1, template_id=template_id)
    calls.append([first_launch] if template_id else [first_launch, *accesses, Template(1)])
    calls.append([GraphLaunch(1, 1, executable=1, template_id=1)])
    calls.append([StreamSync(1)])
    calls.append([GraphDestroy(1, executable=1)])
    return calls


def many_graphs(count: int) -> Iterator[Records]:
    """Yield the records of graphs that are used one after the other, some graphs at a time."""
    graphs_per_batch = 50
    yield packed(events_of([[StreamCreate(1, StreamFlag.NON_BLOCKING)]]))
    for first_graph in range(0, count, graphs_per_batch):
        parts = []
        for graph in range(first_graph, first_graph + graphs_per_batch):
            records = FIRST_GRAPH.copy() if graph == 0 else NEXT_GRAPH.copy()
            records["seq"] += np.uint64(1 + 32 * graph)
            for kind, fields in GRAPH_FIELDS.items():
                is_kind = records["kind"] == kind
                for field in fields:
                    records.view(layout(kind))[field][is_kind] = graph + 1
            parts.append(records)
        yield np.concatenate(parts)


FIRST_GRAPH, NEXT_GRAPH = packed(events_of(one_graph(0))), packed(events_of(one_graph(1)))
GRAPH_FIELDS = {
    EventKind.GRAPH_NODE: ("graph",),
    EventKind.GRAPH_EDGE: ("graph",),
    EventKind.GRAPH_LAUNCH: ("graph", "executable"),
    EventKind.GRAPH_DESTROY: ("graph", "executable"),
}


def test_analysis_of_10000_destroyed_graphs_is_as_large_as_of_100() -> None:
    detector, report = RaceDetector(), RaceCollector()
    block_counts: list[int] = []  # numbers of memory blocks that Python has allocated
    for records in many_graphs(10_000):
        detector.feed(Batch(1, records, ["", "k"], [(), ()]), report)
        if detector.result(report).coverage.graph_launches % 2000 == 200:
            gc.collect()
            block_counts.append(sys.getallocatedblocks())
    coverage = detector.result(report).coverage
    assert (coverage.graph_launches, coverage.launches_from_template) == (20_000, 19_999)
    assert len(block_counts) == 10
    # Without the records, each graph keeps about 40 blocks.
    assert block_counts[-1] - block_counts[0] < 1000
