"""The logs of tests/collective_programs, recorded with NCCL on two GPUs, give the expected reports."""

from __future__ import annotations

from pathlib import Path

import pytest
import race_logs

from cudakit.sanitize.races import DifferenceKind
from cudakit.trace.kinds import CollectiveFunction

LOGS = Path(__file__).parents[1] / "collective_programs/logs"


@pytest.mark.parametrize(
    ("name", "function", "line_of_collective", "line_of_use"),
    [
        ("captured_bug", CollectiveFunction.ALL_REDUCE, 24, 30),
        ("pipeline_bug", CollectiveFunction.RECEIVE, 28, 32),
        ("groups_bug", CollectiveFunction.RECEIVE, 28, 33),
        ("cupy_bug", CollectiveFunction.ALL_REDUCE, 28, 41),
    ],
)
def test_log_has_the_race_of_the_program(
    name: str, function: CollectiveFunction, line_of_collective: int, line_of_use: int
) -> None:
    result = race_logs.analyze(race_logs.load(LOGS / f"{name}.log"))
    (race,) = result.races
    assert race.previous.collective is not None
    assert race.previous.collective.function is function
    lines = [side.stack[side.site].line for side in (race.previous, race.current)]
    assert lines == [line_of_collective, line_of_use]
    assert not result.gaps
    assert not result.different_calls


def test_collective_of_a_graph_has_the_device_of_the_launch() -> None:
    (race,) = race_logs.analyze(race_logs.load(LOGS / "captured_bug.log")).races
    assert race.previous.graph
    assert [side.device for side in (race.previous, race.current)] == [1, 1]


def test_fix_names_the_devices_of_streams_with_the_same_name() -> None:
    (race,) = race_logs.analyze(race_logs.load(LOGS / "cupy_bug.log")).races
    names = "the legacy default stream of cuda:0 and the legacy default stream of cuda:1"
    assert f"make {names} wait for all these events" in race.hint
    assert race.remedies[0].endswith(f"b is each of {names}")


def test_log_has_the_calls_in_different_order() -> None:
    result = race_logs.analyze(race_logs.load(LOGS / "order.log"))
    (difference,) = result.different_calls
    assert difference.kind is DifferenceKind.FUNCTION
    assert [call.operation for call in (difference.first, difference.second)] == [
        "all-reduce",
        "broadcast",
    ]
    assert not result.races
