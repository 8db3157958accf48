from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

from cudakit.devices.diagnose.check import Check
from cudakit.devices.diagnose.checks import SELF_TEST, THEMES, checks_by_id

CHECKS = list(checks_by_id().values())
REFERENCE = re.compile(r"CK\d{3}")


def test_ids_are_unique_and_ascending() -> None:
    ids = [check.id for members in (*THEMES.values(), *SELF_TEST.values()) for check in members]

    assert ids == sorted(set(ids))
    assert all(map(REFERENCE.fullmatch, ids))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.id)
def test_check_has_explanation(check: Check) -> None:
    first, blank, *rest = check.explanation.splitlines()

    assert first.endswith((".", ":"))
    assert blank == ""
    assert rest


def test_references_between_checks_exist() -> None:
    for module in {check.examine.__module__ for check in CHECKS}:
        text = Path(str(import_module(module).__file__)).read_text(encoding="utf-8")
        assert set(REFERENCE.findall(text)) <= checks_by_id().keys()
