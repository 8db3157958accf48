from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ASK = """
import json
from cudakit.errors import CudakitError
from cudakit.gpu.torch_tunable import torch_validators
try:
    print(json.dumps(dict(torch_validators())))
except CudakitError as error:
    print(json.dumps([type(error).__name__, error.message, error.hint]))
"""
WITH_CUDA = (
    "def get_validators():\n    return (('PT_VERSION', '2.15.0'), ('CUBLASLT_VERSION', 130400))\n"
)
WITHOUT_CUDA = "def get_validators():\n    raise AttributeError('_cuda_tunableop_get_validators')\n"


def ask(tmp_path: Path, tunable: str | None) -> object:
    """Ask in a process whose torch is a few files, or that has none."""
    package = tmp_path / "torch"
    (package / "cuda").mkdir(parents=True)
    if tunable is None:
        (package / "__init__.py").write_text("raise ImportError('there is none')\n")
    else:
        (package / "__init__.py").write_text("__version__ = '2.15.0'\n")
        (package / "cuda" / "__init__.py").write_text("")
        (package / "cuda" / "tunable.py").write_text(tunable)
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    return json.loads(done.stdout)


def test_the_validators_of_torch_are_words(tmp_path: Path) -> None:
    assert ask(tmp_path, WITH_CUDA) == {"PT_VERSION": "2.15.0", "CUBLASLT_VERSION": "130400"}


def test_a_torch_without_cuda_has_none(tmp_path: Path) -> None:
    kind, message, hint = ask(tmp_path, WITHOUT_CUDA)  # type: ignore[misc]

    assert kind == "Unsupported"
    assert "torch 2.15.0 is built without CUDA" in message
    assert "for CUDA" in hint


def test_without_torch_the_way_to_install_it_is_said(tmp_path: Path) -> None:
    kind, message, hint = ask(tmp_path, None)  # type: ignore[misc]

    assert kind == "MissingDependency"
    assert "torch is not installed" in message
    assert hint == "pip install 'torch>=2.15'"


@pytest.mark.gpu
def test_a_real_torch_names_what_a_file_for_it_needs() -> None:
    pytest.importorskip("torch", minversion="2.15")
    done = subprocess.run([sys.executable, "-c", ASK], check=True, capture_output=True, text=True)

    assert json.loads(done.stdout).keys() >= {"PT_VERSION", "CUBLASLT_VERSION"}
