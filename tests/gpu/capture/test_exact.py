"""Accesses are exact where they can be; where not, it is said why, and refused if they were asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from gpu.fake_nvml import FakeNvml, gpu, refuse

from cudakit.errors import EnvironmentUnusable, MissingDependency
from cudakit.gpu.capture.exact import Capability, capabilities, with_accesses
from cudakit.gpu.capture.locate import Places
from cudakit.gpu.capture.preflight import Ready
from cudakit.gpu.nvml import open_nvml
from cudakit.units import Unavailable

HAS_DEVICE = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()
READY = Ready(Path("/s.so"), (13, 5), Path("/r.so"), {}, packages=("/program/packages",))


def build(capability: Capability, places: Places) -> bytes:
    assert "/program/packages" in places.packages
    if capability < (8, 0):
        raise EnvironmentUnusable("it is too old", hint="use --accesses arguments")
    return f"for {capability}".encode()


def cannot(_: Capability, __: Places) -> bytes:
    raise MissingDependency("NVRTC", purpose="compiling kernels", requirement="nvidia-cuda-nvrtc")


def having(*found: Capability) -> Callable[[], tuple[Capability, ...]]:
    return lambda: found


def test_there_is_a_patch_for_each_kind_of_device(tmp_path: Path) -> None:
    devices = having((9, 0), (8, 9), (9, 0))
    ready, why_not = with_accesses(READY, None, tmp_path, devices=devices, build=build)

    assert why_not == ""
    assert {number: path.read_bytes() for number, path in ready.patches.items()} == {
        89: b"for (8, 9)",
        90: b"for (9, 0)",
    }
    assert ready.settings()["patches"]["90"] == str(tmp_path / "sm_90.cubin")


def test_accesses_that_are_wanted_from_arguments_need_nothing(tmp_path: Path) -> None:
    ready, why_not = with_accesses(
        READY, "arguments", tmp_path, devices=having((9, 0)), build=cannot
    )

    assert (ready, why_not) == (READY, "")


def test_what_is_missing_is_said_with_what_to_install(tmp_path: Path) -> None:
    ready, why_not = with_accesses(READY, None, tmp_path, devices=having((9, 0)), build=cannot)

    assert ready is READY
    assert why_not == (
        "accesses are assumed from arguments: NVRTC is not installed, and compiling kernels needs it;"
        " pip install 'nvidia-cuda-nvrtc'"
    )


def test_what_is_missing_is_an_error_where_exact_accesses_were_asked_for(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnusable, match="NVRTC is not installed") as caught:
        with_accesses(READY, "exact", tmp_path, devices=having((9, 0)), build=cannot)

    assert caught.value.exit_code == 3


def test_a_device_that_is_too_old_goes_without_where_others_do_not(tmp_path: Path) -> None:
    both, _ = with_accesses(READY, None, tmp_path, devices=having((7, 5), (9, 0)), build=build)
    alone, why_not = with_accesses(READY, None, tmp_path, devices=having((7, 5)), build=build)

    assert list(both.patches) == [90]
    assert alone is READY
    assert "it is too old; use --accesses arguments" in why_not


@pytest.mark.parametrize("wanted", [None, "exact"])
def test_without_a_device_nothing_is_missed(tmp_path: Path, wanted: str | None) -> None:
    assert with_accesses(READY, wanted, tmp_path, devices=having(), build=cannot) == (READY, "")


def test_the_management_library_is_asked_for_the_kinds_of_devices() -> None:
    name = "nvmlDeviceGetCudaComputeCapability"
    nvml = open_nvml(
        FakeNvml([gpu(**{name: (9, 0)}), gpu(**{name: (8, 6)}), gpu(**{name: (9, 0)})])
    )

    assert capabilities(nvml) == {(9, 0), (8, 6)}
    assert capabilities(open_nvml(FakeNvml([]))) == set()


@pytest.mark.skipif(HAS_DEVICE, reason="needs a machine without a CUDA device")
def test_without_the_management_library_and_without_a_device_there_are_no_kinds() -> None:
    assert capabilities(Unavailable("nvidia-ml-py is not installed")) == set()


@pytest.mark.gpu
@pytest.mark.parametrize("lib", [None, FakeNvml([gpu(handle=15)]), FakeNvml([gpu()])])
def test_a_device_that_does_not_tell_its_kind_is_refused(lib: FakeNvml | None) -> None:
    nvml = open_nvml(lib) if lib else Unavailable("nvidia-ml-py is not installed")

    with pytest.raises(EnvironmentUnusable, match="compute capability of the devices is not known"):
        capabilities(nvml)


def test_a_device_that_is_lost_does_not_count_as_none() -> None:
    for lost in (gpu(handle=15), gpu(nvmlDeviceGetCudaComputeCapability=refuse(15))):
        nvml = open_nvml(FakeNvml([gpu(nvmlDeviceGetCudaComputeCapability=(9, 0)), lost]))
        assert not isinstance(nvml, Unavailable)
        assert isinstance(nvml.capabilities(), Unavailable)
