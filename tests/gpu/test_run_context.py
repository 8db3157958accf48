""""""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import pytest

from cudakit.gpu.api.facts import (
    Build,
    CudaView,
    DeviceFacts,
    Distribution,
    Library,
    NvmlView,
    Process,
    RunContext,
    Telemetry,
)
from cudakit.gpu.host import Files
from cudakit.gpu.machine import open_machine
from cudakit.gpu.run_context import (
    framework_builds,
    gather,
    gather_all,
    installed_packages,
    ld_library_path,
    libraries,
    toolkit_directories,
)
from cudakit.units import Unavailable

GPU = DeviceFacts(0, "GPU-1", "0000:01:00.0", {})


@dataclass
class Machine:
    """A machine whose CUDA query raises an error."""

    simulated: bool = False

    def nvml(self) -> NvmlView | Unavailable:
        return NvmlView("580.159.04", "13.580.159.04", (GPU,), ())

    def cuda(self) -> CudaView | Unavailable:
        raise ZeroDivisionError("unforeseen")

    def telemetry(
        self, device: DeviceFacts, names: Collection[str] = ()
    ) -> Telemetry | Unavailable:
        return Telemetry(1, {"asked_of": device.index, "names": len(names)})

    def activity(self, device: DeviceFacts) -> Telemetry | Unavailable:
        return Unavailable(f"not asked for of {device.index}")

    def processes(self, device: DeviceFacts) -> tuple[Process, ...] | Unavailable:
        return Unavailable(f"not asked for of {device.index}")


class Working(Machine):
    """A machine with one GPU in CUDA and NVML, which two processes use."""

    def cuda(self) -> CudaView | Unavailable:
        return CudaView((13, 0), (GPU,), (), (), (), None, "/lib/libcuda.so.1", None, None)

    def processes(self, device: DeviceFacts) -> tuple[Process, ...] | Unavailable:
        return (Process(device.index + 1, "compute", 0, "a", "b"),) * 2


# --- gather: what results record -------------------------------------------------------------------


def test_results_record_versions_device_processes_and_command() -> None:
    context = gather(Working(), variables={"A": "1"}, command=("cudakit", "bench"))

    assert {"driver": "580.159.04", "CUDA": "13.0"}.items() <= context.versions.items()
    assert {"cudakit", "python"} <= context.versions.keys()
    assert (context.nvml_device, context.other_processes) == (GPU, 2)
    assert (context.variables, context.command) == ({"A": "1"}, ("cudakit", "bench"))


def test_gather_for_results_omits_slow_facts() -> None:
    context, default = gather(Working(), variables={}), RunContext()

    assert (context.driver, context.software) == (default.driver, default.software)
    assert (context.processes, context.telemetry) == (default.processes, ())


def test_device_unknown_to_nvml_has_no_count_of_processes() -> None:
    context = gather(Machine(), variables={})

    assert context.nvml_device is None
    assert context.other_processes == Unavailable("NVML does not report the device")


# --- gather_all: what doctor checks ----------------------------------------------------------------


def test_failure_to_read_one_fact_keeps_the_other_facts(tmp_path: Path) -> None:
    context = gather_all(
        Machine(), variables={}, search_path=[str(tmp_path)], files=Files(tmp_path)
    )

    assert context.cuda == Unavailable("reading failed: ZeroDivisionError: unforeseen")
    assert isinstance(context.nvml, NvmlView)
    assert context.telemetry == (Telemetry(1, {"asked_of": 0, "names": 0}),)
    assert context.software.distributions == ()


def test_simulated_machine_has_no_fact_of_the_host() -> None:
    context = gather_all(
        Machine(simulated=True), variables={"NCCL_DEBUG": "INFO"}, search_path=sys.path
    )

    assert context.simulated
    assert context.variables == {}
    assert context.software.distributions == ()
    assert isinstance(context.limits, Unavailable)
    assert context.host.kernel == ""
    assert isinstance(context.driver.kernel_log, Unavailable)
    assert context.software.libraries == ()


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"])
def test_variables_of_process_do_not_select_simulated_gpus(name: str) -> None:
    context = gather(open_machine("sim"), variables={name: "1", "CUDA_LAUNCH_BLOCKING": "1"})

    assert context.variables == {"CUDA_LAUNCH_BLOCKING": "1"}


def test_device_of_an_ordinal_is_found_in_nvml() -> None:
    context = gather(open_machine("sim:h200x2"), variables={}, ordinal=1)

    assert context.nvml_device is not None
    assert context.nvml_device.uuid == context.cuda_devices[1].uuid
    assert gather(open_machine("sim:h200x2"), variables={}, ordinal=2).nvml_device is None


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
