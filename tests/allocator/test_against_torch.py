"""The same operations give equal statistics and snapshots in PyTorch's allocator and cudakit's, on a GPU."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).parents[2] / "scripts" / "compare_allocator.py"


@pytest.mark.timeout(900)
def test_every_scenario_is_equal_key_by_key(tmp_path: Path) -> None:
    """Run a script in a new process, in which PyTorch's allocator is unused."""
    pytest.importorskip("torch")
    path = tmp_path / "compared.json"

    completed = subprocess.run(
        [sys.executable, str(SCRIPT), "-o", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert path.exists(), completed.stderr
    comparison = json.loads(path.read_text(encoding="utf-8"))
    assert {
        row["name"]: row["problems"] for row in comparison["scenarios"] if row["problems"]
    } == {}
    assert completed.returncode == 0, completed.stderr


def test_snapshot_is_drawn_by_torchs_viewer() -> None:
    viewer = pytest.importorskip("torch.cuda._memory_viz")
    snapshot = pickle.loads(pickle.dumps(recorded()))  # noqa: S301

    for draw in (viewer.trace_plot, viewer.segment_plot):
        assert "<html" in draw(snapshot).lower() or "<script" in draw(snapshot)
    for describe in (viewer.segsum, viewer.trace):
        assert describe(snapshot)


def recorded() -> dict[str, Any]:
    """Return a snapshot with all kinds of entries."""
    from cudakit.allocator.allocator import DeviceCachingAllocator
    from cudakit.allocator.upstream import GpuUpstream
    from cudakit.gpu.cuda.device import Cuda

    allocator = DeviceCachingAllocator(GpuUpstream(Cuda(0)))
    allocator.record_history()
    blocks = [allocator.alloc(size) for size in (1, 700, 3 << 20, 30 << 20)]
    for ptr in blocks[::2]:
        allocator.free(ptr)
    snapshot = allocator.snapshot()
    for ptr in blocks[1::2]:
        allocator.free(ptr)
    allocator.close()
    return snapshot
