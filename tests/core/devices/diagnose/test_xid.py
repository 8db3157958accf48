from __future__ import annotations

import pytest
from core.devices.diagnose.machines import FAIL, OK, UNKNOWN, WARN, Machine, judged

from cudakit.units import Unavailable

LINE = "NVRM: Xid (PCI:0000:65:00): {}, pid=1234, name=python3, Ch 00000008"


def test_a_log_without_xids_is_well(machine: Machine) -> None:
    assert judged("CK033", machine()).status is OK


def test_a_log_that_may_not_be_read_is_not_judged(machine: Machine) -> None:
    found = judged("CK033", machine(kernel_log=Unavailable("EPERM on /dev/kmsg")))

    assert found.status is UNKNOWN
    assert found.summary == "EPERM on /dev/kmsg"


@pytest.mark.parametrize(
    ("number", "status"),
    [(31, WARN), (63, WARN), (79, FAIL), (48, FAIL), (154, WARN), (9999, WARN)],
)
def test_an_xid_is_judged_by_whose_doing_it_mostly_is(
    machine: Machine, number: int, status: object
) -> None:
    assert judged("CK033", machine(kernel_log=(LINE.format(number),))).status is status


def test_xids_are_counted_by_gpu_and_number(machine: Machine) -> None:
    log = (LINE.format(31), LINE.format(31), LINE.format(79), "usb 1-1: new device")

    found = judged("CK033", machine(kernel_log=log))

    assert found.evidence == {
        "Xid 31 on 0000:65:00": "2×, a kernel used an address that is not mapped",
        "Xid 79 on 0000:65:00": "1×, the GPU fell off the bus",
    }
    assert found.status is FAIL
