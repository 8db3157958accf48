"""The examples of the public functions run."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import cudakit

ROOT = Path(__file__).parents[1]


def test_examples_of_the_memory_calls_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    module = importlib.import_module("cudakit.api.memory")
    results = doctest.testmod(module, extraglobs={"cudakit": cudakit})

    assert results.attempted >= 6
    assert results.failed == 0


@pytest.mark.parametrize(
    ("module", "count"),
    [
        ("arrays.kernels", 12),
        ("arrays.cuda_kernel", 7),
        ("arrays.softmax", 2),
        ("api.profile", 3),
        ("gpu.device_array", 3),
    ],
)
def test_examples_of_kernels_run(module: str, count: int) -> None:
    results = doctest.testmod(
        importlib.import_module(f"cudakit.{module}"), extraglobs={"cudakit": cudakit}
    )

    assert results.attempted >= count
    assert results.failed == 0


def test_path_object_is_accepted_like_a_string() -> None:
    path = ROOT / "tests" / "data" / "oom.pkl.gz"

    assert cudakit.memviz(path) is not None
    assert cudakit.load_snapshot(path).source == str(path)


def test_bad_file_raises_the_public_error() -> None:
    with pytest.raises(cudakit.SnapshotError, match="does not exist"):
        cudakit.load_snapshot("no-such-file.pkl")
