from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cudakit.gpu import probe_child
from cudakit.gpu.api.facts import CudaView, attributes
from cudakit.gpu.probe import cuda_view, start_probe
from cudakit.units import Unavailable

FIRST = "11111111222233334444555555555555"
SECOND = "66666666777788889999aaaaaaaaaaaa"


def device(uuid: str = FIRST, **changes: Any) -> dict[str, Any]:
    return {
        "gpu_uuid": uuid,
        "uuid": uuid,
        "pci_bus_id": "0000:65:00.0",
        "name": "NVIDIA H200",
        "memory": 150109880320,
        "attributes": {"8": 49152, "16": 132, "18": 0, "20": 3, "75": 9, "76": 0, "148": None},
        **changes,
    }


def driver_answer(*devices: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "version": 13000,
        "devices": list(devices),
        "peers": [],
        "libcuda": "/usr/lib/libcuda.so.580.159.04",
        **changes,
    }


def view(
    visible: dict[str, Any] | str,
    answer_of_all: dict[str, Any] | str | None = None,
    *,
    visible_devices: str | None = None,
) -> CudaView:
    cuda = cuda_view(visible, answer_of_all, visible_devices=visible_devices, device_order=None)
    assert isinstance(cuda, CudaView)
    return cuda


def probe_answer(script: str, *, seconds: float = 20, **environment: str) -> CudaView | Unavailable:
    """Return the answer of a child process that runs a test script."""
    return start_probe(
        environment=environment, command=[sys.executable, "-c", script], seconds=seconds
    ).answer()


# --- the answer ------------------------------------------------------------------------------------


def test_attributes_become_fields_in_their_units() -> None:
    (facts,) = view(driver_answer(device())).devices

    assert facts.uuid == "GPU-11111111-2222-3333-4444-555555555555"
    assert facts.pci_bus_id == "0000:65:00.0"
    assert facts.fields["compute_capability"] == "9.0"
    assert facts.fields["architecture"] == "Hopper"
    assert facts.fields["usable_memory_bytes"] == 150109880320
    assert facts.fields["max_shared_memory_per_block_bytes"] == 49152
    assert facts.fields["multiprocessor_count"] == 132
    assert facts.fields["integrated"] is False
    assert facts.fields["compute_mode"] == "exclusive process"


def test_unsupported_attribute_is_unavailable() -> None:
    (facts,) = view(driver_answer(device())).devices

    reason = Unavailable("not supported by this driver")
    assert facts.fields["atomic_reduction_supported"] == reason
    assert {attribute.name for attribute in attributes()} <= facts.fields.keys()


def test_call_error_is_reason_of_field() -> None:
    refused = {"error": [999, "CUDA_ERROR_UNKNOWN", "unknown error"]}
    (facts,) = view(driver_answer(device(memory=refused, uuid=refused))).devices

    assert facts.fields["usable_memory_bytes"] == Unavailable("CUDA_ERROR_UNKNOWN: unknown error")
    assert facts.uuid == Unavailable("CUDA_ERROR_UNKNOWN: unknown error")
    assert facts.fields["name"] == "NVIDIA H200"


def test_mig_instance_has_own_uuid() -> None:
    (facts,) = view(driver_answer(device(uuid=SECOND, gpu_uuid=FIRST))).devices

    assert facts.uuid == "MIG-66666666-7777-8888-9999-aaaaaaaaaaaa"


def test_hidden_devices_are_listed_by_second_child_only() -> None:
    two_devices = driver_answer(device(FIRST), device(SECOND))
    cuda = view(driver_answer(device(SECOND)), two_devices, visible_devices="1")

    assert [(device.index, device.uuid) for device in cuda.hidden] == [
        (-1, "GPU-11111111-2222-3333-4444-555555555555")
    ]
    assert cuda.devices[0].index == 0
    assert cuda.order == (
        "GPU-11111111-2222-3333-4444-555555555555",
        "GPU-66666666-7777-8888-9999-aaaaaaaaaaaa",
    )


