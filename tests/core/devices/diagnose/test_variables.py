from __future__ import annotations

from pathlib import Path

import pytest
from core.devices.diagnose.machines import OK, WARN, Machine, files, judged


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


# --- CK021: PyTorch's allocator -------------------------------------------------------------------


NAME = "PYTORCH_CUDA_ALLOC_CONF"


@pytest.mark.parametrize(
    "value",
    [
        "expandable_segments:True",
        "max_split_size_mb:128, garbage_collection_threshold:0.8",
        "roundup_power2_divisions:[256:1,512:2,>:4],expandable_segments:False",
        "backend:cudaMallocAsync",
        "max_split_size_mb:128,",
        "release_lock_on_hipmalloc:True",
        "pinned_free_catch_all:True",
    ],
)
def test_settings_that_pytorch_knows_are_well(machine: Machine, value: str) -> None:
    found = judged("CK021", machine(variables={NAME: value}))

    assert found.status is OK
    assert found.evidence == {NAME: value}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("expandable_segment:True", "1: PyTorch knows no key 'expandable_segment'"),
        ("expandable_segments", "20: here should be ':', after 'expandable_segments', not the end"),
        ("expandable_segments:true", "21: expandable_segments takes True or False, not 'true'"),
        ("max_split_size_mb:64,,", "22: here should be the name of a setting, not ','"),
        ("max_split_size_mb:1", "19: max_split_size_mb is 1 MiB; it must be at least"),
        (
            "garbage_collection_threshold:1.5",
            "30: garbage_collection_threshold takes a number above 0 and below 1",
        ),
        ("roundup_bypass_threshold_mb:64", "1: PyTorch has dropped roundup_bypass_threshold_mb"),
        (
            "backend:cudaMallocAsync,max_split_size_mb:128",
            "25: max_split_size_mb does nothing with backend:cudaMallocAsync",
        ),
    ],
)
def test_settings_that_stop_a_program_or_do_nothing_are_pointed_out(
    machine: Machine, value: str, words: str
) -> None:
    found = judged("CK021", machine(variables={NAME: value}))

    assert found.status is WARN
    assert f"{NAME}, character {words}" in found.summary
    assert found.evidence == {NAME: value}


def test_what_the_error_advises_comes_first(machine: Machine) -> None:
    found = judged("CK021", machine(variables={NAME: "roundup_bypass_threshold_mb:64"}))

    assert found.fix == ("leave it out", f"export {NAME}=expandable_segments:True, or unset it")


def test_of_two_names_that_disagree_one_wins(machine: Machine) -> None:
    both = {NAME: "expandable_segments:True", "PYTORCH_ALLOC_CONF": "expandable_segments:False"}

    found = judged("CK021", machine(variables=both))

    assert found.summary == f"both {NAME} and PYTORCH_ALLOC_CONF are set; {NAME} wins"


def test_a_name_that_is_set_to_nothing_wins_too(machine: Machine) -> None:
    both = {NAME: "", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}

    assert f"{NAME} wins" in judged("CK021", machine(variables=both)).summary
    assert judged("CK021", machine(variables={NAME: ""})).status is OK


def test_two_names_that_agree_are_well(machine: Machine) -> None:
    same = dict.fromkeys((NAME, "PYTORCH_ALLOC_CONF"), "expandable_segments:True")

    assert judged("CK021", machine(variables=same)).status is OK


# --- CK022: NCCL ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_P2P_DISABLE", "1"),
        ("NCCL_PROTO", "LL"),
        ("NCCL_DEBUG", "info"),
        ("NCCL_BLOCKING_WAIT", "1"),
    ],
)
def test_a_setting_that_slows_or_does_nothing_is_explained(
    machine: Machine, name: str, value: str
) -> None:
    assert judged("CK022", machine(variables={name: value})).status is WARN


@pytest.mark.parametrize(
    "environment",
    [
        {"NCCL_P2P_DISABLE": "0"},
        {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_HCA": "mlx5"},
        {"NCCL_DEBUG": "WARN"},
        {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "nccl.%h.log"},
    ],
)
def test_settings_that_belong_to_the_machine_are_shown(
    machine: Machine, environment: dict[str, str]
) -> None:
    found = judged("CK022", machine(variables=environment))

    assert found.status is OK
    assert found.evidence == environment


def test_what_a_machine_may_have_to_do_without_is_explained_and_not_judged(
    machine: Machine,
) -> None:
    found = judged("CK022", machine(variables={"NCCL_NVLS_ENABLE": "0"}))

    assert found.status is OK
    assert found.evidence == {"NCCL_NVLS_ENABLE": "0: NVSwitch does no reductions (NVLink SHARP)"}


def test_the_version_that_images_name_is_no_setting(machine: Machine) -> None:
    found = judged("CK022", machine(variables={"NCCL_VERSION": "2.28.3-1"}))

    assert found.summary == "NCCL has its default settings"


def test_the_file_of_the_system_counts_unless_the_environment_says_otherwise(
    machine: Machine, tmp_path: Path
) -> None:
    files(tmp_path, {"/etc/nccl.conf": "# for tests\n#NCCL_IB_DISABLE=1\nNCCL_P2P_DISABLE=1\n"})

    assert judged("CK022", machine()).evidence == {"NCCL_P2P_DISABLE": "1"}
    assert judged("CK022", machine(variables={"NCCL_P2P_DISABLE": "0"})).status is OK


# --- CK023: cuBLAS and cuDNN ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("NVIDIA_TF32_OVERRIDE", "0", "no library uses TF32"),
        ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1", "the precision of TF32"),
        ("CUBLAS_WORKSPACE_CONFIG", "4096:8", "has not the form :KiB:count"),
        ("CUBLASLT_WORKSPACE_SIZE", "64", "too little"),
        ("CUBLASLT_LOG_LEVEL", "5", "writes lines for every call"),
    ],
)
def test_a_setting_that_costs_speed_or_precision_is_explained(
    machine: Machine, name: str, value: str, words: str
) -> None:
    found = judged("CK023", machine(variables={name: value}))

    assert found.status is WARN
    assert words in found.summary


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8"),
        ("CUBLASLT_WORKSPACE_SIZE", "32768"),
        ("CUBLASLT_LOG_LEVEL", "0"),
    ],
)
def test_settings_that_cost_nothing_are_shown(machine: Machine, name: str, value: str) -> None:
    found = judged("CK023", machine(variables={name: value}))

    assert found.status is OK
    assert found.evidence == {name: value}
