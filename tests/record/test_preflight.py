""""""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cudakit.errors import EnvironmentUnusable
from cudakit.record.installed import SearchPaths, find_cupti
from cudakit.record.preflight import RecorderFiles, preflight

HEADER = "typedef struct { CUcontext context; CUstream stream; } Sanitizer_LaunchData;"

# A Python module in place of the native recorder.
RECORDER = """
import os
def check(library):
    {check}
def offsets():
    return {{"Sanitizer_LaunchData": {{"stream": {offset}}}}}
"""
DRIVER = "NVRM version: NVIDIA UNIX {kind}  {version}  Release Build  (x)\nGCC version: 12\n"


@pytest.fixture
def search_paths(tmp_path: Path) -> SearchPaths:
    """Create a machine on which all checks pass."""
    packages = tmp_path / "site-packages"
    install(packages, "13.5.25")
    (tmp_path / "native").mkdir()
    (tmp_path / "native" / "_frames.cpython-312-x86_64-linux-gnu.so").write_bytes(b"")
    record(tmp_path)
    variables = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return SearchPaths(variables, [str(packages)], tmp_path, tmp_path / "native")


def install(packages: Path, version: str) -> None:
    (packages / f"nvidia_cuda_sanitizer_api-{version}.dist-info").mkdir(parents=True)
    include = packages / "nvidia/cu13/compute-sanitizer/include"
    include.mkdir(parents=True)
    (include / "sanitizer_callbacks.h").write_text(HEADER)
    (include.parent / "libsanitizer-public.so").write_bytes(b"")


def record(root: Path, *, check: str = "assert os.path.isfile(library)", offset: int = 8) -> None:
    text = RECORDER.format(check=check, offset=offset)
    (root / "native" / "_recorder.py").write_text(text)


def refusal_of(search_paths: SearchPaths, python: str | None = None) -> EnvironmentUnusable:
    outcome = preflight(python, paths=search_paths)
    assert isinstance(outcome, EnvironmentUnusable)
    return outcome


def with_environment(search_paths: SearchPaths, **environment: str) -> SearchPaths:
    return replace(search_paths, environment={**search_paths.environment, **environment})


def test_complete_machine_is_ready(search_paths: SearchPaths) -> None:
    outcome = preflight(None, paths=search_paths)

    assert isinstance(outcome, RecorderFiles)
    assert json.loads(json.dumps(outcome.settings())) == {
        "library": f"{search_paths.packages[0]}/nvidia/cu13/compute-sanitizer/libsanitizer-public.so",
        "recorder": f"{search_paths.native_directory}/_recorder.py",
        "frames": {
            "cpython-312": f"{search_paths.native_directory}/_frames.cpython-312-x86_64-linux-gnu.so"
        },
        "patches": {},
        "templates": False,
    }


def test_packages_of_program_interpreter_are_searched(
    search_paths: SearchPaths, tmp_path: Path
) -> None:
    program = tmp_path / "program"
    install(program / "lib", "13.6.1")
    python = program / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={program}/lib exec {sys.executable} "$@"\n')
    python.chmod(0o755)

    outcome = preflight(str(python), paths=search_paths)

    assert isinstance(outcome, RecorderFiles)
    assert outcome.library.is_relative_to(program)
    assert f"{program}/lib" in outcome.packages


def test_refusal_is_error_with_hint(search_paths: SearchPaths) -> None:
    error = refusal_of(replace(search_paths, packages=[]))

    assert error.exit_code == 3
    assert error.message == "libsanitizer-public.so, NVIDIA's Sanitizer API, is not installed"
    assert error.hint == "pip install 'cudakit[sanitize]'"


def test_missing_recorder_is_refused(search_paths: SearchPaths, tmp_path: Path) -> None:
    (tmp_path / "native" / "_recorder.py").unlink()

    assert "install a C compiler" in refusal_of(search_paths).hint


def test_failing_recorder_is_refused_with_its_error(
    search_paths: SearchPaths, tmp_path: Path
) -> None:
    record(tmp_path, check="raise RuntimeError('too many subscribers')")

    refusal = refusal_of(search_paths)

    assert refusal.message.startswith("the recorder does not work with Sanitizer API 13.5.25 (")
    assert refusal.message.endswith("): too many subscribers")


def test_crashing_recorder_is_refused(search_paths: SearchPaths, tmp_path: Path) -> None:
    record(tmp_path, check="os.kill(os.getpid(), 9)")

    refusal = refusal_of(search_paths)

    assert refusal.message.endswith(": it was killed by signal 9")
    assert refusal.hint.startswith(f"run this command to see the error: {sys.executable} -I -S ")


def test_output_of_library_is_ignored(search_paths: SearchPaths, tmp_path: Path) -> None:
    record(tmp_path, check="os.write(1, b'{}')")

    assert isinstance(preflight(None, paths=search_paths), RecorderFiles)


