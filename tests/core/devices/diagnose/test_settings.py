from __future__ import annotations

import pytest
from core.devices.diagnose.machines import OK, WARN, Machine, judged


@pytest.mark.parametrize("name", ["CK020", "CK021", "CK022", "CK023", "CK024"])
def test_an_environment_without_settings_is_well(machine: Machine, name: str) -> None:
    plain = machine(variables={"PATH": "/usr/bin", "CUDA_HOME": "/usr/local/cuda"})

    assert judged(name, plain).status is OK


# --- CK020: left from finding errors ---------------------------------------------------------------


@pytest.mark.parametrize(
    "variable",
    ["CUDA_LAUNCH_BLOCKING", "PYTORCH_NO_CUDA_MEMORY_CACHING", "NUMBA_ENABLE_CUDASIM"],
)
def test_a_variable_for_finding_errors_is_pointed_out(machine: Machine, variable: str) -> None:
    found = judged("CK020", machine(variables={variable: "1"}))

    assert found.status is WARN
    assert found.fix == (f"unset {variable}",)


def test_several_variables_are_all_named(machine: Machine) -> None:
    both = {"CUDA_LAUNCH_BLOCKING": "1", "CUDA_CACHE_DISABLE": "1"}

    assert judged("CK020", machine(variables=both)).evidence == both


@pytest.mark.parametrize("off", ["", "0", "false"])
def test_a_variable_that_is_off_slows_nothing(machine: Machine, off: str) -> None:
    assert judged("CK020", machine(variables={"CUDA_LAUNCH_BLOCKING": off})).status is OK


# --- CK024: misspelt -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("CUDA_VISIBLE_DEVICE", "CUDA_VISIBLE_DEVICES"),
        ("CUDA_VISIBLE_DEVICES_", "CUDA_VISIBLE_DEVICES"),
        ("cuda_visible_devices", "CUDA_VISIBLE_DEVICES"),
        ("CUDA_LAUNCH_BLOKCING", "CUDA_LAUNCH_BLOCKING"),
        ("PYTORCH_CUDA_ALLOC_CONFIG", "PYTORCH_CUDA_ALLOC_CONF"),
        ("NCCL_SOCKET_IFNAMES", "NCCL_SOCKET_IFNAME"),
    ],
)
def test_a_name_one_letter_off_is_pointed_out(machine: Machine, name: str, meant: str) -> None:
    found = judged("CK024", machine(variables={name: "1"}))

    assert found.status is WARN
    assert found.summary == f"nothing reads {name}; {meant} is the variable"


@pytest.mark.parametrize(
    "name",
    [
        "CUDA_VISIBLE_DEVICES",
        "CUDA_HOME",
        "CUDA_PATH",
        "CUDA_VERSION",
        "NCCL_BLOCKING_WAIT",
        "NCCL_DEBUG_FILE",
        "NCCL_NVB_DISABLE",
        "CUDA_MPS_LOG_DIRECTORY",
        "NVIDIA_REQUIRE_CUDA",
        "TORCH_CUDA_ARCH_LIST",
        "MY_CUDA_VISIBLE_DEVICE",
    ],
)
def test_a_name_that_is_meant_is_left_alone(machine: Machine, name: str) -> None:
    assert judged("CK024", machine(variables={name: "1"})).status is OK
