"""Every scenario passes on a simulated device, and the invariants hold after each scenario."""

from __future__ import annotations

import pytest
from allocator import invariants
from allocator_scenarios.catalog import FIRST_RANDOM_RUN_NUMBER, SCENARIOS
from allocator_scenarios.compare import run
from allocator_scenarios.cudakit_subject import in_memory
from allocator_scenarios.scenario import Scenario

CARRIED = [scenario for scenario in SCENARIOS if not scenario.without_memory]


@pytest.mark.parametrize("scenario", CARRIED, ids=lambda s: f"{s.number}, {s.name}")
def test_scenario_passes_on_the_simulated_device(scenario: Scenario) -> None:
    subject = in_memory()

    results = run(scenario, subject)

    assert [(result.check.label, result.failures) for result in results if result.failures] == []
    assert any(result.check.expects_something for result in results)
    if scenario.number < FIRST_RANDOM_RUN_NUMBER:
        invariants.check(subject.allocator)
    else:  # a changed max_split_size makes the count of oversize blocks negative, as in PyTorch
        invariants.check_layout(subject.snapshot()["segments"])


def test_catalog_has_every_scenario_number() -> None:
    assert {scenario.number for scenario in SCENARIOS} >= set(range(1, 49))


def test_scenario_names_are_unique() -> None:
    assert len({(scenario.number, scenario.name) for scenario in SCENARIOS}) == len(SCENARIOS)
