from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from record.fake_ptxas import fake_ptxas, search_only

from cudakit.errors import EnvironmentUnusable
from cudakit.record.installed import (
    AssemblerError,
    SearchPaths,
    find_assemblers,
    find_frame_readers,
    find_recorder,
    find_sanitizer_library,
)

LIBRARY = "libsanitizer-public.so"


def wheel(packages: Path, version: str) -> Path:
    """Create the files that the wheel of the Sanitizer API installs."""
    (packages / f"nvidia_cuda_sanitizer_api-{version}.dist-info").mkdir(parents=True)
    return library(packages / "nvidia" / "cu13")


def toolkit(directory: Path, version: str) -> Path:
    path = library(directory)
    components = {"cuda": {"version": "13.9"}, "cuda_sanitizer_api": {"version": version}}
    (directory / "version.json").write_text(json.dumps(components))
    return path


def library(directory: Path) -> Path:
    path = directory / "compute-sanitizer" / LIBRARY
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    return path


def paths(root: Path, *packages: Path, environment: Mapping[str, str] | None = None) -> SearchPaths:
    return SearchPaths(
        environment or {}, [str(package) for package in packages], root, root / "native"
    )


def test_library_of_wheel_is_found(tmp_path: Path) -> None:
    packages = tmp_path / "site-packages"
    path = wheel(packages, "13.5.25")

    library_found = find_sanitizer_library(paths(tmp_path, tmp_path / "missing", packages))

    assert (library_found.path, library_found.version) == (path, (13, 5, 25))


def test_newest_library_is_used(tmp_path: Path) -> None:
    wheel(tmp_path / "a", "13.4.99")
    newest = toolkit(tmp_path / "usr/local/cuda-13.10", "13.10.1")
    toolkit(tmp_path / "usr/local/cuda-13.0", "13.0.85")
    wheel(tmp_path / "b", "13.9.1")

    assert find_sanitizer_library(paths(tmp_path, tmp_path / "a", tmp_path / "b")).path == newest


def test_library_of_packages_is_preferred_to_toolkit_of_same_version(tmp_path: Path) -> None:
    toolkit(tmp_path / "usr/local/cuda", "13.5.25")
    path = wheel(tmp_path / "packages", "13.5.25")

    assert find_sanitizer_library(paths(tmp_path, tmp_path / "packages")).path == path


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_toolkit_of_environment_is_searched(tmp_path: Path, variable: str) -> None:
    path = toolkit(tmp_path / "elsewhere", "13.4.1")

    library_found = find_sanitizer_library(
        paths(tmp_path, environment={variable: str(tmp_path / "elsewhere")})
    )

    assert (library_found.path, library_found.version) == (path, (13, 4, 1))


@pytest.mark.parametrize(
    "directory",
    ["usr/local/cuda-13.4", "opt/cuda", "opt/nvidia/hpc_sdk/Linux_x86_64/26.1/cuda/13.4"],
)
def test_toolkits_are_found_in_standard_places(tmp_path: Path, directory: str) -> None:
    path = toolkit(tmp_path / directory, "13.4.1")

    assert find_sanitizer_library(paths(tmp_path)).path == path


def test_symlinked_toolkit_counts_once(tmp_path: Path) -> None:
    path = toolkit(tmp_path / "usr/local/cuda-13.4", "13.4.1")
    (tmp_path / "usr/local/cuda").symlink_to("cuda-13.4")

    assert find_sanitizer_library(paths(tmp_path)).path == path


def test_missing_library_error_names_the_extra(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnusable, match="is not installed") as refused:
        find_sanitizer_library(paths(tmp_path))

    assert refused.value.hint == "pip install 'cudakit[sanitize]'"


def test_old_library_error_names_version_and_path(tmp_path: Path) -> None:
    path = toolkit(tmp_path / "usr/local/cuda", "13.0.85")

    with pytest.raises(EnvironmentUnusable) as refused:
        find_sanitizer_library(paths(tmp_path))

    assert (
        refused.value.message
        == f"Sanitizer API 13.0.85 ({path}) is too old; version 13.4 or newer is required"
    )
    assert refused.value.hint == "pip install 'cudakit[sanitize]'"


def versions_by_name(path: Path) -> dict[str, str]:
    return {"CUDAKIT_SANITIZER_LIBRARY": str(path)}


def test_library_of_override_variable_is_used(tmp_path: Path) -> None:
    wheel(tmp_path / "packages", "13.9.1")
    path = wheel(tmp_path / "named", "13.4.2")

    library_found = find_sanitizer_library(
        paths(tmp_path, tmp_path / "packages", environment=versions_by_name(path))
    )

    assert (library_found.path, library_found.version) == (path, (13, 4, 2))


def test_named_library_of_unknown_version_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "mine.so"
    path.write_bytes(b"")

    library_found = find_sanitizer_library(paths(tmp_path, environment=versions_by_name(path)))

    assert (library_found.path, library_found.version) == (path, ())
    assert "unknown version" in str(library_found)


def test_missing_named_library_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnusable, match=r"mine\.so.*not a file"):
        find_sanitizer_library(paths(tmp_path, environment=versions_by_name(tmp_path / "mine.so")))


