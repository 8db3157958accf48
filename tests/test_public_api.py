from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

import pytest

import cudakit


def test_public_names_are_listed_once_and_sorted() -> None:
    assert cudakit.__all__ == sorted(set(cudakit.__all__))


def test_every_public_name_has_a_defining_module() -> None:
    assert set(cudakit.__all__) == {"__version__", *cudakit._MODULES}


@pytest.mark.parametrize("name", cudakit.__all__)
def test_public_name_is_that_of_its_defining_module(name: str) -> None:
    public = getattr(cudakit, name)

    assert name in dir(cudakit)
    if name in cudakit._MODULES:
        assert public is getattr(importlib.import_module(cudakit._MODULES[name]), name)


def test_version_is_that_of_the_installed_package() -> None:
    assert cudakit.__version__ == version("cudakit")


def test_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'cudakit' has no attribute 'gpus'"):
        _ = cudakit.gpus  # type: ignore[attr-defined]


def test_import_of_the_package_imports_no_submodule() -> None:
    script = "import sys, cudakit; print([m for m in sys.modules if m.startswith('cudakit.')])"
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], check=True, capture_output=True, text=True
    )

    assert done.stdout == "[]\n"


def test_installed_package_is_marked_as_typed() -> None:
    assert (files("cudakit") / "py.typed").is_file()


def test_installed_package_has_every_asset() -> None:
    source = Path(__file__).parent.parent / "cudakit" / "report" / "assets"
    installed = files("cudakit") / "report" / "assets"

    names = {place.name for place in source.iterdir() if place.is_file()}
    assert names == {place.name for place in installed.iterdir()}
    assert names
