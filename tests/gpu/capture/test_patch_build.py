"""The patch is built from source with what is at hand, once, or it is said what is missing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cudakit.errors import CudaError, EnvironmentUnusable, MissingDependency
from cudakit.gpu.capture.locate import Places
from cudakit.gpu.capture.patch.build import build_patch
from cudakit.gpu.capture.patch.ptxas import Refused, assemblers
from cudakit.gpu.compile import compile_cuda
from cudakit.gpu.compile_cache import CompileCache

ELF = b"\x7fELF"
FUNCTIONS = (
    b"ck_memory_access",
    b"ck_copy_async",
    b"ck_bulk_load",
    b"ck_bulk_store",
    b"ck_bulk_reduction",
    b"ck_tensor_load",
    b"ck_tensor_store",
)


@pytest.fixture
def nvrtc() -> None:
    try:
        compile_cuda("", (9, 0))
    except MissingDependency as missing:
        pytest.skip(missing.message)


@pytest.fixture
def real_ptxas() -> Path:
    found = shutil.which("ptxas")
    if not found:
        pytest.skip("there is no ptxas in PATH")
    return Path(found)


def nowhere(root: Path, **environment: str) -> Places:
    return Places(environment, (), root)


def pretend(path: Path, version: str, *, then: str) -> Path:
    """Make a ptxas that tells a version and does something else for any other question."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'#!/bin/sh\ncase "$1" in --version) echo "Cuda compilation tools, release'
        f' {version}, V{version}.7";; *) {then};; esac\n'
    )
    path.chmod(0o755)
    return path


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
@pytest.mark.parametrize("options", [(), ("-DCK_NO_CALLS",)])
def test_the_patch_is_assembled_for_each_architecture(
    real_ptxas: Path, tmp_path: Path, capability: tuple[int, int], options: tuple[str, ...]
) -> None:
    places = nowhere(tmp_path, CUDAKIT_PTXAS=str(real_ptxas))
    image = build_patch(capability, places=places, options=options)
    assert image.startswith(ELF)
    assert all(b"\0" + name + b"\0" in image for name in FUNCTIONS)


@pytest.mark.usefixtures("nvrtc")
def test_what_was_built_once_is_not_built_again(tmp_path: Path) -> None:
    places = nowhere(
        tmp_path, PATH=str(pretend(tmp_path / "bin/ptxas", "13.9", then='printf once >"$5"').parent)
    )
    cache = CompileCache(tmp_path / "cache")
    assert build_patch((9, 0), places=places, cache=cache) == b"once"
    pretend(tmp_path / "bin/ptxas", "13.9", then='printf twice >"$5"')
    assert build_patch((9, 0), places=places, cache=cache) == b"once"
    assert build_patch((8, 0), places=places, cache=cache) == b"twice"
    assert build_patch((9, 0), places=places, cache=cache, options=("-DX",)) == b"twice"
    pretend(tmp_path / "bin/ptxas", "14.0", then='printf newer >"$5"')
    assert build_patch((9, 0), places=places, cache=cache) == b"newer"


@pytest.mark.usefixtures("nvrtc")
def test_an_assembler_that_refuses_is_passed_over(tmp_path: Path) -> None:
    for version, then in (
        ("13.9", "echo it is broken >&2; exit 1"),
        ("13.1", 'printf good >"$5"'),
        ("12.0", 'printf older >"$5"'),
    ):
        pretend(tmp_path / f"usr/local/cuda-{version}/bin/ptxas", version, then=then)
    assert build_patch((9, 0), places=nowhere(tmp_path)) == b"good"


@pytest.mark.usefixtures("nvrtc")
def test_the_text_is_one_that_assemblers_of_any_age_know(tmp_path: Path) -> None:
    then = 'grep -q "^.version 6.3$" "$3" && grep -q "^.target sm_75$" "$3" && printf good >"$5"'
    ptxas = pretend(tmp_path / "ptxas", "12.0", then=then)
    assert build_patch((9, 0), places=nowhere(tmp_path, CUDAKIT_PTXAS=str(ptxas))) == b"good"


