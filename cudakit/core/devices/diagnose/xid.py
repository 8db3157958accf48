"""What the driver wrote to the kernel's log about errors of GPUs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from cudakit.core.devices.diagnose.check import CannotTell, Finding, fail, ok, warn
from cudakit.gpu.api.run_context import RunContext
from cudakit.units import Unavailable

# "NVRM: Xid (PCI:0000:65:00): 79, pid=1234, name=python, GPU has fallen off the bus."
_XID = re.compile(r"Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")

# Mostly the doing of a program (Xid Errors, the catalogue).
_PROGRAMS: Mapping[int, str] = MappingProxyType(
    {
        13: "a kernel's exception, such as an index out of range",
        31: "a kernel used an address that is not mapped",
        43: "a program was ended after an error of its own",
        45: "channels of a program were cleaned up when it ended",
        68: "an exception of the video processor",
        69: "an exception of the graphics engine",
    }
)
# The hardware's, or the driver's.
_HARDWARE: Mapping[int, str] = MappingProxyType(
    {
        32: "corrupted commands, often of the PCIe link",
        38: "the driver's firmware failed",
        46: "the GPU stopped processing",
        48: "memory error that could not be corrected",
        54: "auxiliary power is not connected",
        61: "internal breakpoint of the micro-controller",
        62: "internal halt of the micro-controller",
        64: "a memory row could not be remapped",
        74: "NVLink error",
        79: "the GPU fell off the bus",
        94: "contained memory error: the program was ended",
        95: "uncontained memory error: reset the GPU",
        109: "context switch timed out",
        110: "security fault",
        119: "the GPU's system processor did not answer",
        120: "the GPU's system processor failed",
        121: "chip-to-chip link error",
        136: "NVLink error",
        140: "memory error that could not be corrected",
        143: "the GPU could not be initialised",
        144: "NVLink error",
        145: "NVLink error",
        149: "NVLink error",
    }
)
# Worth knowing, and no failure by themselves.
_NOTICES: Mapping[int, str] = MappingProxyType(
    {
        63: "a memory row was remapped or a page retired: see CK028",
        92: "many corrected memory errors",
        154: "the recovery that the driver asks for has changed: see CK028",
    }
)
_CATALOGUE = "https://docs.nvidia.com/deploy/xid-errors/"


def no_xids(c: RunContext) -> Finding:
    """Xids are the driver's error messages in the kernel's log, each kind with a number.

    13, 31, 43 and 45 are mostly bugs of programs; 48, 63, 64, 92, 94 and 95 tell of memory, 74 of
    NVLink, 79 that the GPU fell off the bus, 119 and 120 that its own processor failed. The log goes
    back to the start of the machine or as far as its buffer lasts, and reading it needs privilege on most
    systems. The catalogue: https://docs.nvidia.com/deploy/xid-errors/
    """
    if isinstance(c.driver.kernel_log, Unavailable):
        raise CannotTell(c.driver.kernel_log.reason)
    found = Counter(_xids(c.driver.kernel_log))
    if not found:
        return ok("the kernel's log tells of no Xid")
    evidence = {
        f"Xid {number} on {where}": f"{count}×, {_meaning(number)}"
        for (where, number), count in sorted(found.items())
    }
    numbers = sorted({number for _, number in found})
    told = ", ".join(map(str, numbers))
    if all(number in _PROGRAMS for number in numbers):
        return warn(
            f"programs made errors on a GPU since the machine started (Xid {told})",
            evidence,
            "compute-sanitizer PROGRAM shows the kernel and the line",
        )
    judged = fail if any(number in _HARDWARE for number in numbers) else warn
    return judged(
        f"the driver has told of errors of a GPU since the machine started (Xid {told})",
        evidence,
        f"look the numbers up: {_CATALOGUE}",
        "if they come again after a reset or reboot, have the GPU tested (dcgmi diag -r 3)",
    )


def _xids(log: tuple[str, ...]) -> list[tuple[str, int]]:
    found = (_XID.search(line) for line in log if "Xid" in line)
    return [(match[1], int(match[2])) for match in found if match]


def _meaning(number: int) -> str:
    words = {**_PROGRAMS, **_NOTICES, **_HARDWARE}
    return words.get(number, "see the catalogue")
