from __future__ import annotations

from pathlib import Path

import pytest

from cudakit.errors import EnvironmentUnusable
from cudakit.record.cupti import find_cupti, preflight_profile
from cudakit.record.installed import SearchPaths

DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}.65.06  Release Build"


class Machine:
    """A machine in a directory, with libraries of CUPTI and a driver."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.packages = root / "env/lib/python3.12/site-packages"
        self.packages.mkdir(parents=True)
        self.environment: dict[str, str] = {}

    def install_driver(self, major: int) -> None:
        path = self.root / "proc/driver/nvidia/version"
        path.parent.mkdir(parents=True)
        path.write_text(DRIVER.format(major))

    def install(self, path: str) -> Path:
        library = self.root / path
        library.parent.mkdir(parents=True, exist_ok=True)
        library.touch()
        return library

    def install_in_packages(self, path: str) -> Path:
        return self.install(f"env/lib/python3.12/site-packages/{path}")

    def install_torch(self, line: str) -> None:
        path = self.packages / "torch/version.py"
        path.parent.mkdir()
        path.write_text(f"__version__ = '2.11.0'\n{line}\nhip: Optional[str] = None\n")

    @property
    def paths(self) -> SearchPaths:
        return SearchPaths(self.environment, (str(self.packages),), root=self.root)

    def find(self) -> Path:
        return find_cupti(self.paths).path


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize(
    "path",
    [
        "env/lib/python3.12/site-packages/nvidia/cu13/lib/libcupti.so.13",
        "env/lib/libcupti.so.13",
        "usr/local/cuda-13.0/extras/CUPTI/lib64/libcupti.so.13",
        "usr/local/cuda/targets/x86_64-linux/lib/libcupti.so.13",
        "usr/lib/x86_64-linux-gnu/libcupti.so.13",
    ],
)
def test_library_is_found_where_packages_and_toolkits_put_it(machine: Machine, path: str) -> None:
    library = machine.install(path)
    assert machine.find() == library


@pytest.mark.parametrize(
    ("line", "chosen"),
    [
        ("cuda: Optional[str] = '13.0'", "nvidia/cu13/lib/libcupti.so.13"),
        ("cuda: Optional[str] = '12.8'", "nvidia/cuda_cupti/lib/libcupti.so.12"),
        ("cuda: Optional[str] = None", "nvidia/cu13/lib/libcupti.so.13"),
    ],
)
def test_library_of_torch_is_preferred(machine: Machine, line: str, chosen: str) -> None:
    machine.install_in_packages("nvidia/cuda_cupti/lib/libcupti.so.12")
    machine.install_in_packages("nvidia/cu13/lib/libcupti.so.13")
    machine.install_torch(line)
    assert machine.find() == machine.packages / chosen


def test_library_that_needs_a_newer_driver_is_not_chosen(machine: Machine) -> None:
    machine.install_driver(570)
    machine.install_in_packages("nvidia/cu13/lib/libcupti.so.13")
    library = machine.install_in_packages("nvidia/cuda_cupti/lib/libcupti.so.12")
    assert machine.find() == library


def test_library_of_a_package_precedes_that_of_a_toolkit(machine: Machine) -> None:
    machine.install("usr/local/cuda-13.0/extras/CUPTI/lib64/libcupti.so.13")
    library = machine.install_in_packages("nvidia/cu13/lib/libcupti.so.13")
    assert machine.find() == library


def test_file_that_is_named_after_a_release_of_cupti_is_ignored(machine: Machine) -> None:
    machine.install_in_packages("nvidia/cu13/lib/libcupti.so.2025.3.1")
    with pytest.raises(EnvironmentUnusable):
        machine.find()


@pytest.mark.parametrize(
    ("driver", "hint"),
    [(580, "pip install 'cudakit[profile]'"), (550, "pip install nvidia-cuda-cupti-cu12")],
)
def test_missing_library_names_the_package_for_the_driver(
    machine: Machine, driver: int, hint: str
) -> None:
    machine.install_driver(driver)
    with pytest.raises(EnvironmentUnusable, match="not installed") as raised:
        machine.find()
    assert raised.value.hint == hint


def test_variable_names_another_library(machine: Machine) -> None:
    machine.install_in_packages("nvidia/cu13/lib/libcupti.so.13")
    library = machine.install("opt/mine/libcupti.so")
    machine.environment["CUDAKIT_CUPTI_LIBRARY"] = str(library)
    assert machine.find() == library

    machine.environment["CUDAKIT_CUPTI_LIBRARY"] = str(library.parent)
    with pytest.raises(EnvironmentUnusable, match="is not a file"):
        machine.find()


def test_other_tool_of_the_environment_is_named(machine: Machine) -> None:
    machine.environment["CUDA_INJECTION64_PATH"] = "/opt/nsight/libToolsInjection64.so"
    refusal = preflight_profile(None, paths=machine.paths)
    assert isinstance(refusal, EnvironmentUnusable)
    assert "/opt/nsight/libToolsInjection64.so" in refusal.message
    assert "CUDA_INJECTION64_PATH" in refusal.hint


def test_file_that_is_no_library_is_refused_with_the_reason_of_the_loader(machine: Machine) -> None:
    library = machine.install_in_packages("nvidia/cu13/lib/libcupti.so.13")
    refusal = preflight_profile(None, paths=SearchPaths({}, (str(machine.packages),), machine.root))
    assert isinstance(refusal, EnvironmentUnusable)
    assert str(library) in refusal.message + refusal.hint
