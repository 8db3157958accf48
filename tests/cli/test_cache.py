"""``cudakit cache`` from end to end, without a GPU."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest
from gpu.test_compile import needs_nvrtc
from invocation import Cli

import cudakit.arrays
from cudakit.cli.cache import _compile_functions
from cudakit.gpu.compile import CompileCache, Label

HAS_DEVICE = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUDAKIT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


def fill(directory: Path) -> None:
    cache = CompileCache(directory)
    cache.keep("a", b"image", Label("add, subtract", "sm_90", "NVRTC 13.0"))
    cache.keep("b", b"other image", Label("add", "sm_80", "NVRTC 13.0"))


def test_empty_cache_is_shown_with_its_directory_and_limit(directory: Path, cli: Cli) -> None:
    done = cli("cache", "show", "--json")

    result = json.loads(done.stdout)
    assert done.exit_code == 0
    assert (result["schema"], result["images"], result["size_bytes"]) == ("cudakit.cache/1", [], 0)
    assert result["directory"] == str(directory)
    assert result["max_bytes"] == 256 << 20


def test_images_are_shown_by_kernel_and_target(directory: Path, cli: Cli) -> None:
    fill(directory)

    done = cli("cache", "show")

    assert done.stdout.startswith("2 files with compiled kernels, ")
    assert "add and 1 more" in done.stdout
    assert "sm_80" in done.stdout


def test_cleared_cache_is_empty(directory: Path, cli: Cli) -> None:
    fill(directory)

    done = cli("cache", "clear", "-q")
    second_run = cli("cache", "clear", "-q")

    assert (done.exit_code, second_run.exit_code) == (0, 0)
    assert done.stdout.startswith("Deleted 2 files, ")
    assert second_run.stdout == "Deleted 0 files, 0 B\n"
    assert [*directory.iterdir()] == []


def test_cache_that_others_can_write_is_refused(directory: Path, cli: Cli) -> None:
    fill(directory)
    directory.chmod(0o777)

    shown, cleared = cli("cache", "show"), cli("cache", "clear")

    assert (shown.exit_code, cleared.exit_code) == (3, 3)
    assert "CUDAKIT_CACHE_DIR" in shown.stderr
    assert len([*directory.iterdir()]) == 2


@pytest.mark.usefixtures("directory")
@pytest.mark.parametrize("architecture", ["x", "sm_", "9.0.0", "sm_9000"])
def test_wrong_architecture_is_a_usage_error(architecture: str, cli: Cli) -> None:
    done = cli("cache", "warm", "--arch", architecture)

    assert done.exit_code == 2
    assert architecture in done.stderr


@pytest.mark.skipif(HAS_DEVICE, reason="there is a CUDA device")
@pytest.mark.usefixtures("directory")
def test_machine_without_a_gpu_is_an_unusable_environment(cli: Cli) -> None:
    done = cli("cache", "warm")

    assert done.exit_code == 3
    assert "hint: give the architectures: --arch" in done.stderr


@needs_nvrtc
@pytest.mark.usefixtures("directory")
def test_warmed_cache_has_all_kernels_of_each_architecture(cli: Cli) -> None:
    done = cli("cache", "warm", "--arch", "sm_80", "--arch", "9.0", "--json")
    too_old = cli("cache", "warm", "--arch", "sm_30", "-q")

    result = json.loads(done.stdout)
    assert {image["target"] for image in result["images"]} == {"sm_80", "sm_90"}
    kernels = ", ".join(image["kernels"] for image in result["images"])
    assert "cudakit_random_uniform_float32" in kernels
    assert "cudakit_nonfinite_float32" in kernels
    assert [warmed["target"] for warmed in result["warmed"]] == ["sm_80", "sm_90"]
    assert too_old.exit_code == 1
    assert "sm_30" in too_old.stdout


@needs_nvrtc
@pytest.mark.usefixtures("directory")
def test_files_of_one_architecture_are_shown_with_different_names(cli: Cli) -> None:
    warmed = cli("cache", "warm", "--arch", "sm_90", "-q", "--json")

    names = [image["kernels"] for image in json.loads(warmed.stdout)["images"]]
    assert len(names) == len(set(names))
    assert "random in CUDA graphs " in " ".join(cli("cache", "show").stdout.split())


@needs_nvrtc
@pytest.mark.usefixtures("directory")
def test_architecture_without_a_device_patch_is_warmed_without_it(cli: Cli) -> None:
    done = cli("cache", "warm", "--arch", "sm_75")

    report = " ".join(done.stdout.split())
    assert done.exit_code == 0
    assert report.startswith(
        "Compiled kernels in the cache: 10 files for sm_75 (one file per source)"
    )
    assert "sm_75: the device patch of run --sanitize needs compute capability 8.0" in report
    assert "infers accesses from kernel arguments; everything else is compiled" in report


@needs_nvrtc
def test_cache_that_cannot_be_written_is_an_unusable_environment(directory: Path, cli: Cli) -> None:
    directory.parent.mkdir(parents=True)
    directory.write_text("a file in place of the directory")

    done = cli("cache", "warm", "--arch", "sm_90")

    assert done.exit_code == 3
    assert str(directory) in done.stderr
    assert "CUDAKIT_CACHE_DIR" in done.stderr


def test_sources_to_compile_are_those_of_all_modules_with_kernels(directory: Path) -> None:
    modules = [
        import_module(f"cudakit.arrays.{module.name}")
        for module in iter_modules(cudakit.arrays.__path__)
    ]
    sources = {
        text
        for module in modules
        for text in (getattr(module, "SOURCE", ""), getattr(module, "STORED_COUNTER_SOURCE", ""))
        if "__global__" in text
    }

    functions = _compile_functions(CompileCache(directory))

    compiled_sources = {function.args[0] for function in functions.values() if function.args}
    assert sources <= compiled_sources
    assert len(functions) == len(sources) + 2  # the self-test and the device patch
