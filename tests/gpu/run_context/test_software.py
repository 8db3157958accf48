from __future__ import annotations

from pathlib import Path

import pytest

from cudakit.gpu.api.run_context import Build, Distribution, Library
from cudakit.gpu.run_context.files import Files
from cudakit.gpu.run_context.software import (
    framework_builds,
    installed_packages,
    ld_library_path,
    libraries,
    toolkit_directories,
)


def test_packages_are_listed_in_order_of_path(tmp_path: Path) -> None:
    for name in (
        "first/nvidia_ml_py-13.615.71.dist-info",
        "first/README",
        "second/Torch.Extra-2.0-py3.11.egg-info",
    ):
        (tmp_path / name).mkdir(parents=True)
    path = [str(tmp_path / "second"), str(tmp_path / "absent"), str(tmp_path / "first")]

    assert list(installed_packages(path)) == [
        Distribution("torch-extra", "2.0", path[0]),
        Distribution("nvidia-ml-py", "13.615.71", path[2]),
    ]


def test_editable_package_has_version_of_pkg_info(tmp_path: Path) -> None:
    (tmp_path / "cudakit.egg-info").mkdir()
    (tmp_path / "cudakit.egg-info/PKG-INFO").write_text("Name: cudakit\nVersion: 0.1.0\n\n")

    assert next(installed_packages([str(tmp_path)])).version == "0.1.0"


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
def test_torch_build_is_read_from_version_file(
    tmp_path: Path, line: str, cuda: tuple[int, int] | None
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/version.py").write_text(f"__version__ = '2.11.0'\ndebug = False\n{line}\n")

    listed_builds = list(framework_builds([Distribution("torch", "2.11.0", str(tmp_path))]))

    assert listed_builds == [Build("torch", "2.11.0", cuda)]


@pytest.mark.parametrize(("version", "cuda"), [("2.11.0+cu128", (12, 8)), ("2.11.0+cpu", None)])
def test_torch_build_is_read_from_version_without_file(
    tmp_path: Path, version: str, cuda: tuple[int, int] | None
) -> None:
    listed_builds = list(framework_builds([Distribution("torch", version, str(tmp_path))]))

    assert listed_builds == [Build("torch", version, cuda)]


def test_builds_of_other_frameworks_are_read_from_names(tmp_path: Path) -> None:
    names = ("cupy-cuda13x", "jax-cuda12-plugin", "jax-cuda12-pjrt", "numpy")

    listed_builds = framework_builds(Distribution(name, "1.0", str(tmp_path)) for name in names)

    assert [(build.framework, build.cuda) for build in listed_builds] == [
        ("cupy-cuda13x", (13, None)),
        ("jax-cuda12-plugin", (12, None)),
    ]


# --- libraries and toolkits ------------------------------------------------------------------------


def make_files(root: Path, *paths: str) -> Files:
    for path in paths:
        path = root / path.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return Files(root)


def listed_libraries(files: Files, *, path: str = "", wheels: str = "") -> list[tuple[str, str]]:
    distributions = [Distribution("nvidia-cudnn-cu13", "9.19", wheels)] if wheels else []
    return [
        (library.source, library.path)
        for library in libraries(files, {"LD_LIBRARY_PATH": path}, distributions)
    ]


def test_libraries_are_listed_in_order_of_loader(tmp_path: Path) -> None:
    files = make_files(
        tmp_path,
        "/opt/mine/libcudnn.so.9",
        "/site/nvidia/cudnn/lib/libcudnn.so.9",
        "/usr/lib/x86_64-linux-gnu/libcudnn.so.9",
        "/usr/local/cuda-13.0/lib64/libcudart.so.13",
    )

    assert listed_libraries(files, path="/opt/mine", wheels="/site") == [
        ("LD_LIBRARY_PATH", "/opt/mine/libcudnn.so.9"),
        ("package", "/site/nvidia/cudnn/lib/libcudnn.so.9"),
        ("system", "/usr/lib/x86_64-linux-gnu/libcudnn.so.9"),
        ("toolkit", "/usr/local/cuda-13.0/lib64/libcudart.so.13"),
    ]


def test_directories_of_ld_so_conf_are_searched(tmp_path: Path) -> None:
    files = make_files(tmp_path, "/opt/compat/libcuda.so.1", "/etc/ld.so.conf.d/00-compat.conf")
    (tmp_path / "etc/ld.so.conf.d/00-compat.conf").write_text("# compat\n/opt/compat/ # first\n")

    assert listed_libraries(files) == [("system", "/opt/compat/libcuda.so.1")]


def test_only_sonames_are_listed(tmp_path: Path) -> None:
    names = ("libcudnn.so", "libcudnn.so.9", "libcudnn.so.9.19.0", "libcudnn_ops.so.9", "libm.so.6")
    files = make_files(tmp_path, *(f"/opt/{name}" for name in names))

    assert listed_libraries(files, path="/opt") == [("LD_LIBRARY_PATH", "/opt/libcudnn.so.9")]


def test_symbolic_links_of_libraries_are_resolved(tmp_path: Path) -> None:
    files = make_files(tmp_path, "/opt/libcuda.so.580.159.04")
    (tmp_path / "opt/libcuda.so.1").symlink_to("libcuda.so.580.159.04")

    found_library = next(libraries(files, {"LD_LIBRARY_PATH": "/opt"}, []))

    assert found_library == Library(
        "libcuda.so.1", "/opt/libcuda.so.1", "/opt/libcuda.so.580.159.04", "LD_LIBRARY_PATH"
    )


def test_relative_and_empty_parts_of_search_path_are_ignored() -> None:
    assert ld_library_path({"LD_LIBRARY_PATH": "/a/:lib::/b/../c"}) == ("/a", "/c")
    assert ld_library_path({}) == ()


def test_linked_toolkits_are_listed_once(tmp_path: Path) -> None:
    files = make_files(tmp_path, "/usr/local/cuda-13.0/version.json")
    (tmp_path / "usr/local/cuda").symlink_to("cuda-13.0")

    assert toolkit_directories(files) == ("/usr/local/cuda-13.0",)
