""""""

from __future__ import annotations

from pathlib import Path

import pytest
from devices.doctor.machines import OK, WARN, Machine, files, run_check

from cudakit.devices.doctor.checks import checks_by_id
from cudakit.devices.doctor.variables import Variable, known_variables
from cudakit.torch_rules.setting_keys import SettingRefused
from cudakit.torch_rules.settings import VARIABLES, SettingsWarning, effective


@pytest.mark.parametrize("name", ["CK020", "CK021", "CK022", "CK023", "CK024"])
def test_environment_without_settings_is_ok(machine: Machine, name: str) -> None:
    plain = machine(variables={"PATH": "/usr/bin", "CUDA_HOME": "/usr/local/cuda"})

    assert run_check(name, plain).status is OK


# --- CK020: debugging ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "variable",
    ["CUDA_LAUNCH_BLOCKING", "PYTORCH_NO_CUDA_MEMORY_CACHING", "NUMBA_ENABLE_CUDASIM"],
)
def test_debugging_variable_warns(machine: Machine, variable: str) -> None:
    finding = run_check("CK020", machine(variables={variable: "1"}))

    assert finding.status is WARN
    assert finding.fix == (f"unset {variable}",)


def test_several_variables_are_all_evidence(machine: Machine) -> None:
    both = {"CUDA_LAUNCH_BLOCKING": "1", "CUDA_CACHE_DISABLE": "1"}

    assert run_check("CK020", machine(variables=both)).evidence == both


@pytest.mark.parametrize("off", ["", "0", "false"])
def test_variable_set_to_off_is_ok(machine: Machine, off: str) -> None:
    assert run_check("CK020", machine(variables={"CUDA_LAUNCH_BLOCKING": off})).status is OK


# --- CK024: misspellings ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "intended"),
    [
        ("CUDA_VISIBLE_DEVICE", "CUDA_VISIBLE_DEVICES"),
        ("CUDA_VISIBLE_DEVICES_", "CUDA_VISIBLE_DEVICES"),
        ("cuda_visible_devices", "CUDA_VISIBLE_DEVICES"),
        ("CUDA_LAUNCH_BLOKCING", "CUDA_LAUNCH_BLOCKING"),
        ("PYTORCH_CUDA_ALLOC_CONFIG", "PYTORCH_CUDA_ALLOC_CONF"),
        ("NCCL_SOCKET_IFNAMES", "NCCL_SOCKET_IFNAME"),
        ("NCCL_DEBGU", "NCCL_DEBUG"),
    ],
)
def test_misspelled_variable_warns(machine: Machine, name: str, intended: str) -> None:
    finding = run_check("CK024", machine(variables={name: "1"}))

    assert finding.status is WARN
    assert finding.summary == f"no library reads {name}; the variable is {intended}"


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
        "NCCL_BEDGU",
    ],
)
def test_valid_variable_is_ok(machine: Machine, name: str) -> None:
    assert run_check("CK024", machine(variables={name: "1"})).status is OK


# --- CK021: allocators ----------------------------------------------------------------------------


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
def test_known_allocator_settings_are_ok(machine: Machine, value: str) -> None:
    finding = run_check("CK021", machine(variables={NAME: value}))

    assert finding.status is OK
    assert finding.evidence == {NAME: value}


@pytest.mark.parametrize(
    ("value", "expected_text"),
    [
        ("expandable_segment:True", "1: PyTorch has no setting 'expandable_segment'; did you mean"),
        ("expandable_segments", "20: expected ':' after 'expandable_segments', found the end"),
        ("expandable_segments:true", "21: expandable_segments takes True or False, not 'true'"),
        ("max_split_size_mb:64,,", "22: expected the name of a setting, found ','"),
        ("max_split_size_mb:1", "19: max_split_size_mb is 1 MiB; it must be at least"),
        (
            "garbage_collection_threshold:1.5",
            "30: garbage_collection_threshold takes a number above 0 and below 1",
        ),
        ("roundup_bypass_threshold_mb:64", "1: PyTorch removed roundup_bypass_threshold_mb"),
        (
            "backend:cudaMallocAsync,max_split_size_mb:128",
            "25: max_split_size_mb does nothing with backend:cudaMallocAsync",
        ),
    ],
)
def test_invalid_allocator_settings_warn(machine: Machine, value: str, expected_text: str) -> None:
    finding = run_check("CK021", machine(variables={NAME: value}))

    assert finding.status is WARN
    assert f"{NAME}, character {expected_text}" in finding.summary
    assert finding.evidence == {NAME: value}


