from __future__ import annotations

import pytest
from core.devices.diagnose.machines import (
    FAIL,
    OK,
    UNKNOWN,
    WARN,
    Machine,
    broken_cuda,
    cuda,
    judged,
)

from cudakit.gpu.api.run_context import Library
from cudakit.units import Unavailable

COMPAT = "/usr/local/cuda-13.2/compat/libcuda.so.{}"


def copy(source: str, path: str, soname: str = "libcudnn.so.9") -> Library:
    return Library(soname, f"{path}/{soname}", f"{path}/{soname}.19.0", source)


# --- CK008: which libcuda? -------------------------------------------------------------------------


def test_libcuda_of_driver_is_ok(machine: Machine) -> None:
    assert judged("CK008", machine()).status is OK


def test_libcuda_stub_fails(machine: Machine) -> None:
    stub = broken_cuda(34, libcuda="/usr/local/cuda/lib64/stubs/libcuda.so")

    found = judged("CK008", machine(cuda=stub))

    assert found.status is FAIL
    assert "directory named stubs off LD_LIBRARY_PATH" in found.fix[0]


@pytest.mark.parametrize(
    ("code", "words"), [(803, "this driver does not fit"), (804, "this GPU does not support")]
)
def test_cuda_compat_refused_by_driver_fails(machine: Machine, code: int, words: str) -> None:
    found = judged("CK008", machine(cuda=broken_cuda(code, libcuda=COMPAT.format("595.45.04"))))

    assert found.status is FAIL
    assert words in found.summary


def test_cuda_compat_newer_than_driver_is_ok(machine: Machine) -> None:
    assert judged("CK008", machine(cuda=cuda(libcuda=COMPAT.format("595.45.04")))).status is OK


def test_cuda_compat_older_than_driver_warns(machine: Machine) -> None:
    found = judged("CK008", machine(cuda=cuda(libcuda=COMPAT.format("570.86.10"))))

    assert found.status is WARN
    assert "570.86.10 is older than the driver 580.159.04" in found.summary


def test_other_copies_of_libcuda_are_evidence(machine: Machine) -> None:
    copies = (copy("system", "/opt/old", "libcuda.so.1"),)

    evidence = judged("CK008", machine(libraries=copies)).evidence

    assert evidence["other copies"] == "/opt/old/libcuda.so.1.19.0"


def test_libcuda_origin_is_unknown_without_libcuda(machine: Machine) -> None:
    none = machine(cuda=Unavailable("cannot be loaded"), libraries=())

    assert judged("CK008", none).status is UNKNOWN


# --- CK012: does a copy hide another? --------------------------------------------------------------


def test_toolkit_beside_packages_is_ok(machine: Machine) -> None:
    beside = (copy("package", "/site/nvidia/cudnn/lib"), copy("toolkit", "/usr/local/cuda/lib64"))

    found = judged("CK012", machine(libraries=beside))

    assert found.status is OK
    assert found.evidence == {"package": "libcudnn.so.9", "toolkit": "libcudnn.so.9"}


def test_library_on_ld_library_path_shadowing_package_warns(machine: Machine) -> None:
    shadowing = (copy("LD_LIBRARY_PATH", "/opt/cudnn"), copy("package", "/site/nvidia/cudnn/lib"))

    found = judged("CK012", machine(libraries=shadowing))

    assert found.status is WARN
    assert found.evidence["libcudnn.so.9"] == (
        "/opt/cudnn/libcudnn.so.9 before /site/nvidia/cudnn/lib/libcudnn.so.9"
    )


def test_same_file_by_two_paths_is_one_copy(machine: Machine) -> None:
    package = copy("package", "/site/nvidia/cudnn/lib")
    linked = Library(package.soname, "/link/libcudnn.so.9", package.real, "LD_LIBRARY_PATH")

    assert judged("CK012", machine(libraries=(linked, package))).status is OK


def test_libraries_of_driver_are_ignored(machine: Machine) -> None:
    driver = (copy("LD_LIBRARY_PATH", "/a", "libcuda.so.1"), copy("package", "/b", "libcuda.so.1"))

    found = judged("CK012", machine(libraries=driver))

    assert found.summary == "no CUDA library lies where the loader looks"


def test_unlisted_libraries_are_unknown(machine: Machine) -> None:
    assert judged("CK012", machine(libraries=Unavailable("no"))).status is UNKNOWN
