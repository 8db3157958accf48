from __future__ import annotations

from pathlib import Path

import pytest

from cudakit.core.devices.circumstances.packages import (
    Build,
    Distribution,
    builds,
    cuda_major,
    installed,
)


def test_packages_are_listed_in_the_order_of_the_path(tmp_path: Path) -> None:
    for name in (
        "first/nvidia_ml_py-13.615.71.dist-info",
        "first/README",
        "second/Torch.Extra-2.0-py3.11.egg-info",
    ):
        (tmp_path / name).mkdir(parents=True)
    path = [str(tmp_path / "second"), str(tmp_path / "absent"), str(tmp_path / "first")]

    assert list(installed(path)) == [
        Distribution("torch-extra", "2.0", path[0]),
        Distribution("nvidia-ml-py", "13.615.71", path[2]),
    ]


def test_a_package_that_is_worked_on_tells_its_version_inside(tmp_path: Path) -> None:
    (tmp_path / "cudakit.egg-info").mkdir()
    (tmp_path / "cudakit.egg-info/PKG-INFO").write_text("Name: cudakit\nVersion: 0.1.0\n\n")

    assert next(installed([str(tmp_path)])).version == "0.1.0"


@pytest.mark.parametrize(
    ("line", "cuda"),
    [
        ("cuda: Optional[str] = '13.0'", (13, 0)),
        ("cuda = '12.1'", (12, 1)),
        ('cuda: str | None = "12.8"', (12, 8)),
        ("cuda: Optional[str] = None", None),
        ("hip: Optional[str] = '6.2'", None),
    ],
)
def test_torch_tells_its_cuda_without_being_imported(
    tmp_path: Path, line: str, cuda: tuple[int, int] | None
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/version.py").write_text(f"__version__ = '2.11.0'\ndebug = False\n{line}\n")

    found = list(builds([Distribution("torch", "2.11.0", str(tmp_path))]))

    assert found == [Build("torch", "2.11.0", cuda)]


@pytest.mark.parametrize(("version", "cuda"), [("2.11.0+cu128", (12, 8)), ("2.11.0+cpu", None)])
def test_without_its_version_file_the_version_of_torch_tells(
    tmp_path: Path, version: str, cuda: tuple[int, int] | None
) -> None:
    found = list(builds([Distribution("torch", version, str(tmp_path))]))

    assert found == [Build("torch", version, cuda)]


def test_names_tell_the_cuda_of_other_frameworks(tmp_path: Path) -> None:
    names = ("cupy-cuda13x", "jax-cuda12-plugin", "jax-cuda12-pjrt", "numpy")

    found = builds(Distribution(name, "1.0", str(tmp_path)) for name in names)

    assert [(build.framework, build.cuda) for build in found] == [
        ("cupy-cuda13x", (13, None)),
        ("jax-cuda12-plugin", (12, None)),
    ]


@pytest.mark.parametrize(
    ("name", "major"), [("cupy-cuda12x", 12), ("nvidia-cublas-cu13", 13), ("cuda-bindings", None)]
)
def test_a_name_may_end_in_a_cuda(name: str, major: int | None) -> None:
    assert cuda_major(name) == major