def test_hint_of_parser_is_first_fix(machine: Machine) -> None:
    finding = run_check("CK021", machine(variables={NAME: "roundup_bypass_threshold_mb:64"}))

    assert finding.fix == ("leave it out",)


def test_fix_without_hint_of_parser_keeps_other_settings(machine: Machine) -> None:
    text = "max_split_size_mb:128,garbage_collection_threshold:80"

    finding = run_check("CK021", machine(variables={NAME: text}))

    assert finding.fix == (f"correct the value, or unset {NAME}",)


def test_conflicting_allocator_variables_warn(machine: Machine) -> None:
    both = {NAME: "expandable_segments:True", "PYTORCH_ALLOC_CONF": "expandable_segments:False"}

    finding = run_check("CK021", machine(variables=both))

    assert finding.summary == f"both {NAME} and PYTORCH_ALLOC_CONF are set; {NAME} wins"


def test_empty_allocator_variable_takes_precedence(machine: Machine) -> None:
    both = {NAME: "", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}

    assert f"{NAME} wins" in run_check("CK021", machine(variables=both)).summary
    assert run_check("CK021", machine(variables={NAME: ""})).status is OK


def test_equal_allocator_variables_are_ok(machine: Machine) -> None:
    same = dict.fromkeys((NAME, "PYTORCH_ALLOC_CONF"), "expandable_segments:True")

    assert run_check("CK021", machine(variables=same)).status is OK


def test_invalid_setting_of_cudakits_allocator_warns_in_its_words(machine: Machine) -> None:
    invalid = {"CUDAKIT_ALLOC_CONF": "max_split_size:64", NAME: "expandable_segments:True"}

    finding = run_check("CK021", machine(variables=invalid))

    with pytest.raises(SettingRefused) as error, pytest.warns(SettingsWarning):
        effective(invalid)
    assert finding.status is WARN
    assert finding.summary == error.value.message
    assert finding.evidence == {"CUDAKIT_ALLOC_CONF": "max_split_size:64"}
    assert finding.fix == ("see PyTorch's documentation of PYTORCH_CUDA_ALLOC_CONF",)


def test_backend_that_cudakits_allocator_lacks_warns(machine: Machine) -> None:
    asynchronous = {"CUDAKIT_ALLOC_CONF": "backend:cudaMallocAsync"}

    finding = run_check("CK021", machine(variables=asynchronous))

    assert finding.status is WARN
    assert finding.summary == (
        "cudakit's allocator does not support backend:cudaMallocAsync of CUDAKIT_ALLOC_CONF"
    )
    assert finding.evidence == asynchronous


def test_valid_settings_of_both_allocators_are_ok(machine: Machine) -> None:
    both = {"CUDAKIT_ALLOC_CONF": "max_split_size_mb:64", NAME: "expandable_segments:True"}

    finding = run_check("CK021", machine(variables=both))

    assert finding.status is OK
    assert "CUDAKIT_ALLOC_CONF=max_split_size_mb:64" in finding.summary
    assert f"{NAME}=expandable_segments:True" in finding.summary
    assert finding.evidence == both


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
def test_nccl_setting_that_slows_or_is_renamed_warns(
    machine: Machine, name: str, value: str
) -> None:
    assert run_check("CK022", machine(variables={name: value})).status is WARN


