"""The report as text, HTML and SARIF."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from sanitize.sample_races import (
    BLOCKING_STREAM,
    DEFAULT_STREAM,
    EVENT,
    PER_THREAD_STREAM,
    PREFETCH,
    TRAIN_STEP,
    WAIT_EVENT,
    demangle,
    exact_operation,
    found_race,
    kernel,
    race,
    report_of,
    result_of,
)

from cudakit.report import console, html, sarif
from cudakit.report.document import Columns, Document, Note, Section, View
from cudakit.sanitize.baseline import parse_pattern
from cudakit.sanitize.findings import RaceCollector
from cudakit.sanitize.races import (
    Confidence,
    Coverage,
    FoundRace,
    NamedRange,
    Race,
    RaceKind,
    SanitizeResult,
    Sync,
    SyncKind,
)
from cudakit.sanitize.report import brief_sentences, report, title
from cudakit.sanitize.report.races import race_note
from cudakit.stacks import Frame
from cudakit.trace.kinds import AccessMode, EventKind

CERTAIN = Confidence.CERTAIN

OVERWRITTEN = race(
    RaceKind.WRITE_AFTER_READ,
    confidence=CERTAIN,
    current=exact_operation(EventKind.FILL, seq=240, stream=BLOCKING_STREAM),
    previous=exact_operation(mode=AccessMode.READ, seq=230, site=TRAIN_STEP),
    allocation=None,
    last_sync=None,
)
FREED = race(
    RaceKind.USE_AFTER_FREE,
    current=exact_operation(EventKind.FREE, seq=300, stream=PER_THREAD_STREAM),
    previous=kernel("triton_poi_fused_add_0"),
    last_sync=Sync(SyncKind.HOST, 90, WAIT_EVENT, 90, WAIT_EVENT),
)
IN_A_GRAPH = race(
    RaceKind.WRITE_AFTER_WRITE,
    current=kernel(graph=2, node=3, stream=BLOCKING_STREAM),
    previous=exact_operation(graph=2, node=2, stream=BLOCKING_STREAM),
    last_sync=None,
    approximate=True,
)
REUSED = race(
    RaceKind.REUSE,
    current=kernel(stream=PER_THREAD_STREAM),
    previous=exact_operation(mode=AccessMode.READ, stream=BLOCKING_STREAM),
    last_sync=Sync(SyncKind.DEFAULT_STREAM, 90, WAIT_EVENT, 91, WAIT_EVENT),
)
ON_THE_HOST = race(
    RaceKind.HOST,
    confidence=CERTAIN,
    current=exact_operation(seq=130, stream=0, mode=AccessMode.READ, site=TRAIN_STEP),
    allocation=None,
)


def read(result: SanitizeResult, width: int = 80) -> str:
    return console.render(report(result), width=width, color=False)


def racy(*races: Race) -> SanitizeResult:
    return result_of(report_of(*races))


@pytest.mark.parametrize("width", [80, 160])
def test_report_of_read_after_write(golden: Callable[[str, str], None], width: int) -> None:
    golden(f"run-race-{width}.txt", read(racy(*[race()] * 1_200), width))


def test_report_of_every_other_race_kind(golden: Callable[[str, str], None]) -> None:
    result = racy(OVERWRITTEN, FREED, IN_A_GRAPH, REUSED, ON_THE_HOST)

    golden("run-races-80.txt", read(result))


def test_use_after_free_is_not_reported_as_a_missing_wait() -> None:
    used = race(
        RaceKind.USE_AFTER_FREE,
        current=exact_operation(EventKind.FILL, seq=8, stream=BLOCKING_STREAM),
        previous=exact_operation(EventKind.FREE, seq=7, stream=PER_THREAD_STREAM),
        last_sync=Sync(SyncKind.HOST, 6, WAIT_EVENT, 6, WAIT_EVENT),
    )
    text = read(racy(used))
    assert "the memset is enqueued after the free, and may run after it" in text
    assert "move the free" in text
    assert "last wait" not in text
    assert "no synchronization orders" not in text


def test_wait_for_a_host_function_names_the_function() -> None:
    after_function = replace(FREED, last_sync=Sync(SyncKind.HOST, 80, PREFETCH, 90, PREFETCH))
    text = read(racy(after_function), 160)
    assert "host function enqueued (loader.py:31)" in text
    assert "host function runs (loader.py:31)" in text


def test_report_without_races(golden: Callable[[str, str], None]) -> None:
    golden("run-clean-80.txt", read(racy()))


def test_stores_through_tensor_maps_count_for_the_whole_tensor() -> None:
    coverage = Coverage(launches=2, launches_exact=2, launches_whole_tensor=1)
    text = read(RaceCollector().result(exit_status=0, coverage={1: coverage}))
    sentence = (
        "Accesses of 2 kernel launches: 1 exact, 1 exact except stores through tensor maps, which count as "
        "writes of the whole tensor"
    )
    assert sentence in " ".join(text.split())


def test_report_lists_gaps(golden: Callable[[str, str], None]) -> None:
    filled = RaceCollector(
        suppressions=[parse_pattern("kernel:*elementwise*"), parse_pattern("kernel:no")],
        demangle=demangle,
    )
    report_of(race(), race(), race(confidence=Confidence.POSSIBLE), report=filled)
    result = filled.result(
        exit_status=0,
        coverage={
            1: Coverage(launches=1, launches_unknown=1, launches_without_call_site=1),
            2: Coverage(graph_launches=2),
        },
        gaps=[{f"cuNew{number}": 10 - number for number in range(10)}],
        simulated=True,
        notes=("process 3 was started with python -I: it was not instrumented",),
    )

    golden("run-gaps-80.txt", read(result))


def test_report_without_gpu_work() -> None:
    text = read(RaceCollector().result(exit_status=0, coverage={}))

    assert text.startswith("No GPU work was recorded, so nothing was checked\n")


def test_incomplete_result_is_the_first_note_and_part_of_the_verdict() -> None:
    reason = "12 events of process 7 could not be recorded: No space left on device"
    document = report(replace(racy(race()), incomplete=(reason,)))

    assert document.title == "1 race between streams, result incomplete"
    assert document.nodes[0] == Note("error", reason)


def test_result_without_gpu_work_gives_the_reason() -> None:
    empty = RaceCollector().result(exit_status=0, coverage={}, no_gpu_work="no CUDA device")

    assert read(empty).endswith("! No CUDA device\n")
    assert brief_sentences(empty) == (
        "No GPU work was recorded, so nothing was checked (no CUDA device)",
    )


@pytest.mark.parametrize(
    ("races", "verdict"),
    [
        ((), "No races found"),
        ((race(),), "1 race between streams"),
        ((race(), race()), "1 race between streams, found 2 times"),
        ((race(), OVERWRITTEN), "2 races between streams"),
        ((race(), ON_THE_HOST, race()), "2 races, found 3 times"),
    ],
)
def test_title_is_the_verdict(races: tuple[Race, ...], verdict: str) -> None:
    assert title(racy(*races)) == verdict


def test_title_mentions_simulation_and_early_stop() -> None:
    result = result_of(report_of(race()), simulated=True, stopped=True)

    assert (
        title(result) == "1 race between streams, on a simulated device, stopped at the first race"
    )


@pytest.mark.parametrize(("top", "printed_text"), [(2, 2), (0, 3), (20, 3)])
def test_top_limits_the_races_shown_and_counts_the_rest(top: int, printed_text: int) -> None:
    document = report(racy(race(), OVERWRITTEN, FREED), top=top)
    sections = [node.title for node in document.nodes if isinstance(node, Section)]
    omission_notes = [node for node in document.nodes if isinstance(node, Note)]

    assert len(sections) == printed_text + 1  # one section for each race, and one for the coverage
    assert len(omission_notes) == (1 if printed_text < 3 else 0)


@pytest.mark.parametrize(
    ("confidence", "level"),
    [(CERTAIN, "error"), (Confidence.LIKELY, "warn"), (Confidence.POSSIBLE, "info")],
)
def test_note_level_follows_confidence(confidence: Confidence, level: str) -> None:
    report_ = RaceCollector(min_confidence=Confidence.POSSIBLE)
    section = report(result_of(report_of(race(confidence=confidence), report=report_))).nodes[0]

    assert isinstance(section, Section)
    assert isinstance(section.nodes[0], Note)
    assert section.nodes[0].level == level


def test_sides_on_two_devices_name_the_device() -> None:
    remote_race = race(current=replace(kernel("add"), device=1))

    assert "cuda:0" in read(racy(remote_race))
    assert "cuda:0" not in read(racy(race()))


def test_races_of_several_processes_name_the_process() -> None:
    report_ = report_of(race())
    report_of_processes = report_.result(
        exit_status=0, coverage={4242: Coverage(launches=1), 7: Coverage()}
    )

    assert "process       4242" in read(report_of_processes)
    assert "in 2 processes" in read(report_of_processes)


# --- the diagram ---------------------------------------------------------------------------------------


def diagram_columns(sample_race: Race) -> Columns:
    section = report(racy(sample_race)).nodes[0]
    assert isinstance(section, Section)
    (columns,) = (node for node in section.nodes if isinstance(node, Columns))
    assert any(isinstance(node, View) and node.columns == (columns.name,) for node in section.nodes)
    return columns


def arrows(columns: Columns) -> list[tuple[str, str]]:
    labels = columns.text["label"]
    return [
        (labels[index], labels[i])
        for i, index in enumerate(columns.arrays["after"].tolist())
        if index >= 0
    ]


def test_diagram_shows_last_wait_and_missing_wait() -> None:
    columns = diagram_columns(race(current=kernel("add")))

    assert columns.arrays["seq"].tolist() == [101, 104, 107, 112]
    assert columns.text["lane"] == ("stream 7 (non-blocking)", "legacy default stream")
    assert columns.arrays["lane"].tolist() == [0, 1, 0, 1]
    assert arrows(columns) == [("event record", "wait for the event"), ("copy", "add")]


def test_wait_after_the_copy_is_drawn_after_the_copy() -> None:
    columns = diagram_columns(race(last_sync=replace(EVENT, waited_seq=110)))

    assert columns.arrays["seq"].tolist() == [101, 107, 110, 112]


def test_narrow_diagram_hides_the_host_before_the_streams_of_the_race() -> None:
    text = read(racy(FREED), width=50)

    (header,) = re.findall(r"^  call .*", text, re.MULTILINE)
    assert "per-thread" in text
    assert "legacy default" in text
    assert "host" not in header
    assert "Columns hidden at this width: host." in text


def test_host_that_waited_has_a_lane() -> None:
    assert diagram_columns(FREED).text["lane"][0] == "host"
    assert diagram_columns(ON_THE_HOST).text["lane"] == ("stream 7 (non-blocking)", "host")


@pytest.mark.parametrize(
    ("sample_race", "lanes"),
    [
        (IN_A_GRAPH, ("node 2 of graph 2", "node 3 of graph 2")),
        (
            race(
                current=replace(kernel(stream=BLOCKING_STREAM), context=2),
                previous=exact_operation(stream=BLOCKING_STREAM),
            ),
            ("stream 9, context 1", "stream 9, context 2"),
        ),
    ],
)
def test_sides_in_one_stream_have_two_lanes(sample_race: Race, lanes: tuple[str, str]) -> None:
    assert diagram_columns(sample_race).text["lane"] == lanes


def test_every_race_kind_is_drawn_in_html() -> None:
    races = (race(), OVERWRITTEN, FREED, IN_A_GRAPH, REUSED, ON_THE_HOST)
    page = html.render(report(racy(*races)))

    assert page.count('<figure class="race">') == len(races)
    assert page.count('class="missing"') == 2 * len(races)  # an arrow and its legend


def test_unknown_call_has_no_number() -> None:
    unknown = race(current=kernel("add", seq=0), previous=exact_operation(seq=0), last_sync=None)

    assert diagram_columns(unknown).arrays["seq"].tolist() == [0, 0]
    assert "makes the legacy default stream wait for stream 7" in read(racy(unknown), width=120)


def test_call_without_number_is_drawn_after_the_last_wait() -> None:
    unknown = race(current=kernel("add", seq=0), previous=exact_operation(seq=0))

    assert diagram_columns(unknown).arrays["seq"].tolist() == [101, 104, 0, 0]


def test_nodes_of_one_graph_launch_are_named_by_number() -> None:
    result_item = race(
        current=kernel(graph=2, node=3),
        previous=exact_operation(seq=112, graph=2, node=2, stream=DEFAULT_STREAM),
    )

    assert "no synchronization makes node 3 of graph 2 wait for node 2 of graph 2" in read(
        racy(result_item)
    )


def test_note_contains_the_finding_for_sarif() -> None:
    section = report(racy(race(), race())).nodes[0]
    assert isinstance(section, Section)
    note = section.nodes[0]
    assert isinstance(note, Note)
    assert note.finding is not None

    assert (note.finding.rule, note.finding.count) == ("read-after-write", 2)
    assert [label.partition(":")[0] for label, _ in note.finding.places] == [
        "later",
        "earlier",
        "allocated",
    ]


def test_sarif_contains_every_race_and_note() -> None:
    content = json.loads(sarif.render(report(racy(race(), OVERWRITTEN, race()))))
    (run,) = content["runs"]

    assert [
        (result_item["ruleId"], result_item["level"], result_item["occurrenceCount"])
        for result_item in run["results"]
    ] == [
        ("write-after-read", "error", 1),
        ("read-after-write", "warning", 2),
    ]
    assert len(run["invocations"][0]["toolExecutionNotifications"]) == 3


def test_hostile_kernel_name_is_escaped() -> None:
    name = "\x1b[31m<script>\u202e" * 50
    escaped_result = result_of(report_of(race(current=kernel(name, site=PREFETCH))))
    document: Document = report(escaped_result)

    assert "\x1b" not in console.render(document, width=80, color=False)
    assert "<script>" not in html.render(document)
    assert found_race(race(current=kernel(name))).current.kernel == name


def test_sides_name_their_ranges() -> None:
    inside = (NamedRange("step 7", ""), NamedRange("forward", "torch"))
    printed_text = read(racy(race(current=replace(kernel(), ranges=inside))), width=200)

    assert ", in range 'step 7 / forward'; receives a pointer" in " ".join(printed_text.split())


def with_frames(found: FoundRace, file: Path) -> FoundRace:
    """Return a race whose sides were called at the lines 1 and 2 of a file."""
    sides = [
        replace(side, stack=(Frame("step", str(file), line),), site=0)
        for line, side in enumerate((found.previous, found.current), start=1)
    ]
    return replace(found, previous=sides[0], current=sides[1])


def test_page_of_a_race_shows_the_source_lines_of_both_calls(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("a.copy_(b)\n    c = a + 1\n", encoding="utf-8")
    note = race_note(with_frames(found_race(FREED), file))
    assert note.evidence == (f"earlier, {file}:1: a.copy_(b)", f"later, {file}:2: c = a + 1")


@pytest.mark.parametrize("name", ["missing.py", "secret.key", "folder.py", "short.py", "a\0b.py"])
def test_source_lines_are_read_from_python_files_only(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret.key").write_text("one\ntwo\n", encoding="utf-8")
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "short.py").write_text("", encoding="utf-8")
    assert race_note(with_frames(found_race(FREED), tmp_path / name)).evidence == ()
