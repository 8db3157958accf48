""""""

from __future__ import annotations

from pathlib import Path

import pytest
from devices.doctor.machines import (
    FAIL,
    OK,
    UNKNOWN,
    WARN,
    Machine,
    both_views,
    built,
    cuda,
    files,
    gpu,
    installed,
    run_check,
)

from cudakit.gpu.api.facts import Distribution, Library
from cudakit.units import Unavailable

OLD = cuda(driver_version=(12, 4))


# --- CK009: is the driver new enough? --------------------------------------------------------------


def test_driver_supports_its_cuda_and_older_builds(machine: Machine) -> None:
    fitting = machine(
        builds=(built("torch", (12, 8)), built("cupy-cuda13x", (13, None))),
        distributions=installed(nvidia_cuda_nvrtc="13.0.88", cuda_bindings="13.0.1"),
    )

    finding = run_check("CK009", fitting)

    assert finding.status is OK
    assert finding.summary.endswith("is new enough for the installed packages")
    assert finding.evidence["driver"] == "CUDA 13.0"
    assert finding.evidence["cupy-cuda13x 1.0"] == "CUDA 13.x"


def test_framework_for_newer_major_cuda_fails(machine: Machine) -> None:
    finding = run_check("CK009", machine(cuda=OLD, builds=(built("torch", (13, 0)),)))

    assert finding.status is FAIL
    assert finding.fix[0] == "update the driver to 580 or newer"


def test_framework_for_newer_minor_cuda_is_ok(machine: Machine) -> None:
    finding = run_check("CK009", machine(cuda=OLD, builds=(built("torch", (12, 8)),)))

    assert finding.status is OK
    assert finding.summary.endswith(": minor versions of CUDA 12 are compatible")


def test_ptx_of_newer_compiler_warns(machine: Machine) -> None:
    finding = run_check("CK009", machine(distributions=installed(nvidia_cuda_nvrtc="13.2.1")))

    assert finding.status is WARN
    assert "(error 222)" in finding.summary


def test_bindings_for_newer_major_cuda_warn(machine: Machine) -> None:
    newer = machine(cuda=OLD, distributions=installed(cuda_bindings="13.1.0"))

    assert run_check("CK009", newer).status is WARN


def test_toolkit_version_is_read(machine: Machine, tmp_path: Path) -> None:
    files(tmp_path, {"/usr/local/cuda-13.1/version.json": '{"cuda": {"version": "13.1.0"}}'})
    files(tmp_path, {"/usr/local/cuda-broken/version.json": "{"})

    assert run_check("CK009", machine()).evidence["toolkit /usr/local/cuda-13.1"] == "CUDA 13.1"


def test_driver_version_unknown_is_unknown(machine: Machine) -> None:
    assert run_check("CK009", machine(cuda=Unavailable("no"))).status is UNKNOWN


# --- CK011: built for CUDA? ------------------------------------------------------------------------


def test_frameworks_built_for_cuda_are_ok(machine: Machine) -> None:
    finding = run_check("CK011", machine(builds=(built("torch", (13, 0), "2.11.0"),)))

    assert finding.summary == "built for CUDA: torch 2.11.0"


def test_torch_built_without_cuda_fails(machine: Machine) -> None:
    finding = run_check("CK011", machine(builds=(built("torch", None, "2.11.0+cpu"),)))

    assert finding.status is FAIL
    assert finding.summary == "PyTorch 2.11.0+cpu was built without CUDA"
    assert finding.fix[0].endswith("/whl/cu130")


def test_suggested_build_matches_driver(machine: Machine) -> None:
    wrong = machine(cuda=OLD, builds=(built("torch", None, "2.11.0+cpu"),))
    unknown = machine(cuda=Unavailable("no"), builds=(built("torch", None, "2.11.0+cpu"),))

    assert run_check("CK011", wrong).fix[0].endswith("/whl/cu126")
    assert run_check("CK011", unknown).fix[0].endswith("/whl/cu130")


def test_jax_without_plugin_warns(machine: Machine) -> None:
    alone = machine(distributions=installed(jax="0.11.2"))
    plugged = machine(
        distributions=installed(jax="0.11.2"), builds=(built("jax-cuda13-plugin", (13, None)),)
    )

    assert run_check("CK011", alone).status is WARN
    assert run_check("CK011", plugged).status is OK


# --- CK013: one module, one package? ---------------------------------------------------------------


def test_packages_with_different_modules_are_ok(machine: Machine) -> None:
    apart = machine(distributions=installed(nvidia_ml_py="13.0", torch="2.11.0", nvtx="0.2"))

    assert run_check("CK013", apart).status is OK


