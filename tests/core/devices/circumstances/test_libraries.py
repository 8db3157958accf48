from __future__ import annotations

from pathlib import Path

from cudakit.core.devices.circumstances.files import Files
from cudakit.core.devices.circumstances.libraries import (
    Library,
    libraries,
    search_path,
    toolkit_directories,
)
from cudakit.core.devices.circumstances.packages import Distribution


def put(root: Path, *paths: str) -> Files:
    for path in paths:
        place = root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    return Files(root)


def found(files: Files, *, path: str = "", wheels: str = "") -> list[tuple[str, str]]:
    distributions = [Distribution("nvidia-cudnn-cu13", "9.19", wheels)] if wheels else []
    return [
        (one.source, one.path) for one in libraries(files, {"LD_LIBRARY_PATH": path}, distributions)
    ]


def test_copies_are_listed_as_the_loader_finds_them(tmp_path: Path) -> None:
    files = put(
        tmp_path,
        "/opt/mine/libcudnn.so.9",
        "/site/nvidia/cudnn/lib/libcudnn.so.9",
        "/usr/lib/x86_64-linux-gnu/libcudnn.so.9",
        "/usr/local/cuda-13.0/lib64/libcudart.so.13",
    )

    assert found(files, path="/opt/mine", wheels="/site") == [
        ("LD_LIBRARY_PATH", "/opt/mine/libcudnn.so.9"),
        ("package", "/site/nvidia/cudnn/lib/libcudnn.so.9"),
        ("system", "/usr/lib/x86_64-linux-gnu/libcudnn.so.9"),
        ("toolkit", "/usr/local/cuda-13.0/lib64/libcudart.so.13"),
    ]


def test_directories_that_the_loader_was_told_of_count(tmp_path: Path) -> None:
    files = put(tmp_path, "/opt/compat/libcuda.so.1", "/etc/ld.so.conf.d/00-compat.conf")
    (tmp_path / "etc/ld.so.conf.d/00-compat.conf").write_text("# compat\n/opt/compat/ # first\n")

    assert found(files) == [("system", "/opt/compat/libcuda.so.1")]


def test_only_the_name_that_programs_ask_for_counts(tmp_path: Path) -> None:
    names = ("libcudnn.so", "libcudnn.so.9", "libcudnn.so.9.19.0", "libcudnn_ops.so.9", "libm.so.6")
    files = put(tmp_path, *(f"/opt/{name}" for name in names))

    assert found(files, path="/opt") == [("LD_LIBRARY_PATH", "/opt/libcudnn.so.9")]


def test_links_are_followed(tmp_path: Path) -> None:
    files = put(tmp_path, "/opt/libcuda.so.580.159.04")
    (tmp_path / "opt/libcuda.so.1").symlink_to("libcuda.so.580.159.04")

    only = next(libraries(files, {"LD_LIBRARY_PATH": "/opt"}, []))

    assert only == Library(
        "libcuda.so.1", "/opt/libcuda.so.1", "/opt/libcuda.so.580.159.04", "LD_LIBRARY_PATH"
    )


def test_relative_and_empty_parts_of_the_search_path_are_left_out() -> None:
    assert search_path({"LD_LIBRARY_PATH": "/a/:lib::/b/../c"}) == ("/a", "/c")
    assert search_path({}) == ()


def test_links_between_toolkits_count_once(tmp_path: Path) -> None:
    files = put(tmp_path, "/usr/local/cuda-13.0/version.json")
    (tmp_path / "usr/local/cuda").symlink_to("cuda-13.0")

    assert toolkit_directories(files) == ("/usr/local/cuda-13.0",)
