from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from gpu.fake_nvml import FakeNvml, gpu, refuse
from record.fake_ptxas import fake_ptxas, search_only

from cudakit.errors import CudaError, EnvironmentUnusable, MissingDependency
from cudakit.gpu.compile import CompileCache, compile_cuda
from cudakit.gpu.nvml import open_nvml
from cudakit.record.device_patch import (
    Accesses,
    Capability,
    add_device_patches,
    build_patch,
    device_capabilities,
)
from cudakit.record.installed import SearchPaths, find_assemblers
from cudakit.record.preflight import RecorderFiles
from cudakit.units import Unavailable

HAS_DEVICE = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()
READY = RecorderFiles(Path("/s.so"), Path("/r.so"), {}, packages=("/program/packages",))
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
    assemblers = find_assemblers(SearchPaths.of_this_process())
    if not assemblers:
        pytest.skip("there is no ptxas")
    return assemblers[0].path


def build(capability: Capability, paths: SearchPaths) -> bytes:
    assert "/program/packages" in paths.packages
    if capability < (8, 0):
        raise EnvironmentUnusable("it is too old", hint="use --accesses arguments")
    return f"for {capability}".encode()


def fail_build(_: Capability, __: SearchPaths) -> bytes:
    raise MissingDependency("NVRTC", purpose="compiling kernels", requirement="nvidia-cuda-nvrtc")


def devices_with(*capabilities: Capability) -> Callable[[], tuple[Capability, ...]]:
    return lambda: capabilities


def test_add_device_patches_builds_one_per_capability(tmp_path: Path) -> None:
    devices = devices_with((9, 0), (8, 9), (9, 0))
    ready, why_not = add_device_patches(READY, None, tmp_path, devices=devices, build=build)

    assert why_not == ""
    assert {number: path.read_bytes() for number, path in ready.patches.items()} == {
        89: b"for (8, 9)",
        90: b"for (9, 0)",
    }
    assert ready.settings()["patches"]["90"] == str(tmp_path / "sm_90.cubin")


@pytest.mark.parametrize(
    ("accesses", "templates"), [(None, True), ("auto", True), ("exact", False)]
)
def test_templates_are_used_unless_every_launch_must_be_recorded(
    tmp_path: Path, accesses: Accesses | None, templates: bool
) -> None:
    ready, _ = add_device_patches(
        READY, accesses, tmp_path, devices=devices_with((9, 0)), build=build
    )

    assert ready.templates is templates
    assert ready.settings()["templates"] is templates


def test_accesses_from_arguments_build_no_patch(tmp_path: Path) -> None:
    ready, why_not = add_device_patches(
        READY, "arguments", tmp_path, devices=devices_with((9, 0)), build=fail_build
    )

    assert (ready, why_not) == (READY, "")


def test_missing_nvrtc_falls_back_with_install_hint(tmp_path: Path) -> None:
    ready, why_not = add_device_patches(
        READY, None, tmp_path, devices=devices_with((9, 0)), build=fail_build
    )

    assert ready is READY
    assert why_not == (
        "accesses are inferred from kernel arguments: NVRTC is not installed, and compiling kernels needs it;"
        " pip install 'nvidia-cuda-nvrtc'"
    )


def test_missing_nvrtc_is_error_if_exact_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnusable, match="NVRTC is not installed") as caught:
        add_device_patches(READY, "exact", tmp_path, devices=devices_with((9, 0)), build=fail_build)

    assert caught.value.exit_code == 3


def test_too_old_device_is_skipped_if_a_newer_one_exists(tmp_path: Path) -> None:
    ready, _ = add_device_patches(
        READY, None, tmp_path, devices=devices_with((7, 5), (9, 0)), build=build
    )
    readiness, why_not = add_device_patches(
        READY, None, tmp_path, devices=devices_with((7, 5)), build=build
    )

    assert list(ready.patches) == [90]
    assert readiness is READY
    assert "it is too old; use --accesses arguments" in why_not


@pytest.mark.parametrize("accesses", [None, "auto", "exact"])
def test_no_device_needs_no_patch(tmp_path: Path, accesses: str | None) -> None:
    assert add_device_patches(
        READY, accesses, tmp_path, devices=devices_with(), build=fail_build
    ) == (
        READY,
        "",
    )


def test_device_capabilities_come_from_nvml() -> None:
    name = "nvmlDeviceGetCudaComputeCapability"
    nvml = open_nvml(
        FakeNvml([gpu(**{name: (9, 0)}), gpu(**{name: (8, 6)}), gpu(**{name: (9, 0)})])
    )

    assert device_capabilities(nvml) == {(9, 0), (8, 6)}
    assert device_capabilities(open_nvml(FakeNvml([]))) == set()


@pytest.mark.skipif(HAS_DEVICE, reason="needs a machine without a CUDA device")
def test_device_capabilities_without_nvml_and_device_are_empty() -> None:
    assert device_capabilities(Unavailable("nvidia-ml-py is not installed")) == set()


