"""Loading of vendor libraries: errors for missing ones, and torch's tuning validators."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from cudakit.errors import MissingDependency
from cudakit.gpu.vendor import load_cupy, load_nvmath, load_torch


@pytest.mark.parametrize(
    ("package", "load_library", "commands"),
    [
        ("nvmath", load_nvmath, ("pip install 'nvmath-python>=1.0,<2'",)),
        ("torch", load_torch, ("pip install 'torch'",)),
        ("cupy", load_cupy, tuple(f"pip install 'cupy-cuda{release}x'" for release in (12, 13))),
    ],
)
def test_missing_library_is_named_with_install_command(
    package: str, load_library: Callable[[], object], commands: tuple[str, ...]
) -> None:
    if find_spec(package):
        pytest.skip(f"{package} is installed")
    with pytest.raises(MissingDependency, match="is not installed") as caught:
        load_library()
    assert package in caught.value.message
    assert caught.value.hint in commands


# --- torch.cuda.tunable
ASK = """
import json
from cudakit.errors import CudakitError
from cudakit.gpu.vendor import torch_validators
try:
    print(json.dumps(dict(torch_validators())))
except CudakitError as error:
    print(json.dumps([type(error).__name__, error.message, error.hint]))
"""
WITH_CUDA = (
    "def get_validators():\n    return (('PT_VERSION', '2.15.0'), ('CUBLASLT_VERSION', 130400))\n"
)
WITHOUT_CUDA = "def get_validators():\n    raise AttributeError('_cuda_tunableop_get_validators')\n"


def run_script(tmp_path: Path, tunable: str | None) -> object:
    """Run in a process with a fake torch, or without one."""
    package = tmp_path / "torch"
    (package / "cuda").mkdir(parents=True)
    if tunable is None:
        (package / "__init__.py").write_text("raise ImportError('there is none')\n")
    else:
        (package / "__init__.py").write_text("__version__ = '2.15.0'\n")
        (package / "cuda" / "__init__.py").write_text("")
        (package / "cuda" / "tunable.py").write_text(tunable)
    completed = subprocess.run(
        [sys.executable, "-c", ASK],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    return json.loads(completed.stdout)


def test_torch_validators_are_strings(tmp_path: Path) -> None:
    assert run_script(tmp_path, WITH_CUDA) == {"PT_VERSION": "2.15.0", "CUBLASLT_VERSION": "130400"}


def test_torch_without_cuda_has_no_validators(tmp_path: Path) -> None:
    kind, message, hint = run_script(tmp_path, WITHOUT_CUDA)  # type: ignore[misc]

    assert kind == "Unsupported"
    assert "torch 2.15.0 is built without CUDA" in message
    assert "for CUDA" in hint


def test_missing_torch_gives_install_command(tmp_path: Path) -> None:
    kind, message, hint = run_script(tmp_path, None)  # type: ignore[misc]

    assert kind == "MissingDependency"
    assert "torch is not installed" in message
    assert hint == "pip install 'torch>=2.15'"


@pytest.mark.gpu
def test_installed_torch_lists_validators() -> None:
    pytest.importorskip("torch", minversion="2.15")
    completed = subprocess.run(
        [sys.executable, "-c", ASK], check=True, capture_output=True, text=True
    )

    assert json.loads(completed.stdout).keys() >= {"PT_VERSION", "CUBLASLT_VERSION"}
