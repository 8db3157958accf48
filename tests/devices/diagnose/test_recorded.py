"""The recorded result of a real machine; tests/data/doctor-h200.json names the machine and the date."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cudakit.devices.diagnose.check import (
    SCHEMA,
    CheckResult,
    DeviceLine,
    DoctorResult,
    Status,
)
from cudakit.devices.diagnose.checks import checks_by_id
from cudakit.devices.diagnose.present import paste_report, report
from cudakit.report import console
from cudakit.report.json import render

DATA = Path(__file__).parents[2] / "data" / "doctor-h200.json"
OUTPUT: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))["output"]
# CK037 and CK038 are newer than the recording.
EARLIER = [name for name in checks_by_id() if name not in ("CK037", "CK038")]


def recorded() -> DoctorResult:
    checks = tuple(
        CheckResult(
            **{**record, "status": Status[record["status"].upper()], "fix": tuple(record["fix"])}
        )
        for record in OUTPUT["checks"]
    )
    return DoctorResult(
        **{
            **OUTPUT,
            "status": Status[OUTPUT["status"].upper()],
            "devices": tuple(DeviceLine(**record) for record in OUTPUT["devices"]),
            "checks": checks,
        }
    )


def test_recorded_real_machine_has_no_unknown_check() -> None:
    assert OUTPUT["schema"] == SCHEMA
    assert [record["id"] for record in OUTPUT["checks"]] == EARLIER
    assert {record["status"] for record in OUTPUT["checks"]} == {"ok"}


def test_recorded_titles_are_those_of_the_table() -> None:
    assert [record["title"] for record in OUTPUT["checks"]] == [
        checks_by_id()[name].title for name in EARLIER
    ]


def test_recorded_result_is_unchanged_as_json() -> None:
    assert json.loads(render(recorded())) == {**OUTPUT, "variables": []}


@pytest.mark.parametrize("width", [80, 160])
def test_recorded_report_is_unchanged(golden: Callable[[str, str], None], width: int) -> None:
    text = console.render(report(recorded(), show_all=True), width=width, color=False)

    golden(f"doctor-h200-{width}.txt", text)


def test_recorded_pasted_report_is_unchanged(golden: Callable[[str, str], None]) -> None:
    golden(
        "doctor-h200-report.txt", console.render(paste_report(recorded()), width=100, color=False)
    )
