"""Xid errors: the table of their meanings, and the check of the kernel log (CK033)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from cudakit.devices.diagnose.check import (
    Finding,
    fail_finding,
    ok_finding,
    require_fact,
    warn_finding,
)
from cudakit.gpu.api.run_context import RunContext

CATALOG_URL = "https://docs.nvidia.com/deploy/xid-errors/"

# A line of the kernel log: "NVRM: Xid (PCI:0000:65:00): 79, pid=1234, name=python, GPU has fallen off the
# bus."
_XID_PATTERN = re.compile(r"Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")
_ROW_PATTERN = re.compile(r"(\d+) (\w+) ([^|]+?)(?: \| (.+))?")


@dataclass(frozen=True, slots=True)
class Xid:
    """A kind of error that the driver writes to the kernel log."""

    number: int
    origin: str  # usual cause, by NVIDIA's catalog: "program" or "hardware"; "notice" if it needs no action
    meaning: str
    action: str  # recommended action


@cache
def known_xids() -> Mapping[int, Xid]:
    """Return the table of Xid errors by number."""
    row_matches = (_ROW_PATTERN.fullmatch(line) for line in _TABLE.strip().splitlines())
    row_fields = (row_match.groups(default="") for row_match in row_matches if row_match)
    return {
        int(number): Xid(int(number), origin, meaning, action or _USUAL_ACTIONS[origin])
        for number, origin, meaning, action in row_fields
    }


_USUAL_ACTIONS = {
    "program": "run the program under compute-sanitizer: it prints the kernel and the source line",
    "hardware": "reset the GPU or reboot; if the error returns, test the GPU (dcgmi diag -r 3)",
    "notice": "no action is needed unless the Xid appears often",
}

# Number, origin, meaning, and an action if it differs from the usual action for the origin. Sources: Xid
# Errors, the catalog; NVIDIA/open-gpu-kernel-modules, nverror.h.
_TABLE = """
13 program exception in a kernel, such as an index out of bounds
25 program invalid command buffer
31 program memory page fault: a kernel accessed an unmapped address
32 hardware corrupt command buffer, often due to the PCIe link
38 hardware driver firmware error
39 hardware error of a copy engine
40 hardware error of a copy engine
41 hardware error of a copy engine
43 program the GPU stopped the program after an error in the program
44 hardware graphics engine fault during a context switch
45 program cleanup of a program that ended after an error, Ctrl-C or kill | find the first Xid before this one
46 hardware the GPU stopped processing
48 hardware uncorrectable memory error (double-bit ECC)
54 hardware auxiliary power is not connected | check the power cables
56 hardware display engine error
57 hardware error of the memory interface
58 hardware unstable memory interface
60 program video processor exception | check the video data and the calls of the video library
61 hardware breakpoint of the internal microcontroller
62 hardware halt of the internal microcontroller
63 notice a memory row was remapped, or a page retired | cudakit doctor --only CK028 shows what to do
64 hardware a memory row could not be remapped, or a page not retired
65 program video encoder exception | check the video data and the calls of the video library
68 program video decoder exception | check the video data and the calls of the video library
69 program graphics engine exception | check the graphics calls of the program
70 hardware error of a copy engine
71 hardware error of a copy engine
72 hardware error of a copy engine
74 hardware NVLink error | check the error counters: nvidia-smi nvlink -e
75 hardware error of a copy engine
76 hardware error of a copy engine
77 hardware error of a copy engine
78 hardware a virtual GPU could not start | update the drivers of host and guest
79 hardware the GPU has fallen off the bus | reboot; if this repeats, check power, cooling and the PCIe slot
80 hardware corrupt data sent to the GPU
85 hardware error of a copy engine
92 notice high rate of corrected memory errors
93 notice the wear limit of the GPU's flash memory (InfoROM) is reached
94 hardware contained memory error: only the affected program ended | restart the program; reset the GPU later
95 hardware uncontained memory error: the GPU must be reset
109 hardware context switch timeout
110 hardware security fault
119 hardware the GPU's system processor (GSP) did not answer
120 hardware the GPU's system processor (GSP) failed
121 notice corrected error of the NVLink-C2C link
122 hardware reading the GPU's flash memory failed
123 hardware writing the GPU's flash memory failed
124 hardware erasing the GPU's flash memory failed
125 hardware error in the file system of the GPU's flash memory (InfoROM)
136 hardware NVLink training failed
137 program illegal access to another GPU's memory over NVLink
140 hardware uncorrectable memory error
141 notice error in a fast path of CUDA
143 hardware the GPU could not be initialized
144 hardware NVLink error (NVLink 5)
145 hardware NVLink error (NVLink 5)
146 hardware NVLink error (NVLink 5)
147 hardware NVLink error (NVLink 5)
148 hardware NVLink error (NVLink 5)
149 hardware NVLink error (NVLink 5)
150 hardware NVLink error (NVLink 5)
151 hardware key rotation of confidential computing failed | restart the virtual machine
154 notice the requested recovery action has changed | cudakit doctor --only CK028 shows what to do
155 notice an NVLink link went down on request | reset the GPU if the link stays down
156 notice a defective part of the GPU was retired | reset the GPU: the retirement takes effect then
157 hardware a defective part of the GPU could not be retired
158 hardware fatal timeout of the GPU
159 hardware error of the C2C link's protocol (CHI)
160 notice a memory channel was retired
161 hardware a memory channel could not be retired
163 notice the power smoothing circuit was disabled
164 notice the power smoothing circuit is near the end of its life
165 notice the power smoothing circuit is at the end of its life
167 hardware fatal PCIe timeout
168 hardware error in a protected memory region | enable ECC (nvidia-smi -e 1) and reboot
169 hardware halt of the security microcontroller
171 hardware uncorrectable error in DRAM: details of Xid 48
172 hardware uncorrectable error in SRAM: details of Xid 48
173 hardware the NVLink-C2C link failed
175 hardware error of the memory subsystem
"""


def xids(context: RunContext) -> Finding:
    """The driver writes its errors to the kernel log as numbered Xid messages.

    Xids 13, 31, 43 and 45 mostly come from errors of programs. 48, 63, 64, 92, 94 and 95 concern memory, 74
    NVLink, 79 a GPU that has fallen off the bus, 119 and 120 the GPU's system processor. The log starts at
    boot or at the oldest message in its buffer; on most systems reading it needs privilege.
    `cudakit explain NUMBER` explains the common Xids. Source, with all Xids:
    https://docs.nvidia.com/deploy/xid-errors/
    """
    log_lines = require_fact(context.driver.kernel_log)
    matches = (_XID_PATTERN.search(line) for line in log_lines if "Xid" in line)
    count_by_gpu_and_xid = Counter((match[1], int(match[2])) for match in matches if match)
    if not count_by_gpu_and_xid:
        return ok_finding("no Xid errors in the kernel log")
    xid_by_number = known_xids()
    evidence = {
        f"Xid {number} on {address}": f"{xid_count}×, {xid_by_number[number].meaning}"
        if number in xid_by_number
        else f"{xid_count}×, not in the table"
        for (address, number), xid_count in sorted(count_by_gpu_and_xid.items())
    }
    xid_numbers = sorted({number for _, number in count_by_gpu_and_xid})
    numbers_text = ", ".join(map(str, xid_numbers))
    origins = {
        xid_by_number[number].origin if number in xid_by_number else "notice"
        for number in xid_numbers
    }
    if origins == {"program"}:
        return warn_finding(
            f"programs caused GPU errors since boot (Xid {numbers_text})",
            evidence,
            _USUAL_ACTIONS["program"],
        )
    make_finding = fail_finding if "hardware" in origins else warn_finding
    return make_finding(
        f"the driver reported GPU errors since boot (Xid {numbers_text})",
        evidence,
        *(
            f"Xid {xid_number}: {xid_by_number[xid_number].action}"
            for xid_number in xid_numbers
            if xid_number in xid_by_number
        ),
        f"NVIDIA's catalog: {CATALOG_URL}",
    )