@pytest.mark.parametrize(
    ("names", "fix"),
    [
        (
            {"nvidia_ml_py": "13.0", "pynvml": "12.0"},
            "pip uninstall -y pynvml && pip install --force-reinstall --no-deps nvidia-ml-py",
        ),
        (
            {"cupy_cuda12x": "13.0", "cupy_cuda13x": "14.0"},
            "pip uninstall -y cupy-cuda12x && pip install --force-reinstall --no-deps cupy-cuda13x",
        ),
        (
            {"onnxruntime": "1.0", "onnxruntime_gpu": "1.0"},
            "pip uninstall -y onnxruntime && "
            "pip install --force-reinstall --no-deps onnxruntime-gpu",
        ),
    ],
)
def test_packages_with_same_module_warn_with_one_to_keep(
    machine: Machine, names: dict[str, str], fix: str
) -> None:
    finding = run_check("CK013", machine(distributions=installed(**names)))

    assert finding.status is WARN
    assert finding.fix == (fix,)


def test_two_versions_of_torch_warn(machine: Machine) -> None:
    twice = (Distribution("torch", "2.11.0", "/a"), Distribution("torch", "2.10.0", "/b"))

    finding = run_check("CK013", machine(distributions=twice))

    assert finding.summary == "torch is installed 2 times: 2.11.0 and 2.10.0"
    assert finding.evidence == {"torch 2.11.0": "/a", "torch 2.10.0": "/b"}


def test_unlisted_packages_are_unknown(machine: Machine) -> None:
    for name in ("CK009", "CK011", "CK013"):
        unread = machine(distributions=Unavailable("no"), builds=Unavailable("no"))
        assert run_check(name, unread).status is UNKNOWN


# --- CK010: architectures -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "cuda"),
    [("9.0", (11, 8)), ("9.0", (13, None)), ("12.0", (12, 8)), ("7.5", (13, 0)), ("99.0", (12, 4))],
)
def test_build_of_cuda_supporting_gpu_is_ok(
    machine: Machine, capability: str, cuda: tuple[int, int | None]
) -> None:
    fitting = machine(
        **both_views(gpu(compute_capability=capability)), builds=(built("torch", cuda),)
    )

    assert run_check("CK010", fitting).status is OK


def test_build_of_cuda_older_than_gpu_fails(machine: Machine) -> None:
    early = machine(
        **both_views(gpu(name="NVIDIA B200", compute_capability="10.0")),
        builds=(built("torch", (12, 4), "2.5.0"),),
    )

    finding = run_check("CK010", early)

    assert finding.status is FAIL
    assert finding.summary == (
        "torch 2.5.0 has no code for NVIDIA B200 (sm_100): support starts with CUDA 12.8"
    )
    assert finding.fix == ("install a build for CUDA 12.8 or newer",)


def test_build_of_cuda_that_dropped_gpu_fails(machine: Machine) -> None:
    late = machine(
        **both_views(gpu(name="Tesla V100", compute_capability="7.0")),
        builds=(built("torch", (13, 0)),),
    )

    finding = run_check("CK010", late)

    assert finding.status is FAIL
    assert "CUDA 13 dropped support" in finding.summary
    assert "cudakit needs 7.5" in finding.summary


def test_unknown_compute_capability_is_unknown(machine: Machine) -> None:
    silent = machine(nvml=Unavailable("no"), cuda=Unavailable("no"))

    assert run_check("CK010", silent).status is UNKNOWN


COMPAT = "/usr/local/cuda-13.2/compat/libcuda.so.{}"


def copy(source: str, path: str, soname: str = "libcudnn.so.9") -> Library:
    return Library(soname, f"{path}/{soname}", f"{path}/{soname}.19.0", source)


# --- CK012: does a copy hide another? --------------------------------------------------------------


def test_toolkit_beside_packages_is_ok(machine: Machine) -> None:
    beside = (copy("package", "/site/nvidia/cudnn/lib"), copy("toolkit", "/usr/local/cuda/lib64"))

    finding = run_check("CK012", machine(libraries=beside))

    assert finding.status is OK
    assert finding.evidence == {"package": "libcudnn.so.9", "toolkit": "libcudnn.so.9"}


def test_library_on_ld_library_path_shadowing_package_warns(machine: Machine) -> None:
    shadowing = (copy("LD_LIBRARY_PATH", "/opt/cudnn"), copy("package", "/site/nvidia/cudnn/lib"))

    finding = run_check("CK012", machine(libraries=shadowing))

    assert finding.status is WARN
    assert finding.evidence["libcudnn.so.9"] == (
        "/opt/cudnn/libcudnn.so.9 before /site/nvidia/cudnn/lib/libcudnn.so.9"
    )


def test_same_file_by_two_paths_is_one_copy(machine: Machine) -> None:
    package = copy("package", "/site/nvidia/cudnn/lib")
    linked = Library(package.soname, "/link/libcudnn.so.9", package.real, "LD_LIBRARY_PATH")

    assert run_check("CK012", machine(libraries=(linked, package))).status is OK


def test_libraries_of_driver_are_ignored(machine: Machine) -> None:
    driver = (copy("LD_LIBRARY_PATH", "/a", "libcuda.so.1"), copy("package", "/b", "libcuda.so.1"))

    finding = run_check("CK012", machine(libraries=driver))

    assert finding.summary == "no CUDA library is on the loader's path"


def test_unlisted_libraries_are_unknown(machine: Machine) -> None:
    assert run_check("CK012", machine(libraries=Unavailable("no"))).status is UNKNOWN
