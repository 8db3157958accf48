"""The title of every Document about devices."""

from __future__ import annotations

from cudakit.core.devices.result import DevicesResult
from cudakit.units import Unavailable


def title(result: DevicesResult) -> str:
    """Say first of all whether this is real, then with which driver."""
    words = ["Simulated GPUs" if result.simulated else "GPUs of this machine"]
    if isinstance(result.driver_version, str):
        words.append(f"driver {result.driver_version}")
    if not isinstance(result.cuda, Unavailable) and isinstance(result.cuda.version, str):
        words.append(f"CUDA {result.cuda.version}")
    return ", ".join(words)