def test_old_named_library_error_names_the_variable(tmp_path: Path) -> None:
    path = toolkit(tmp_path / "old", "12.9.1")

    with pytest.raises(EnvironmentUnusable, match="too old") as refused:
        find_sanitizer_library(paths(tmp_path, environment=versions_by_name(path)))

    assert "CUDAKIT_SANITIZER_LIBRARY" in refused.value.hint


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"cuda_sanitizer_api": null}', "\ud800"])
def test_damaged_version_json_is_unknown_version(tmp_path: Path, content: str) -> None:
    library(tmp_path / "usr/local/cuda")
    (tmp_path / "usr/local/cuda/version.json").write_text(content, errors="surrogatepass")

    assert find_sanitizer_library(paths(tmp_path)).version == ()


@pytest.mark.parametrize("directory", ["usr/local/cuda-13.4", "opt/nvidia/hpc_sdk/a/b/cuda/13.4"])
def test_toolkit_version_falls_back_to_directory_name(tmp_path: Path, directory: str) -> None:
    path = library(tmp_path / directory)
    link = tmp_path / "linked.so"
    link.symlink_to(path)

    assert find_sanitizer_library(paths(tmp_path)).version == (13, 4)
    assert find_sanitizer_library(paths(tmp_path, environment=versions_by_name(link))).version == (
        13,
        4,
    )


def test_library_headers_are_found_next_to_the_library(tmp_path: Path) -> None:
    path = wheel(tmp_path / "packages", "13.5.25")
    include = path.parent / "include"
    include.mkdir()
    for name in ("sanitizer_callbacks.h", "sanitizer_stream.h", "generated_cuda_meta.h"):
        (include / name).write_text("")

    headers = find_sanitizer_library(paths(tmp_path, tmp_path / "packages")).headers

    assert [path.name for path in headers] == ["sanitizer_callbacks.h", "sanitizer_stream.h"]


def test_missing_recorder_error_names_the_compiler(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnusable, match="no C compiler was found") as refused:
        find_recorder(paths(tmp_path))

    assert "install a C compiler" in refused.value.hint
    assert "pip install --force-reinstall --no-binary cudakit cudakit" in refused.value.hint


def test_native_modules_are_found_beside_the_package(tmp_path: Path) -> None:
    native = tmp_path / "native"
    native.mkdir()
    names = [
        "_recorder.abi3.so",
        "_frames.cpython-311-x86_64-linux-gnu.so",
        "_frames.cpython-314-aarch64-linux-gnu.so",
        "_frames.c",
    ]
    for name in names:
        (native / name).write_bytes(b"")

    assert find_recorder(paths(tmp_path)) == native / "_recorder.abi3.so"
    assert find_frame_readers(paths(tmp_path)) == {
        "cpython-311": native / names[1],
        "cpython-314": native / names[2],
    }


def test_frame_readers_may_be_missing(tmp_path: Path) -> None:
    assert find_frame_readers(paths(tmp_path)) == {}


def test_assemblers_are_found_newest_first(tmp_path: Path) -> None:
    site = tmp_path / "site"
    expected = [
        fake_ptxas(site / "nvidia/cu13/bin/ptxas", "13.10", behaviour="exit 1"),
        fake_ptxas(tmp_path / "home/bin/ptxas", "13.9", behaviour="exit 1"),
        fake_ptxas(tmp_path / "opt/cuda/bin/ptxas", "13.2", behaviour="exit 1"),
        fake_ptxas(site / "triton/backends/nvidia/bin/ptxas-blackwell", "13.1", behaviour="exit 1"),
        fake_ptxas(site / "torch/bin/ptxas", "12.9", behaviour="exit 1"),
        fake_ptxas(site / "triton/backends/nvidia/bin/ptxas", "12.8", behaviour="exit 1"),
        fake_ptxas(site / "nvidia/cuda_nvcc/bin/ptxas", "12.6", behaviour="exit 1"),
    ]
    fake_ptxas(tmp_path / "broken/bin/ptxas", "13.99", behaviour="exit 1").write_text(
        "#!/bin/sh\nexit 1\n"
    )
    (tmp_path / "linked").symlink_to(site / "torch/bin")
    environment = {
        "CUDA_HOME": str(tmp_path / "home"),
        "CUDA_PATH": str(tmp_path / "broken"),
        "PATH": f"{tmp_path / 'linked'}::{tmp_path / 'missing'}",
    }
    assemblers = find_assemblers(
        SearchPaths(environment, (str(site), str(tmp_path / "missing")), tmp_path)
    )
    assert [assembler.path for assembler in assemblers] == expected
    assert assemblers[0].version == (13, 10, 7)


def test_named_assembler_that_does_not_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnusable, match=r"CUDAKIT_PTXAS is .*/none'.* does not run"):
        find_assemblers(search_only(tmp_path, CUDAKIT_PTXAS=str(tmp_path / "none")))


def test_assembler_error_has_its_output(tmp_path: Path) -> None:
    ptxas = fake_ptxas(tmp_path / "ptxas", "13.0", behaviour="echo because >&2; exit 3")
    (assembler,) = find_assemblers(search_only(tmp_path, CUDAKIT_PTXAS=str(ptxas)))
    with pytest.raises(AssemblerError, match="because"):
        assembler.assemble(b"", "sm_90")
