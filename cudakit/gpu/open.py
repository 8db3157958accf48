"""Opens the device for a value of ``--gpu``."""

from __future__ import annotations

from cudakit.gpu.api import Gpu
from cudakit.gpu.machine import DEFAULT_MODEL, unknown_choice


def open_gpu(name: str = "auto", ordinal: int = 0) -> Gpu:
    """Open a real device (``auto``, ``cuda``) or a simulated one (``sim``, ``sim:MODEL``).

    ``ordinal`` is the CUDA device index. ``auto`` never falls back to simulation. Raises EnvironmentUnusable
    without a GPU, UsageError for an unknown name or model.
    """
    device_kind, _, model = name.partition(":")
    if device_kind == "sim":
        from cudakit.gpu.sim import Sim

        return Sim(model or DEFAULT_MODEL, ordinal=ordinal)
    if name not in ("auto", "cuda"):
        raise unknown_choice(name)
    from cudakit.gpu.cuda.device import Cuda

    return Cuda(ordinal)
