"""The JSON that other programs read."""

from __future__ import annotations

import json
from collections.abc import Callable

from core.sanitize.made import race, report_of, result_of

from cudakit.core.sanitize.races import RaceKind
from cudakit.core.sanitize.report import Report
from cudakit.render import json as json_render


def test_the_json_of_a_race(golden: Callable[[str, str], None]) -> None:
    result = result_of(
        report_of(race(), race(), race(RaceKind.REUSE, last_sync=None, allocation=None))
    )

    golden("run-sanitize.json", json_render.render(result))


def test_the_json_has_what_the_contract_names() -> None:
    content = json.loads(json_render.render(result_of(report_of(race()))))
    (one,) = content["races"]

    assert content["schema"] == "cudakit.sanitize/1"
    assert {"exit_status", "races", "coverage"} <= content.keys()
    assert {"kind", "confidence", "address", "size_bytes", "count", "hint"} <= one.keys()
    for side in (one["current"], one["previous"]):
        assert {"stream", "operation", "stack"} <= side.keys()


def test_a_program_without_cuda_has_a_result() -> None:
    empty = Report().result(exit_status=None, coverage={})

    assert json.loads(json_render.render(empty))["races"] == []
