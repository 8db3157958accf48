"""Names of the values of NVML's enumerations (nvml.h); a value that is not listed is "unknown"."""

from __future__ import annotations

from collections.abc import Callable, Mapping

BRANDS = {
    1: "Quadro",
    2: "Tesla",
    3: "NVS",
    4: "GRID",
    5: "GeForce",
    6: "Titan",
    7: "vApps",
    8: "vPC",
    9: "vCS",
    10: "vWS",
    11: "Cloud Gaming",
    12: "Quadro RTX",
    13: "NVIDIA RTX",
    14: "NVIDIA",
    15: "GeForce RTX",
    16: "Titan RTX",
}
ARCHITECTURES = {
    2: "Kepler",
    3: "Maxwell",
    4: "Pascal",
    5: "Volta",
    6: "Turing",
    7: "Ampere",
    8: "Ada",
    9: "Hopper",
    10: "Blackwell",
    13: "Rubin",
}
COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}
BUSES = {1: "PCI", 2: "PCIe", 3: "FPCI", 4: "AGP"}
ADDRESSING_MODES = {0: "none", 1: "HMM", 2: "ATS"}
VIRTUALIZATION_MODES = {0: "none", 1: "pass-through", 2: "vGPU", 3: "host vGPU", 4: "host vSGA"}
HOST_VGPU_MODES = {0: "non-SR-IOV", 1: "SR-IOV"}
OPERATION_MODES = {0: "all on", 1: "compute", 2: "low double precision"}
FABRIC_STATES = {0: "not supported", 1: "not started", 2: "in progress", 3: "completed"}
POWER_SOURCES = {0: "mains", 1: "battery", 2: "undersized"}
RECOVERY_ACTIONS = {
    0: "none",
    1: "reset the GPU",
    2: "reboot the machine",
    3: "drain peer-to-peer",
    4: "drain and reset",
    5: "recover the IMEX domain",
    6: "reset the bus",
    7: "reboot the system",
}
NVLINK_VERSIONS = {1: "1.0", 2: "2.0", 3: "2.2", 4: "3.0", 5: "3.1", 6: "4.0", 7: "5.0", 8: "6.0"}
P2P_STATES = {
    0: "ok",
    1: "the chipset does not support it",
    2: "the GPU does not support it",
    3: "the I/O hub's topology does not support it",
    4: "disabled by a registry key",
    5: "not supported",
}
# nvmlGpuTopologyLevel_t, abbreviated as in nvidia-smi topo.
PATHS = {0: "X", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}

# nvmlClocksEventReason*, by bit.
CLOCK_EVENT_REASONS = {
    0x1: "idle",
    0x2: "application clocks setting",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake slowdown",
    0x100: "display clock setting",
}


def name_from(names: Mapping[int, str]) -> Callable[[int], str]:
    """Return a function that converts a number to its name."""

    def convert(number: int) -> str:
        return names.get(int(number), f"unknown ({number})")

    return convert


def clock_event_reasons(mask: int) -> tuple[str, ...]:
    """Return the name of each bit that is set: the reasons for the current clocks."""
    reasons = [text for bit, text in CLOCK_EVENT_REASONS.items() if mask & bit]
    unknown_bits = mask & ~sum(CLOCK_EVENT_REASONS)
    return (*reasons, f"unknown ({unknown_bits:#x})") if unknown_bits else tuple(reasons)
