from __future__ import annotations

from pathlib import Path

import pytest
from core.devices.diagnose.machines import (
    OK,
    SYSTEM,
    UNKNOWN,
    WARN,
    Machine,
    files,
    healthy,
    judged,
)

from cudakit.units import Unavailable

LOCKED = 'RmProfilingAdminOnly: 1\nRegistryDwords: ""'


# --- CK025: does another tool hold CUPTI? ----------------------------------------------------------


def test_where_no_tool_is_seen_cupti_is_free(machine: Machine) -> None:
    assert judged("CK025", machine()).status is OK
    assert judged("CK025", machine(processes=Unavailable("hidden"))).status is OK


def test_a_tool_that_is_put_into_every_program_is_named(machine: Machine) -> None:
    injected = machine(variables={"CUDA_INJECTION64_PATH": "/opt/tool/libinject.so"})

    found = judged("CK025", injected)

    assert found.status is WARN
    assert found.evidence == {"CUDA_INJECTION64_PATH": "/opt/tool/libinject.so"}


@pytest.mark.parametrize(
    ("process", "fix"),
    [("nv-hostengine", "dcgmi profile --pause"), ("nsys", "end nsys before you profile")],
)
def test_a_tool_that_runs_is_named_with_the_way_to_pause_it(
    machine: Machine, process: str, fix: str
) -> None:
    found = judged("CK025", machine(processes=frozenset({"bash", process})))

    assert found.status is WARN
    assert found.fix[0].startswith(fix)


# --- CK026: may counters be read? ------------------------------------------------------------------


def test_counters_for_every_user_are_well(machine: Machine) -> None:
    assert judged("CK026", machine()).summary == "every user may read performance counters"


def test_counters_for_administrators_need_privilege(tmp_path: Path) -> None:
    locked = files(tmp_path / "locked", SYSTEM | {"/proc/driver/nvidia/params": LOCKED})

    assert judged("CK026", healthy(locked)).status is WARN
    assert judged("CK026", healthy(locked, privileged=True)).status is OK


def test_a_driver_that_does_not_show_its_parameters_is_not_judged(tmp_path: Path) -> None:
    assert judged("CK026", healthy(files(tmp_path, {}))).status is UNKNOWN