@pytest.mark.gpu
@pytest.mark.parametrize("lib", [None, FakeNvml([gpu(handle=15)]), FakeNvml([gpu()])])
def test_device_of_unknown_capability_is_refused(lib: FakeNvml | None) -> None:
    nvml = open_nvml(lib) if lib else Unavailable("nvidia-ml-py is not installed")

    with pytest.raises(EnvironmentUnusable, match="compute capability of the GPUs is unknown"):
        device_capabilities(nvml)


def test_lost_device_makes_capabilities_unavailable() -> None:
    for lost in (gpu(handle=15), gpu(nvmlDeviceGetCudaComputeCapability=refuse(15))):
        nvml = open_nvml(FakeNvml([gpu(nvmlDeviceGetCudaComputeCapability=(9, 0)), lost]))
        assert not isinstance(nvml, Unavailable)
        assert isinstance(nvml.capabilities(), Unavailable)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(
    "capability", [(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)]
)
@pytest.mark.parametrize("options", [(), ("-DCK_NO_CALLS",)])
def test_patch_is_assembled_for_each_architecture(
    real_ptxas: Path, tmp_path: Path, capability: tuple[int, int], options: tuple[str, ...]
) -> None:
    paths = search_only(tmp_path, CUDAKIT_PTXAS=str(real_ptxas))
    image = build_patch(capability, paths=paths, options=options)
    assert image.startswith(ELF)
    assert all(b"\0" + name + b"\0" in image for name in FUNCTIONS)


@pytest.mark.usefixtures("nvrtc")
def test_patch_is_cached_by_target_options_and_assembler(tmp_path: Path) -> None:
    paths = search_only(
        tmp_path,
        PATH=str(fake_ptxas(tmp_path / "bin/ptxas", "13.9", behaviour='printf once >"$5"').parent),
    )
    cache = CompileCache(tmp_path / "cache")
    assert build_patch((9, 0), paths=paths, cache=cache) == b"once"
    fake_ptxas(tmp_path / "bin/ptxas", "13.9", behaviour='printf twice >"$5"')
    assert build_patch((9, 0), paths=paths, cache=cache) == b"once"
    assert build_patch((8, 0), paths=paths, cache=cache) == b"twice"
    assert build_patch((9, 0), paths=paths, cache=cache, options=("-DX",)) == b"twice"
    fake_ptxas(tmp_path / "bin/ptxas", "14.0", behaviour='printf newer >"$5"')
    assert build_patch((9, 0), paths=paths, cache=cache) == b"newer"


@pytest.mark.usefixtures("nvrtc")
def test_failing_assembler_is_skipped(tmp_path: Path) -> None:
    for version, behaviour in (
        ("13.9", "echo it is broken >&2; exit 1"),
        ("13.1", 'printf good >"$5"'),
        ("12.0", 'printf older >"$5"'),
    ):
        fake_ptxas(tmp_path / f"usr/local/cuda-{version}/bin/ptxas", version, behaviour=behaviour)
    assert build_patch((9, 0), paths=search_only(tmp_path)) == b"good"


@pytest.mark.usefixtures("nvrtc")
def test_ptx_version_suits_old_assemblers(tmp_path: Path) -> None:
    behaviour = (
        'grep -q "^.version 6.3$" "$3" && grep -q "^.target sm_75$" "$3" && printf good >"$5"'
    )
    ptxas = fake_ptxas(tmp_path / "ptxas", "12.0", behaviour=behaviour)
    assert build_patch((9, 0), paths=search_only(tmp_path, CUDAKIT_PTXAS=str(ptxas))) == b"good"


@pytest.mark.usefixtures("nvrtc")
def test_missing_assembler_error_has_install_hint(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnusable, match=r"ptxas, which .* was not found") as error:
        build_patch((9, 0), paths=search_only(tmp_path))
    assert error.value.hint.startswith("pip install 'nvidia-cuda-nvcc>=1")


@pytest.mark.usefixtures("nvrtc")
def test_error_lists_output_of_each_assembler(tmp_path: Path) -> None:
    for version in ("12.4", "13.0"):
        ptxas = tmp_path / f"usr/local/cuda-{version}/bin/ptxas"
        fake_ptxas(ptxas, version, behaviour=f"echo no sm_99 in {version} >&2; exit 1")
    with pytest.raises(EnvironmentUnusable) as error:
        build_patch((9, 0), paths=search_only(tmp_path))
    first = (
        f"ptxas 13.0.7 ({tmp_path}/usr/local/cuda-13.0/bin/ptxas): no sm_99 in 13.0; ptxas 12.4.7"
    )
    assert first in error.value.message


@pytest.mark.usefixtures("nvrtc")
def test_patch_for_too_old_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnusable, match=r"this device has 7\.5"):
        build_patch((7, 5), paths=search_only(tmp_path))


@pytest.mark.usefixtures("nvrtc")
def test_compile_error_has_the_log(tmp_path: Path) -> None:
    ptxas = fake_ptxas(tmp_path / "ptxas", "13.9", behaviour="exit 1")
    with pytest.raises(CudaError, match="no_such_option"):
        build_patch(
            (9, 0),
            paths=search_only(tmp_path, CUDAKIT_PTXAS=str(ptxas)),
            options=("--no_such_option",),
        )