def test_moved_struct_field_is_refused(search_paths: SearchPaths, tmp_path: Path) -> None:
    record(tmp_path, offset=16)

    assert "Sanitizer_LaunchData.stream is at byte 8" in refusal_of(search_paths).message


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("CUDA_INJECTION64_PATH", "/x/anything.so"),
        ("LD_PRELOAD", "/a.so:/opt/nsys/libToolsInjectionProxy64.so"),
        ("LD_PRELOAD", "/x/libTreeLauncherTargetInjection.so"),
        ("NVTX_INJECTION64_PATH", "/opt/nvidia/nsight-systems/libToolsInjection64.so"),
        ("NSYS_PROFILING_SESSION_ID", "7"),
        ("NV_SANITIZER_INJECTION_PORT_BASE", "49152"),
    ],
)
def test_other_tool_is_refused_by_its_variable(
    search_paths: SearchPaths, variable: str, value: str
) -> None:
    refusal = refusal_of(with_environment(search_paths, **{variable: value}))

    assert refusal.message.startswith(f"{variable} ")
    assert refusal.hint == f"run cudakit without that tool, or unset {variable}"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("CUDA_INJECTION64_PATH", ""),
        ("LD_PRELOAD", "/usr/lib/libjemalloc.so.2"),
        ("NVTX_INJECTION64_PATH", "/x/listener.so"),
        ("NVTX_INJECTION64_PATH", "/nsight/cudakit/record/_recorder.abi3.so"),
        ("NSYS_NVTX_PROFILER_REGISTER_ONLY", "0"),
    ],
)
def test_unrelated_variables_are_accepted(
    search_paths: SearchPaths, variable: str, value: str
) -> None:
    assert isinstance(
        preflight(None, paths=with_environment(search_paths, **{variable: value})), RecorderFiles
    )


def driver(root: Path, kind: str, version: str) -> None:
    (root / "proc/driver/nvidia").mkdir(parents=True)
    text = DRIVER.format(kind=kind, version=version)
    (root / "proc/driver/nvidia/version").write_text(text)


@pytest.mark.parametrize("kind", ["x86_64 Kernel Module", "Open Kernel Module for x86_64"])
def test_old_driver_is_refused_with_its_version(
    search_paths: SearchPaths, tmp_path: Path, kind: str
) -> None:
    driver(tmp_path, kind, "510.108.03")

    refusal = refusal_of(search_paths)
    assert (refusal.message, refusal.hint) == (
        "driver 510.108.03 is too old: it does not report CUDA events",
        "install driver 515 or newer",
    )


@pytest.mark.parametrize("version", ["515.43.04", "580.159.03", "1000.1"])
def test_newer_driver_is_accepted(search_paths: SearchPaths, tmp_path: Path, version: str) -> None:
    driver(tmp_path, "Open Kernel Module for x86_64", version)

    assert isinstance(preflight(None, paths=search_paths), RecorderFiles)


def test_missing_interpreter_is_refused(search_paths: SearchPaths, tmp_path: Path) -> None:
    python = str(tmp_path / "python")

    refusal = refusal_of(search_paths, python)

    assert refusal.message.startswith(f"the recorder could not be tested with {python}: ")
    assert "No such file" in refusal.message


@pytest.mark.parametrize(("name", "version"), [("cpython", [3, 10, 4]), ("pypy", [3, 11, 2])])
def test_interpreter_that_cannot_load_recorder_is_refused(
    search_paths: SearchPaths, tmp_path: Path, name: str, version: list[int]
) -> None:
    python = tmp_path / "python"
    description = json.dumps({"name": name, "version": version, "packages": []})
    python.write_text(f"#!/bin/sh\necho 'hello'\necho '{description}'\n")
    python.chmod(0o755)

    refusal = refusal_of(search_paths, str(python))

    assert f"{python} is {name} 3.1" in refusal.message
    assert refusal.hint == "choose another interpreter with --python"


def test_invalid_answer_of_interpreter_is_refused(
    search_paths: SearchPaths, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'not a Python' >&2\nexit 3\n")
    python.chmod(0o755)

    assert refusal_of(search_paths, str(python)).message.endswith(": it ended with 3: not a Python")


DRIVER_FILE = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}.65.06  Release Build"


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
        path.write_text(DRIVER_FILE.format(major))

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
    refusal = preflight(None, profile=True, paths=machine.paths)
    assert isinstance(refusal, EnvironmentUnusable)
    assert "/opt/nsight/libToolsInjection64.so" in refusal.message
    assert "CUDA_INJECTION64_PATH" in refusal.hint


def test_file_that_is_no_library_is_refused_with_the_reason_of_the_loader(machine: Machine) -> None:
    library = machine.install_in_packages("nvidia/cu13/lib/libcupti.so.13")
    refusal = preflight(
        None, profile=True, paths=SearchPaths({}, (str(machine.packages),), machine.root)
    )
    assert isinstance(refusal, EnvironmentUnusable)
    assert str(library) in refusal.message + refusal.hint
