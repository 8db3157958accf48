from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from devices.doctor import machines
from devices.doctor.machines import Machine

from cudakit.gpu.api.facts import RunContext


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Return a function that makes a healthy machine with changes: ``machine(variables={...})``."""

    def make(**changes: Any) -> RunContext:
        return machines.healthy_machine(machines.system(tmp_path), **changes)

    return make
