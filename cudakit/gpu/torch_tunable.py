"""What an installed torch asks of a file of tuned operations before it uses it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from cudakit.errors import MissingDependency, Unsupported

# The first that tunes cuBLASLt (its wheel, ATen/cuda/tunable/GemmCublaslt.h).
FIRST_TORCH = "2.15"


def torch_validators() -> Mapping[str, str]:
    """Return the validators of torch (``torch.cuda.tunable.get_validators``), by name.

    Raises MissingDependency without torch, Unsupported where it is built without CUDA.
    """
    try:
        torch = import_module("torch")
    except ImportError:
        raise MissingDependency(
            "torch", purpose="a file for it", requirement=f"torch>={FIRST_TORCH}"
        ) from None
    try:
        pairs = import_module("torch.cuda.tunable").get_validators()
    except (AttributeError, ImportError, RuntimeError):
        raise Unsupported(
            f"torch {torch.__version__} is built without CUDA, and tunes nothing",
            hint=f"install a torch {FIRST_TORCH} or newer for CUDA",
        ) from None
    return {str(name): str(value) for name, value in pairs}
