"""All scenarios, by number."""

from __future__ import annotations

from allocator_scenarios.basics import BASICS
from allocator_scenarios.expandable import EXPANDABLE_SEGMENTS
from allocator_scenarios.history import HISTORY
from allocator_scenarios.limits import LIMITS
from allocator_scenarios.pools import POOLS
from allocator_scenarios.random_run import EXPANDABLE, UNSPLIT_SETTING, random_run
from allocator_scenarios.scenario import Scenario
from allocator_scenarios.streams import STREAM_SCENARIOS

FIRST_RANDOM_RUN_NUMBER = 101  # The number of the first random run.

SCENARIOS: tuple[Scenario, ...] = (
    *BASICS,
    *LIMITS,
    *STREAM_SCENARIOS,
    *POOLS,
    *EXPANDABLE_SEGMENTS,
    *HISTORY,
    *(random_run(FIRST_RANDOM_RUN_NUMBER + seed, seed) for seed in range(2)),
    random_run(
        FIRST_RANDOM_RUN_NUMBER + 2,
        2,
        kind="random operations, some unsplit",
        fixed_settings=UNSPLIT_SETTING,
    ),
    random_run(
        FIRST_RANDOM_RUN_NUMBER + 3,
        3,
        kind="random operations, some expandable",
        settings=EXPANDABLE,
    ),
    random_run(FIRST_RANDOM_RUN_NUMBER + 4, 4, kind="random operations, some in pools", pools=3),
)
