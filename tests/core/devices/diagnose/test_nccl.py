from __future__ import annotations

from pathlib import Path

import pytest
from core.devices.diagnose.machines import OK, WARN, Machine, files, judged


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
