"""The text of the report."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cudakit.memory.analyze import analyze, diff
from cudakit.memory.lifetimes import Contradictions
from cudakit.memory.load import load
from cudakit.memory.report import report, summary_report
from cudakit.memory.report.comparison import diff_report
from cudakit.memory.report.summary import answer, in_annotation, reliability, step_definition
from cudakit.memory.result import MemoryResult
from cudakit.memory.selection import MemorySpec
from cudakit.memory.snapshot import POOL_IDS, take
from cudakit.report import console, html
from cudakit.report.console.table import stack_line
from cudakit.report.document import Chart, Document, Note, Section, Stack, Table, walk
from cudakit.stacks import Frame

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use relative file names, because the report shows them."""
    monkeypatch.chdir(ROOT)


def examined(*names: str, at: str = "peak") -> MemoryResult:
    snapshots = [load(name) for name in names]
    return analyze(snapshots, MemorySpec(at=at))


def read(document: Document, width: int) -> str:
    return console.render(document, width=width, color=False)


@pytest.mark.parametrize("width", [80, 160])
def test_report_of_an_out_of_memory_error_equals_the_golden_file(
    golden: Callable[[str, str], None], width: int
) -> None:
    text = read(report(examined("tests/data/oom.pkl.gz"), top=5), width)

    golden(f"memviz-oom-{width}.txt", text)


def test_report_of_a_leak_equals_the_golden_file(golden: Callable[[str, str], None]) -> None:
    golden("memviz-leak-100.txt", read(report(examined("tests/data/leak.pkl.gz")), 100))


def test_chart_of_the_steps_ends_after_the_last_step() -> None:
    result = examined("tests/data/leak.pkl.gz")
    charts = [node for node in walk(report(result).nodes) if isinstance(node, Chart)]
    (step_chart,) = (chart for chart in charts if chart.x_label == "step")
    assert step_chart.x_end == result.devices[0].steps.peaks[-1].step + 1


def test_report_of_several_ranks_equals_the_golden_file(golden: Callable[[str, str], None]) -> None:
    names = [f"tests/data/{name}.pkl.gz" for name in ("pools", "streams", "expandable")]
    golden("memviz-several-100.txt", read(report(examined(*names), top=2), 100))


def test_report_of_a_diff_equals_the_golden_file(golden: Callable[[str, str], None]) -> None:
    before, after = (load(f"tests/data/{name}.pkl.gz") for name in ("train_python", "oom"))
    document = diff_report(diff(before, after, MemorySpec()), top=3)

    golden("memviz-diff-100.txt", read(document, 100))


def test_growth_of_a_diff_beyond_1000_percent_is_a_factor() -> None:
    before, after = load("tests/data/leak.pkl.gz"), load("examples/memory/kv_cache.pkl.gz")
    text = read(diff_report(diff(before, after, MemorySpec()), top=1), 100)

    assert "136 GiB more (2,453 times as much) at the peak" in text
    assert re.search(r"reserved at end +76\.0 MiB +124 GiB +\+124 GiB +1,676 times\n", text)


def test_out_of_memory_is_the_first_section() -> None:
    titles = [
        node.title
        for node in report(examined("tests/data/oom.pkl.gz")).nodes
        if isinstance(node, Section)
    ]

    assert titles[0] == "Out of memory"


def test_caption_counts_omitted_rows_unless_top_is_0() -> None:
    result = examined("tests/data/oom.pkl.gz")

    assert any("more call stacks: --top 0 shows all" in caption for caption in captions(result, 3))
    assert not any("more" in caption for caption in captions(result, 0))


def captions(result: MemoryResult, top: int) -> list[str]:
    sections = [node for node in report(result, top=top).nodes if isinstance(node, Section)]
    return [node.caption for part in sections for node in part.nodes if isinstance(node, Table)]


def test_call_sites_with_one_call_stack_each_are_listed_once() -> None:
    tables = {
        name: [
            len(section.nodes)
            for section in report(examined(name)).nodes
            if isinstance(section, Section) and section.title.startswith("Memory by call s")
        ]
        for name in ("tests/data/leak.pkl.gz", "tests/data/oom.pkl.gz")
    }

    assert tables == {"tests/data/leak.pkl.gz": [1], "tests/data/oom.pkl.gz": [2]}
    titles = [
        section.title
        for section in report(examined("tests/data/leak.pkl.gz")).nodes
        if isinstance(section, Section)
    ]
    assert "Memory by call stack at the peak" in titles


def test_page_of_several_devices_has_an_explorer_for_each_and_one_for_all() -> None:
    result = examined("tests/data/pools.pkl.gz", "tests/data/leak.pkl.gz")
    page = html.render(report(result))

    assert page.count('class="explorer" data-kind="memory"') == len(result.devices) == 2
    assert page.count('class="explorer" data-kind="memory_devices"') == 1