@pytest.mark.parametrize(
    "environment",
    [
        {"NCCL_P2P_DISABLE": "0"},
        {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_HCA": "mlx5"},
        {"NCCL_DEBUG": "WARN"},
        {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "nccl.%h.log"},
    ],
)
def test_nccl_settings_of_machine_are_evidence(
    machine: Machine, environment: dict[str, str]
) -> None:
    finding = run_check("CK022", machine(variables=environment))

    assert finding.status is OK
    assert finding.evidence == environment


def test_nccl_feature_that_the_machine_lacks_is_ok(machine: Machine) -> None:
    finding = run_check("CK022", machine(variables={"NCCL_NVLS_ENABLE": "0"}))

    assert finding.status is OK
    assert finding.evidence == {"NCCL_NVLS_ENABLE": "0"}


def test_nccl_version_is_no_setting(machine: Machine) -> None:
    finding = run_check("CK022", machine(variables={"NCCL_VERSION": "2.28.3-1"}))

    assert finding.summary == "NCCL has its default settings"


@pytest.mark.parametrize(
    ("name", "misspelled", "correct"),
    [
        ("CK022", "NCCL_DEBG", "NCCL_SOCKET_IFNAME"),
        ("CK023", "CUDNN_LOGLEVEL_DGB", "CUDNN_LOGDEST_DBG"),
    ],
)
def test_misspelled_variable_is_no_setting_of_its_library(
    machine: Machine, name: str, misspelled: str, correct: str
) -> None:
    alone = run_check(name, machine(variables={misspelled: "1"}))
    both = run_check(name, machine(variables={misspelled: "1", correct: "1"}))

    assert (alone.status, alone.evidence) == (OK, {})
    assert both.summary.endswith(f"; set: {correct}")
    assert run_check("CK024", machine(variables={misspelled: "1"})).status is WARN


def test_nccl_conf_is_read_and_overridden_by_environment(machine: Machine, tmp_path: Path) -> None:
    files(tmp_path, {"/etc/nccl.conf": "# for tests\n#NCCL_IB_DISABLE=1\nNCCL_P2P_DISABLE=1\n"})

    assert run_check("CK022", machine()).evidence == {"NCCL_P2P_DISABLE": "1"}
    assert run_check("CK022", machine(variables={"NCCL_P2P_DISABLE": "0"})).status is OK


# --- CK023: cuBLAS and cuDNN ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "expected_text"),
    [
        ("NVIDIA_TF32_OVERRIDE", "0", "no library uses TF32"),
        ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1", "only the precision of TF32"),
        ("CUBLAS_WORKSPACE_CONFIG", "4096:8", "does not have the form :KiB:count"),
        ("CUBLASLT_WORKSPACE_SIZE", "64", "too small"),
        ("CUBLASLT_LOG_LEVEL", "5", "writes log lines"),
    ],
)
def test_math_setting_that_costs_speed_or_precision_warns(
    machine: Machine, name: str, value: str, expected_text: str
) -> None:
    finding = run_check("CK023", machine(variables={name: value}))

    assert finding.status is WARN
    assert expected_text in finding.summary


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8"),
        ("CUBLASLT_WORKSPACE_SIZE", "32768"),
        ("CUBLASLT_LOG_LEVEL", "0"),
    ],
)
def test_harmless_math_settings_are_evidence(machine: Machine, name: str, value: str) -> None:
    finding = run_check("CK023", machine(variables={name: value}))

    assert finding.status is OK
    assert finding.evidence == {name: value}


TABLE = known_variables()


@pytest.mark.parametrize("row", TABLE.values(), ids=lambda row: row.name)
def test_variable_has_effect_library_and_source(row: Variable) -> None:
    assert row.name.isupper()
    assert row.effect
    assert row.library
    assert row.source
    assert not row.check or row.check in checks_by_id()


@pytest.mark.parametrize(
    "name",
    [*VARIABLES, "PYTORCH_NVML_BASED_CUDA_CHECK", "TORCH_BLAS_PREFER_CUBLASLT", "XDG_CACHE_HOME"],
)
def test_table_contains_variables_of_allocators_and_cudakit(name: str) -> None:
    assert name in TABLE
