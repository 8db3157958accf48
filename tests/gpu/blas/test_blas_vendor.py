"""What is said where a library is missing."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import pytest

from cudakit.errors import MissingDependency
from cudakit.gpu.blas.vendor import load_cupy, load_nvmath, load_torch


@pytest.mark.parametrize(
    ("package", "load", "commands"),
    [
        ("nvmath", load_nvmath, ("pip install 'nvmath-python>=1.0,<2'",)),
        ("torch", load_torch, ("pip install 'torch'",)),
        ("cupy", load_cupy, tuple(f"pip install 'cupy-cuda{release}x'" for release in (12, 13))),
    ],
)
def test_a_library_that_is_missing_is_named_with_what_to_install(
    package: str, load: Callable[[], object], commands: tuple[str, ...]
) -> None:
    if find_spec(package):
        pytest.skip(f"{package} is installed")
    with pytest.raises(MissingDependency, match="is not installed") as caught:
        load()
    assert package in caught.value.message
    assert caught.value.hint in commands