def test_report_begins_with_the_state_the_cause_and_the_action() -> None:
    notes = report(examined("tests/data/leak.pkl.gz")).nodes[:3]

    assert all(isinstance(note, Note) for note in notes)
    state, cause, action = (note.text for note in notes if isinstance(note, Note))
    assert state == "1 call stack holds 1.95 MiB more memory after each step."
    assert "record_snapshots.py:96 _forgotten" in cause
    assert action.startswith("Action: find the reference")


def evidence_of(name: str) -> tuple[str, ...]:
    cause = report(examined(name)).nodes[1]
    assert isinstance(cause, Note)
    return cause.evidence


def test_evidence_of_an_answer_has_the_figures_of_the_sections_below() -> None:
    assert evidence_of("tests/data/oom.pkl.gz")[0] == (
        "requested 96.0 MiB; free on the device 136 GiB; free in segments 104 MiB;"
        " largest free block 12.0 MiB"
    )
    (leaking,) = examined("tests/data/leak.pkl.gz").devices
    growth = evidence_of("tests/data/leak.pkl.gz")
    assert len(growth) == len(leaking.leaks[:3])
    assert all("per step" in line for line in growth)
    call_sites = evidence_of("tests/data/train.pkl.gz")
    assert [line.split(":")[0] for line in call_sites] == ["next at the peak"] * 2


def test_report_of_a_consistent_file_says_that_trace_and_state_agree() -> None:
    note = report(examined("tests/data/train.pkl.gz")).nodes[3]

    assert isinstance(note, Note)
    assert note.level == "ok"
    assert "trace and final state agree" in note.text


def test_report_of_cudakits_own_snapshot_names_cudakits_calls() -> None:
    snapshot = load("tests/data/leak.pkl.gz")
    settings = {**snapshot.settings, "cudakit_cache_limit": -1}
    empty = replace(snapshot.devices[0], events=take(snapshot.devices[0].events, np.array([], int)))
    own = replace(snapshot, settings=settings, devices=(empty,))
    text = read(report(analyze([own], MemorySpec())), 200)

    assert "CachingAllocator.record_history()" in text
    assert "torch.cuda" not in text


def test_long_report_ends_with_its_summary_and_a_short_one_does_not() -> None:
    document = report(examined("tests/data/oom.pkl.gz"))
    once = console.render(document, width=100, color=False, height=10_000)
    twice = console.render(document, width=100, color=False, height=50)

    summary = once[once.index("✗ Allocating") : once.index("✓ cuda:0")]
    assert once.count(summary) == 1
    assert twice.startswith(once)
    assert twice.endswith(summary)


def test_summary_report_has_the_state_the_cause_and_the_action_only() -> None:
    (state, cause, action) = summary_report(examined("tests/data/oom.pkl.gz")).nodes

    assert isinstance(state, Note)
    assert isinstance(cause, Note)
    assert isinstance(action, Note)
    assert state.text.startswith("Allocating 96.0 MiB failed on cuda:0 at event 7,712")
    assert cause.text.startswith("Cause (growth): ")
    assert action.text.startswith("Action: limit the size that grows at lab/snaps.py:14 forward")


def test_rows_of_every_table_can_be_told_apart() -> None:
    """No two call stacks of a table look the same, although many have the same call site and function."""
    for name in ("tests/data/oom.pkl.gz", "tests/data/train_python.pkl.gz"):
        for node in walk(report(examined(name), top=0).nodes):
            if not isinstance(node, Table):
                continue
            for index, column in enumerate(node.columns):
                if column.kind != "stack":
                    continue
                stacks = [stack for row in node.rows if isinstance(stack := row[index], Stack)]
                lines = [stack_line(s, width=200, with_callers=False).plain for s in stacks]
                assert len(set(lines)) == len(lines), name


def test_call_stack_has_the_same_name_in_all_tables_of_a_report() -> None:
    for name in ("tests/data/oom.pkl.gz", "tests/data/train_python.pkl.gz"):
        marks: defaultdict[tuple[Frame, ...], set[int | None]] = defaultdict(set)
        tables = [node for node in walk(report(examined(name)).nodes) if isinstance(node, Table)]
        for cell in (cell for node in tables for row in node.rows for cell in row):
            if isinstance(cell, Stack):
                marks[cell.frames].add(cell.distinct_index)

        assert any(indices != {None} for indices in marks.values())
        assert all(len(indices) == 1 for indices in marks.values()), name


def test_steps_with_rising_peaks_contradict_no_other_sentence() -> None:
    text = read(report(examined("tests/data/oom.pkl.gz")), 1000)

    assert "No call stack holds more memory after each step." not in text
    assert "No call stack holds more memory after each step" in text
    assert "but the peak of each step rises from 578 MiB to 2.60 GiB over 6 steps" in text


@pytest.mark.parametrize(
    ("ranges", "mark", "text"),
    [
        ((), "", ""),
        (("step 7",), "", " in annotation 'step 7'"),
        ((), "loaded", " after mark 'loaded'"),
        (
            ("a", "b", "c", "d"),
            "m" * 61,
            f" in annotation '… / b / c / d' after mark '{'m' * 59}…'",
        ),
    ],
)
def test_peak_names_innermost_annotations_and_last_mark(
    ranges: tuple[str, ...], mark: str, text: str
) -> None:
    (device,) = examined("tests/data/leak.pkl.gz").devices
    assert in_annotation(replace(device.peak, ranges=ranges, last_mark=mark)) == text


