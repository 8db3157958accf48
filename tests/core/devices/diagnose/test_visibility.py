from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from core.devices.diagnose.machines import (
    FAIL,
    OK,
    UNKNOWN,
    WARN,
    Machine,
    cuda,
    gpu,
    instance,
    judged,
    nvml,
    seen,
)

from cudakit.gpu.api.facts import CudaView
from cudakit.units import Unavailable

ALL = tuple(str(gpu(index).uuid) for index in range(3))


def visible(value: str | None, *positions: int) -> CudaView:
    """Make CUDA's view of three GPUs of which a variable leaves some."""
    shown = tuple(replace(gpu(at), index=place) for place, at in enumerate(positions))
    hidden = tuple(replace(gpu(at), index=-1) for at in range(3) if at not in positions)
    return cuda(visible_devices=value, devices=shown, hidden=hidden, order=ALL)


# --- CK014: CUDA_VISIBLE_DEVICES -------------------------------------------------------------------


def test_without_the_variable_every_device_is_visible(machine: Machine) -> None:
    assert judged("CK014", machine()).status is OK


def test_a_list_of_devices_tells_how_many_it_shows(machine: Machine) -> None:
    found = judged("CK014", machine(cuda=visible("2,0", 2, 0)))

    assert found.summary == "CUDA_VISIBLE_DEVICES=2,0 shows 2 of 3 devices"


def test_an_entry_that_is_no_device_ends_the_list(machine: Machine) -> None:
    found = judged("CK014", machine(cuda=visible("0,7,1", 0)))

    assert found.status is WARN
    assert "there is no device 7" in found.summary
    assert found.evidence["devices"] == "1 of 3"


@pytest.mark.parametrize("value", ["", "-1", "0,0", "GPU-ffff"])
def test_a_value_that_hides_every_device_fails(machine: Machine, value: str) -> None:
    found = judged("CK014", machine(cuda=visible(value)))

    assert found.status is FAIL
    assert found.fix[0] == "unset CUDA_VISIBLE_DEVICES"


def test_where_cuda_sees_nothing_at_all_the_variable_is_not_to_blame(machine: Machine) -> None:
    nothing = machine(cuda=Unavailable("no libcuda"), variables={"CUDA_VISIBLE_DEVICES": "0"})

    assert judged("CK014", nothing).status is UNKNOWN


# --- CK015: the order ------------------------------------------------------------------------------


def three(*positions: int, value: str | None = None) -> dict[str, Any]:
    return {"nvml": nvml(*(gpu(at) for at in range(3))), "cuda": visible(value, *positions)}


def test_cuda_that_counts_as_nvidia_smi_does_is_well(machine: Machine) -> None:
    assert judged("CK015", machine(**three(0, 1, 2))).status is OK


def test_another_order_shows_which_device_is_which(machine: Machine) -> None:
    found = judged("CK015", machine(**three(2, 0, 1)))

    assert found.status is WARN
    assert found.evidence["cuda:0"] == "GPU 2 of nvidia-smi"
    assert found.fix == ("export CUDA_DEVICE_ORDER=PCI_BUS_ID",)


def test_an_order_that_somebody_asked_for_is_well(machine: Machine) -> None:
    assert judged("CK015", machine(**three(2, 0, value="2,0"))).status is OK


def test_an_order_that_cuda_does_not_know_is_pointed_out(machine: Machine) -> None:
    odd = machine(variables={"CUDA_DEVICE_ORDER": "PCI"})

    assert judged("CK015", odd).summary == "CUDA_DEVICE_ORDER=PCI means nothing to CUDA"


@pytest.mark.parametrize("silent", ["nvml", "cuda"])
def test_an_order_needs_both_libraries(machine: Machine, silent: str) -> None:
    assert judged("CK015", machine(**{silent: Unavailable("no")})).status is UNKNOWN


# --- CK017: MIG ------------------------------------------------------------------------------------


def test_without_mig_there_is_nothing_to_make(machine: Machine) -> None:
    assert judged("CK017", machine()).summary == "no GPU is in MIG mode"


def test_mig_with_instances_is_well(machine: Machine) -> None:
    divided = seen(gpu(0, mig_mode=True, mig_mode_pending=True), instance(0, 0), instance(1, 0))

    assert judged("CK017", machine(**divided)).evidence == {"GPU 0": "2 instances"}


@pytest.mark.parametrize(("others", "status"), [((), FAIL), ((gpu(1),), WARN)])
def test_mig_without_instances_leaves_nothing_to_use(
    machine: Machine, others: tuple[Any, ...], status: object
) -> None:
    empty = seen(gpu(0, mig_mode=True, mig_mode_pending=True), *others)

    found = judged("CK017", machine(**empty))

    assert found.status is status
    assert "GPU 0 is in MIG mode and has no instance" in found.summary


def test_a_change_of_mode_waits_for_a_reset(machine: Machine) -> None:
    found = judged("CK017", machine(**seen(gpu(0, mig_mode_pending=True))))

    assert found.status is WARN
    assert found.evidence == {"GPU 0": "now off, then on"}


# --- CK018: compute mode ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("modes", "status"),
    [
        (("default", "default"), OK),
        (("exclusive process", "default"), WARN),
        (("prohibited", "default"), WARN),
        (("prohibited", "prohibited"), FAIL),
    ],
)
def test_a_compute_mode_keeps_processes_out(
    machine: Machine, modes: tuple[str, ...], status: object
) -> None:
    gpus = seen(*(gpu(at, compute_mode=mode) for at, mode in enumerate(modes)))

    assert judged("CK018", machine(**gpus)).status is status
