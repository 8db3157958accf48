"""Runs the programs of examples/allocator on a real device."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from arrays.plugs.viewers import opened_by_all
from numba_ready import WHY_NOT, numba_is_ready

pytestmark = pytest.mark.gpu

EXAMPLES = Path(__file__).parents[3] / "examples" / "allocator"


@pytest.mark.parametrize(
    ("program", "package", "file_name"),
    [
        ("use_cupy.py", "cupy", "allocator-cupy.pickle"),
        ("use_numba.py", "numba", "allocator-numba.pickle"),
        ("use_cuda_core.py", "cuda", "allocator-cuda-core.pickle"),
    ],
)
def test_example_runs_and_writes_a_snapshot(
    program: str, package: str, file_name: str, tmp_path: Path
) -> None:
    if find_spec(package) is None:
        pytest.skip(f"needs {package}")
    if package == "numba" and not numba_is_ready():
        pytest.skip(WHY_NOT)
    result = subprocess.run(
        [sys.executable, "-P", EXAMPLES / program],
        cwd=tmp_path,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=110,
    )

    assert result.returncode == 0, result.stderr
    first, second, third = result.stdout.splitlines()
    assert first.startswith("allocations: ")
    assert second.endswith("MiB allocated")
    assert third.endswith("MiB reserved")
    opened_by_all(pickle.loads((tmp_path / file_name).read_bytes()), tmp_path)  # noqa: S301


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        "use_cupy.py",
        "use_numba.py",
        "use_cuda_core.py",
    }