def test_growth_that_stopped_is_not_reported_as_absent() -> None:
    """Peak per step lists 45 GiB of growth, which ended when the server was full."""
    text = read(report(examined("examples/memory/varying_lengths.pkl.gz")), 1000)

    assert "+45.2 GiB" in text
    assert "No call stack holds more memory after each step." not in text
    assert (
        "No call stack kept growing from step to step. Section Peak per step lists what grew from the"
        " first to the last step. 33 step boundaries were compared, with 32 steps between them;"
        " each step starts at varying_lengths.py:33 prefill."
    ) in text


@pytest.mark.parametrize(
    ("source", "definition"),
    [
        ("annotation step#", "each step is an annotation 'step' with a number"),
        ("annotation train", "all steps are annotations with the same name, 'train'"),
        ("loop at train.py:40 train", "each step starts at train.py:40 train"),
        ("snapshot markers", "each step starts at a snapshot event of the trace"),
        (
            "repeating allocations",
            "each step is one repetition of the same sequence of allocations",
        ),
    ],
)
def test_report_says_what_a_step_is(source: str, definition: str) -> None:
    (device,) = examined("tests/data/leak.pkl.gz").devices
    assert (
        step_definition(replace(device, steps=replace(device.steps, source=source))) == definition
    )


def test_failure_below_a_limit_of_the_process_says_why_free_memory_did_not_help() -> None:
    limited, full = (
        read(report(examined(name)), 1000)
        for name in ("tests/data/fragmented_oom.pkl.gz", "examples/memory/kv_cache.pkl.gz")
    )

    assert "137 GiB free on the device, but beyond the memory limit of this process." in limited
    assert "14.8 GiB free on the device (140 GiB in total)." in full


def test_contradictions_are_named_with_what_is_counted() -> None:
    (device,) = examined("tests/data/leak.pkl.gz").devices
    contradictions = Contradictions(
        lost_allocations=2,
        lost_frees=1,
        lost_requests=1,
        sizes=3,
        segments=1,
        over_reserved=46,
    )
    unreliable = replace(
        device,
        exact=False,
        inconsistencies=contradictions.total,
        health=replace(device.health, contradictions=contradictions),
    )

    assert next(reliability(unreliable)).text == (
        "cuda:0: the trace of 201 events and the final state disagree 54 times (2 blocks without an"
        " allocation in the trace, 1 block without a free in the trace, 1 completed free"
        " without a request in the trace, 3 blocks whose sizes in trace and final state differ,"
        " 1 contradicting segment event, 46 moments with more memory in use than reserved)."
    )


def test_single_event_is_counted_in_the_singular() -> None:
    (_, host) = examined("tests/data/fuzz/host.pkl").devices
    assert next(reliability(host)).text.startswith("pinned host memory: 1 event, starting with")


def test_free_segments_before_the_trace_are_not_reported_as_memory_in_use() -> None:
    """The trace of the file allocates its only block, in a segment from before the trace."""
    (_, host) = examined("tests/data/fuzz/host.pkl").devices
    assert "starting with 1.00 MiB reserved, but not in use;" in next(reliability(host)).text


def test_step_of_a_failure_whose_steps_share_a_name_is_its_number() -> None:
    (device,) = examined("tests/data/oom.pkl.gz").devices
    nested = replace(device.ooms[-1], ranges=("step0", "forward"))
    texts = [next(answer(failed)).text for failed in (device, replace(device, ooms=(nested,)))]

    definition = "(all steps are annotations with the same name, 'step0'; default pool, stream 0)"
    assert f"at event 7,712 in step 5, counted from 0 {definition}:" in texts[0]
    assert f"in step 5, counted from 0, in annotation 'step0 / forward' {definition}:" in texts[1]


def test_pools_of_libraries_and_their_kind_are_explained() -> None:
    result = examined("examples/memory/varying_lengths.pkl.gz")
    (device,) = result.devices
    group = next(group for group in device.segments if group.pool == POOL_IDS["driver"])
    groups = tuple(replace(group, pool=POOL_IDS[name]) for name in ("managed memory", "jax"))
    text = read(report(replace(result, devices=(replace(device, segments=groups),))), 1000)

    assert "Pool managed memory: memory of cudaMallocManaged, which GPU and host share." in text
    assert (
        'Pool jax: the pool of JAX. Kind "-": only segments of PyTorch are small or large.' in text
    )


def test_segments_of_the_driver_are_explained() -> None:
    explanation = (
        "Pool driver: memory from calls of the driver, such as cudaMalloc, outside any library"
    )

    assert explanation in read(report(examined("examples/memory/varying_lengths.pkl.gz")), 1000)
    assert explanation not in read(report(examined("tests/data/leak.pkl.gz")), 1000)
