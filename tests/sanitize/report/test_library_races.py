"""Reports on races inside libraries, beside those of the program."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from html import unescape

from sanitize.sample_races import (
    TRAIN_STEP,
    demangle,
    exact_operation,
    kernel,
    race,
    result_of,
)
from sanitize.sample_races import report_of as add_to_report

from cudakit.report import console, html, sarif
from cudakit.report import json as json_render
from cudakit.report.document import Note
from cudakit.sanitize.findings import RaceCollector
from cudakit.sanitize.races import Confidence, NamedRange, SanitizeResult
from cudakit.sanitize.report import brief_sentences, report, title
from cudakit.trace.kinds import AccessMode, Precision

INSIDE = (NamedRange("step 7", ""), NamedRange("forward", "torch"))
IN_LIBRARY = race(
    confidence=Confidence.CERTAIN,
    current=replace(
        kernel(seq=412, mode=AccessMode.READ, precision=Precision.EXACT, site=TRAIN_STEP),
        program_call=5,
        ranges=INSIDE,
    ),
    previous=replace(exact_operation(seq=411, site=TRAIN_STEP), program_call=5),
    last_sync=None,
)


def result(*, internal: bool = False) -> SanitizeResult:
    """Return a result with a race of the program and, twice, a race of torch."""
    return result_of(
        add_to_report(
            race(),
            IN_LIBRARY,
            IN_LIBRARY,
            report=RaceCollector(demangle=demangle, counts_library_races=internal),
        )
    )


def test_report_of_a_race_in_a_library(golden: Callable[[str, str], None]) -> None:
    golden("run-race-in-library-80.txt", console.render(report(result()), width=80, color=False))


def test_verdict_counts_races_of_libraries_apart() -> None:
    assert title(result()) == "1 race between streams, 1 race inside a library"
    assert title(result(internal=True)) == "2 races between streams, found 3 times"


def test_page_folds_races_of_libraries() -> None:
    folded, unfolded = (html.render(report(result(internal=value))) for value in (False, True))

    assert '<details class="folded">' in folded
    assert '<details class="folded">' not in unfolded
    assert "torch/nn/modules/linear.py:134" in folded


def test_sarif_level_of_a_race_in_a_library_is_note() -> None:
    for internal, levels in ((False, ["warning", "note"]), (True, ["warning", "error"])):
        (run,) = json.loads(sarif.render(report(result(internal=internal))))["runs"]
        assert [each["level"] for each in run["results"]] == levels


def test_json_has_the_owner_and_the_library() -> None:
    races = json.loads(json_render.render(result()))["races"]

    assert [(each["owner"], each["library"]) for each in races] == [
        ("program", None),
        ("library", "torch"),
    ]


def test_brief_report_has_races_that_count() -> None:
    counts = [
        sum(
            isinstance(line, Note) and line.finding is not None
            for line in brief_sentences(shown_result)
        )
        for shown_result in (result(), result(internal=True))
    ]

    assert counts == [1, 2]


def test_ranges_are_in_text_page_and_json() -> None:
    shown = report(result())

    assert "in range 'step 7 / forward'" in " ".join(
        console.render(shown, width=200, color=False).split()
    )
    assert "in range 'step 7 / forward'" in unescape(html.render(shown))
    ranges = json.loads(json_render.render(result()))["races"][1]["current"]["ranges"]
    assert ranges == [{"name": "step 7", "domain": ""}, {"name": "forward", "domain": "torch"}]
