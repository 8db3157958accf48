"""Opens snapshots in all viewers: memviz, and PyTorch's viewer if torch is installed."""

from __future__ import annotations

import pickle
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cudakit


def opened_by_all(snapshot: dict[str, Any], directory: Path) -> Any:
    """Open a snapshot in all viewers, and return memviz's result of its first device with events."""
    path = directory / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot))
    if find_spec("torch") is not None:
        _opened_by_torch(snapshot)
    result = cudakit.memviz(path)
    return next(device for device in result.devices if device.holders)


def _opened_by_torch(snapshot: dict[str, Any]) -> None:
    from torch.cuda import _memory_viz

    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "<script" in plot(snapshot)
