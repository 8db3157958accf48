from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from core.devices.diagnose.machines import FAIL, OK, UNKNOWN, Machine, judged

from cudakit.units import Unavailable

STEPS = {"CK041": "context", "CK042": "compile", "CK043": "kernel", "CK044": "copy"}


@dataclass(frozen=True, slots=True)
class Step:
    name: str
    error: str = ""
    hint: str = ""
    seen: Mapping[str, str] = field(default_factory=lambda: {"cuda:0": "16 MiB exact"})


@pytest.mark.parametrize(("name", "step"), STEPS.items())
def test_a_step_that_went_well_tells_what_was_seen(machine: Machine, name: str, step: str) -> None:
    found = judged(name, machine(self_test=(Step(step),)))

    assert found.status is OK
    assert found.summary.endswith("(16 MiB exact)")


@pytest.mark.parametrize(("name", "step"), STEPS.items())
def test_a_step_that_failed_brings_its_hint(machine: Machine, name: str, step: str) -> None:
    found = judged(name, machine(self_test=(Step(step, "cuda:0: it broke", "mend it"),)))

    assert found.status is FAIL
    assert (found.summary, found.fix) == ("cuda:0: it broke", ("mend it",))


def test_steps_after_a_failed_one_are_not_judged(machine: Machine) -> None:
    stopped = machine(self_test=(Step("context", "no memory"),))

    assert judged("CK042", stopped).summary == "a step before this one failed"
    assert judged("CK042", stopped).status is UNKNOWN


def test_where_no_step_could_be_taken_the_reason_is_told(machine: Machine) -> None:
    none = machine(self_test=Unavailable("the GPU is simulated"))

    assert judged("CK041", none).summary == "the GPU is simulated"
