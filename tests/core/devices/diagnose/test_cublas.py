from __future__ import annotations

import pytest
from core.devices.diagnose.machines import OK, WARN, Machine, judged


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