def test_hidden_devices_are_listed_despite_cuda_error() -> None:
    error = {
        "version": 13000,
        "libcuda": None,
        "error": [100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"],
    }
    cuda = view(error, driver_answer(device()), visible_devices="")

    assert cuda.error == (100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected")
    assert (len(cuda.devices), len(cuda.hidden)) == (0, 1)
    assert isinstance(cuda.libcuda, Unavailable)


def test_failure_of_second_child_is_ignored() -> None:
    cuda = view(
        driver_answer(device()), "the CUDA driver did not answer in time", visible_devices="0"
    )

    assert (len(cuda.devices), cuda.hidden) == (1, ())


def test_peers_are_directed_pairs() -> None:
    cuda = view(driver_answer(device(FIRST), device(SECOND), peers=[[0, 1, 1], [1, 0, 0]]))

    assert cuda.peer_access == ((0, 1), (1, 0))
    assert cuda.peer_atomics == ((0, 1),)


@pytest.mark.parametrize(("number", "version"), [(13000, (13, 0)), (12090, (12, 9))])
def test_version_is_decoded_as_in_cuda_h(number: int, version: tuple[int, int]) -> None:
    assert view(driver_answer(version=number)).driver_version == version


# --- children that do not answer -------------------------------------------------------------------


def test_answer_of_child_is_returned() -> None:
    cuda = probe_answer(f"print({json.dumps(json.dumps(driver_answer(device())))})")

    assert isinstance(cuda, CudaView)
    assert cuda.devices[0].fields["name"] == "NVIDIA H200"


def test_hanging_driver_times_out() -> None:
    cuda = probe_answer("import time; time.sleep(60)", seconds=0.3)

    assert cuda == Unavailable("the CUDA driver did not answer within 0.3 s")


def test_crashing_driver_is_reported() -> None:
    cuda = probe_answer("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")

    assert cuda == Unavailable("the CUDA driver crashed during the query (SIGSEGV)")


def test_failing_child_is_quoted() -> None:
    cuda = probe_answer("raise SystemExit('no ctypes here')")

    assert isinstance(cuda, Unavailable)
    assert cuda.reason == "the process that queries the CUDA driver exited with 1: no ctypes here"


def test_missing_interpreter_is_reported() -> None:
    cuda = start_probe(environment={}, command=["/nowhere/python"]).answer()

    assert isinstance(cuda, Unavailable)
    assert "cannot start the process" in cuda.reason


def test_second_child_runs_without_variable_if_set() -> None:
    script = (
        "import json, os;"
        "seen = os.environ.get('CUDA_VISIBLE_DEVICES', 'unset');"
        "device = {'gpu_uuid': 'ab' * 16 if seen == 'unset' else 'cd' * 16, 'pci_bus_id': seen,"
        " 'name': '', 'memory': 0, 'attributes': {}};"
        "device['uuid'] = device['gpu_uuid'];"
        "print(json.dumps({'version': 1, 'devices': [device], 'libcuda': ''}))"
    )
    imports, hidden = probe_answer(script), probe_answer(script, CUDA_VISIBLE_DEVICES="7")

    assert isinstance(imports, CudaView)
    assert isinstance(hidden, CudaView)
    assert [device.pci_bus_id for device in (*imports.devices, *imports.hidden)] == ["unset"]
    assert [device.pci_bus_id for device in (*hidden.devices, *hidden.hidden)] == ["7", "unset"]
    assert (imports.visible_devices, hidden.visible_devices) == (None, "7")


def test_injected_profiler_does_not_enter_child() -> None:
    script = "import os; raise SystemExit(str('CUDA_INJECTION64_PATH' in os.environ))"

    assert str(probe_answer(script, CUDA_INJECTION64_PATH="/opt/tool.so")).count("False") == 1


# --- the child -------------------------------------------------------------------------------------


def run_child(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-I", "-S", str(probe_child.__file__), *arguments]
    return subprocess.run(line, capture_output=True, text=True, check=False, env=environment)


def test_missing_library_is_named_by_child() -> None:
    if Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists():
        pytest.skip("there is a driver")

    result = run_child("10", "1")
    assert (result.returncode, result.stderr) == (0, "")
    assert "libcuda.so.1" in json.loads(result.stdout)["missing"]


def test_child_imports_standard_library_only() -> None:
    tree = ast.parse(Path(str(probe_child.__file__)).read_text(encoding="utf-8"))

    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    imports_from = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules = {alias.name for node in imports for alias in node.names}
    modules |= {str(node.module).partition(".")[0] for node in imports_from}
    assert "ctypes" in modules <= sys.stdlib_module_names


FAKE_DRIVER = """
#include <stdio.h>
#include <string.h>
#include <unistd.h>
int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
int cuInit(unsigned flags) { printf("a driver that talks\\n"); fflush(stdout); HANG return INIT; }
int cuGetErrorName(int code, const char **text) { *text = "CUDA_ERROR_NO_DEVICE"; return 0; }
int cuGetErrorString(int code, const char **text) { *text = "no device"; return 0; }
int cuDeviceGetCount(int *n) { *n = 2; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetUuid(char *uuid, int device) { memset(uuid, 17 + device, 16); return 0; }
int cuDeviceGetUuid_v2(char *uuid, int device) { memset(uuid, 17 + device, 16); return 0; }
int cuDeviceGetPCIBusId(char *text, int size, int device) {
  snprintf(text, size, "0000:0%d:00.0", device);
  return 0;
}
int cuDeviceGetName(char *text, int size, int device) { snprintf(text, size, "Fake %d", device); return 0; }
int cuDeviceTotalMem_v2(size_t *size, int device) { *size = 1ul << 40; return 0; }
int cuDeviceGetAttribute(int *value, int number, int device) { *value = number; return number > 140 ? 1 : 0; }
int cuDeviceCanAccessPeer(int *can, int one, int other) { *can = one == 0; return 0; }
int cuDeviceGetP2PAttribute(int *value, int what, int one, int other) { *value = what == 3; return 0; }
"""


@pytest.fixture
def driver(tmp_path: Path) -> Any:
    """Build a fake libcuda, and return its answer."""
    if not any(
        os.access(f"{directory}/cc", os.X_OK) for directory in os.environ["PATH"].split(":")
    ):
        pytest.skip("needs a C compiler")

    def build(*, init: int = 0, hang: str = "") -> CudaView | Unavailable:
        source = tmp_path / "cuda.c"
        source.write_text(FAKE_DRIVER)
        library = tmp_path / "libcuda.so.1"
        subprocess.run(
            ["cc", "-shared", "-fPIC", f"-DINIT={init}", f"-DHANG={hang}", "-o", library, source],  # noqa: S607
            check=True,
        )
        return start_probe(environment={"LD_LIBRARY_PATH": str(tmp_path)}, seconds=2).answer()

    return build


def test_child_queries_every_device(driver: Any, tmp_path: Path) -> None:
    cuda = driver()

    assert isinstance(cuda, CudaView)
    assert (cuda.driver_version, cuda.error) == ((13, 0), None)
    assert [device.fields["name"] for device in cuda.devices] == ["Fake 0", "Fake 1"]
    assert cuda.devices[1].uuid == "GPU-12121212-1212-1212-1212-121212121212"
    assert cuda.devices[0].fields["usable_memory_bytes"] == 1 << 40
    assert cuda.devices[0].fields["multiprocessor_count"] == 16
    assert isinstance(cuda.devices[0].fields["atomic_reduction_supported"], Unavailable)
    assert cuda.peer_access == cuda.peer_atomics == ((0, 1),)
    assert cuda.libcuda == str(tmp_path / "libcuda.so.1")


def test_failed_cuinit_has_code_name_and_explanation(driver: Any) -> None:
    cuda = driver(init=100)

    assert isinstance(cuda, CudaView)
    assert cuda.error == (100, "CUDA_ERROR_NO_DEVICE", "no device")
    assert cuda.devices == ()


def test_driver_hanging_in_native_code_is_killed(driver: Any) -> None:
    cuda = driver(hang="sleep(60);")

    assert isinstance(cuda, Unavailable)
    assert "did not answer" in cuda.reason


def test_driver_crashing_in_native_code_is_reported(driver: Any) -> None:
    cuda = driver(hang="*(volatile int*)0=1;")

    assert isinstance(cuda, Unavailable)
    assert cuda.reason.startswith("the CUDA driver crashed during the query (SIGSEGV)")