@pytest.mark.usefixtures("nvrtc")
def test_without_an_assembler_the_line_to_install_one_is_said(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnusable, match=r"ptxas, which .* is not installed") as error:
        build_patch((9, 0), places=nowhere(tmp_path))
    assert error.value.hint.startswith("pip install 'nvidia-cuda-nvcc>=1")


@pytest.mark.usefixtures("nvrtc")
def test_what_each_assembler_said_is_told_when_none_can(tmp_path: Path) -> None:
    for version in ("12.4", "13.0"):
        ptxas = tmp_path / f"usr/local/cuda-{version}/bin/ptxas"
        pretend(ptxas, version, then=f"echo no sm_99 in {version} >&2; exit 1")
    with pytest.raises(EnvironmentUnusable) as error:
        build_patch((9, 0), places=nowhere(tmp_path))
    first = (
        f"ptxas 13.0.7 ({tmp_path}/usr/local/cuda-13.0/bin/ptxas): no sm_99 in 13.0; ptxas 12.4.7"
    )
    assert first in error.value.message


@pytest.mark.usefixtures("nvrtc")
def test_a_device_that_is_too_old_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnusable, match=r"this device has 7\.5"):
        build_patch((7, 5), places=nowhere(tmp_path))


@pytest.mark.usefixtures("nvrtc")
def test_a_source_that_does_not_compile_says_why(tmp_path: Path) -> None:
    ptxas = pretend(tmp_path / "ptxas", "13.9", then="exit 1")
    with pytest.raises(CudaError, match="no_such_option"):
        build_patch(
            (9, 0),
            places=nowhere(tmp_path, CUDAKIT_PTXAS=str(ptxas)),
            options=("--no_such_option",),
        )


def test_assemblers_are_found_in_wheels_and_toolkits_the_newest_first(tmp_path: Path) -> None:
    site = tmp_path / "site"
    expected = [
        pretend(site / "nvidia/cu13/bin/ptxas", "13.10", then="exit 1"),
        pretend(tmp_path / "home/bin/ptxas", "13.9", then="exit 1"),
        pretend(tmp_path / "opt/cuda/bin/ptxas", "13.2", then="exit 1"),
        pretend(site / "triton/backends/nvidia/bin/ptxas-blackwell", "13.1", then="exit 1"),
        pretend(site / "torch/bin/ptxas", "12.9", then="exit 1"),
        pretend(site / "triton/backends/nvidia/bin/ptxas", "12.8", then="exit 1"),
        pretend(site / "nvidia/cuda_nvcc/bin/ptxas", "12.6", then="exit 1"),
    ]
    pretend(tmp_path / "broken/bin/ptxas", "13.99", then="exit 1").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "linked").symlink_to(site / "torch/bin")
    environment = {
        "CUDA_HOME": str(tmp_path / "home"),
        "CUDA_PATH": str(tmp_path / "broken"),
        "PATH": f"{tmp_path / 'linked'}::{tmp_path / 'missing'}",
    }
    found = assemblers(Places(environment, (str(site), str(tmp_path / "missing")), tmp_path))
    assert [one.path for one in found] == expected
    assert found[0].version == (13, 10, 7)


def test_a_named_assembler_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnusable, match=r"CUDAKIT_PTXAS is .*/none'.* does not run"):
        assemblers(nowhere(tmp_path, CUDAKIT_PTXAS=str(tmp_path / "none")))


def test_what_an_assembler_says_is_its_refusal(tmp_path: Path) -> None:
    ptxas = pretend(tmp_path / "ptxas", "13.0", then="echo because >&2; exit 3")
    (one,) = assemblers(nowhere(tmp_path, CUDAKIT_PTXAS=str(ptxas)))
    with pytest.raises(Refused, match="because"):
        one.assemble(b"", "sm_90")
