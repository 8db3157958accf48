"""Compare the fields of cudakit with those of nvidia-smi and PyTorch for each GPU.

    python scripts/compare_devices.py

Constant fields must be equal. Changing fields are read before and after nvidia-smi, whose value must be
between the two readings or outside by at most the tolerance. Exits with 1 if a field differs or fewer than
60 were compared.
"""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cudakit.core.devices.query import open_query
from cudakit.core.devices.result import Device
from cudakit.gpu.api.facts import Field
from cudakit.gpu.machine import open_machine
from cudakit.units import Unavailable

LEAST_COMPARED = 60
MIB = 2**20
ABSENT = ("N/A", "None", "", "Requested functionality has been deprecated")


@dataclass(frozen=True)
class Constant:
    """A field that must equal the value at a path in the XML of nvidia-smi."""

    path: str
    read: Callable[[str], Any] = str


@dataclass(frozen=True)
class Changing:
    """A field that changes over time, and the tolerance outside of our two readings."""

    path: str
    tolerance: float
    scale: float = 1.0


def number(text: str) -> float:
    match = re.search(r"-?\d+(\.\d+)?", text)
    if match is None:
        raise ValueError(f"no number in {text!r}")
    return float(match[0])


def flag(text: str) -> bool:
    return text in ("Enabled", "Yes", "Active")


def lower(text: str) -> str:
    return text.lower()


def mebibytes(text: str) -> float:
    return number(text) * MIB


def hexadecimal(text: str) -> str:
    return f"0x{text.lower()}"


def address(text: str) -> str:
    return text.lower().removeprefix("0000")


PCI = "pci/pci_gpu_link_info"
ECC = "ecc_errors"
ROWS = "remapped_rows"

CONSTANT: Mapping[str, Constant] = {
    "name": Constant("product_name"),
    "brand": Constant("product_brand"),
    "architecture": Constant("product_architecture"),
    "display_attached": Constant("display_attached", flag),
    "display_active": Constant("display_active", flag),
    "persistence_mode": Constant("persistence_mode", flag),
    "addressing_mode": Constant("addressing_mode", lower),
    "mig_mode": Constant("mig_mode/current_mig", flag),
    "mig_mode_pending": Constant("mig_mode/pending_mig", flag),
    "accounting_mode": Constant("accounting_mode", flag),
    "accounting_buffer_size": Constant("accounting_mode_buffer_size", number),
    "serial": Constant("serial"),
    "uuid": Constant("uuid"),
    "minor_number": Constant("minor_number", number),
    "vbios_version": Constant("vbios_version"),
    "multi_gpu_board": Constant("multigpu_board", flag),
    "board_id": Constant("board_id"),
    "board_part_number": Constant("board_part_number"),
    "module_id": Constant("platformInfo/module_id", number),
    "inforom_image_version": Constant("inforom_version/img_version"),
    "inforom_oem_version": Constant("inforom_version/oem_object"),
    "inforom_ecc_version": Constant("inforom_version/ecc_object"),
    "inforom_power_version": Constant("inforom_version/pwr_object"),
    "operation_mode": Constant("gpu_operation_mode/current_gom", lower),
    "c2c_mode": Constant("c2c_mode", flag),
    "virtualization_mode": Constant("gpu_virtualization_mode/virtualization_mode", lower),
    "host_vgpu_mode": Constant("gpu_virtualization_mode/host_vgpu_mode"),
    "recovery_action": Constant("gpu_recovery_action", lower),
    "gsp_firmware_version": Constant("gsp_firmware_version"),
    "pci_bus_id": Constant("pci/pci_bus_id", address),
    "pci_device_id": Constant("pci/pci_device_id", hexadecimal),
    "pci_subsystem_id": Constant("pci/pci_sub_system_id", hexadecimal),
    "pcie_generation_max": Constant(f"{PCI}/pcie_gen/max_link_gen", number),
    "pcie_generation_device_max": Constant(f"{PCI}/pcie_gen/max_device_link_gen", number),
    "pcie_width_max": Constant(f"{PCI}/link_widths/max_link_width", number),
    "pcie_replays": Constant("pci/replay_counter", number),
    "pcie_replay_rollovers": Constant("pci/replay_rollover_counter", number),
    "fan_speed_percent": Constant("fan_speed", number),
    "memory_total_bytes": Constant("fb_memory_usage/total", mebibytes),
    "bar1_total_bytes": Constant("bar1_memory_usage/total", mebibytes),
    "protected_memory_total_bytes": Constant("cc_protected_memory_usage/total", mebibytes),
    "compute_mode": Constant("compute_mode", lower),
    "dram_encryption": Constant("dram_encryption_mode/current_dram_encryption", flag),
    "ecc_mode": Constant("ecc_mode/current_ecc", flag),
    "ecc_mode_pending": Constant("ecc_mode/pending_ecc", flag),
    "ecc_sram_corrected_volatile": Constant(f"{ECC}/volatile/sram_correctable", number),
    "ecc_sram_parity_volatile": Constant(f"{ECC}/volatile/sram_uncorrectable_parity", number),
    "ecc_sram_uncorrected_volatile": Constant(f"{ECC}/volatile/sram_uncorrectable_secded", number),
    "ecc_dram_corrected_volatile": Constant(f"{ECC}/volatile/dram_correctable", number),
    "ecc_dram_uncorrected_volatile": Constant(f"{ECC}/volatile/dram_uncorrectable", number),
    "ecc_sram_corrected_aggregate": Constant(f"{ECC}/aggregate/sram_correctable", number),
    "ecc_sram_parity_aggregate": Constant(f"{ECC}/aggregate/sram_uncorrectable_parity", number),
    "ecc_sram_uncorrected_aggregate": Constant(
        f"{ECC}/aggregate/sram_uncorrectable_secded", number
    ),
    "ecc_dram_corrected_aggregate": Constant(f"{ECC}/aggregate/dram_correctable", number),
    "ecc_dram_uncorrected_aggregate": Constant(f"{ECC}/aggregate/dram_uncorrectable", number),
    "ecc_sram_threshold_exceeded": Constant(f"{ECC}/aggregate/sram_threshold_exceeded", flag),
    "repair_channel_pending": Constant(f"{ECC}/channel_repair_pending", flag),
    "repair_tpc_pending": Constant(f"{ECC}/tpc_repair_pending", flag),
    "unrepairable_memory": Constant(f"{ECC}/unrepairable_memory", flag),
    "retired_pages_pending": Constant("retired_pages/pending_retirement", flag),
    "remapped_rows_correctable": Constant(f"{ROWS}/remapped_row_corr", number),
    "remapped_rows_uncorrectable": Constant(f"{ROWS}/remapped_row_unc", number),
    "remapped_rows_pending": Constant(f"{ROWS}/remapped_row_pending", flag),
    "remapped_rows_failed": Constant(f"{ROWS}/remapped_row_failure", flag),
    **{
        f"remap_banks_{left}": Constant(
            f"{ROWS}/row_remapper_histogram/row_remapper_histogram_{left}", number
        )
        for left in ("max", "high", "partial", "low", "none")
    },
    "temperature_shutdown_margin_c": Constant("temperature/gpu_temp_max_tlimit_threshold", number),
    "temperature_slowdown_margin_c": Constant("temperature/gpu_temp_slow_tlimit_threshold", number),
    "temperature_gpu_max_margin_c": Constant(
        "temperature/gpu_temp_max_gpu_tlimit_threshold", number
    ),
    "temperature_memory_max_margin_c": Constant(
        "temperature/gpu_temp_max_mem_tlimit_threshold", number
    ),
    "power_limit_enforced_w": Constant("gpu_power_readings/current_power_limit", number),
    "power_limit_w": Constant("gpu_power_readings/requested_power_limit", number),
    "power_limit_default_w": Constant("gpu_power_readings/default_power_limit", number),
    "power_limit_min_w": Constant("gpu_power_readings/min_power_limit", number),
    "power_limit_max_w": Constant("gpu_power_readings/max_power_limit", number),
    "clock_graphics_application_mhz": Constant("applications_clocks/graphics_clock", number),
    "clock_memory_application_mhz": Constant("applications_clocks/mem_clock", number),
    "clock_graphics_default_mhz": Constant("default_applications_clocks/graphics_clock", number),
    "clock_memory_default_mhz": Constant("default_applications_clocks/mem_clock", number),
    "clock_graphics_max_mhz": Constant("max_clocks/graphics_clock", number),
    "clock_sm_max_mhz": Constant("max_clocks/sm_clock", number),
    "clock_memory_max_mhz": Constant("max_clocks/mem_clock", number),
    "clock_video_max_mhz": Constant("max_clocks/video_clock", number),
    "clock_customer_boost_max_mhz": Constant("max_customer_boost_clocks/graphics_clock", number),
}

CHANGING: Mapping[str, Changing] = {
    "memory_used_bytes": Changing("fb_memory_usage/used", 600 * MIB, MIB),
    "memory_free_bytes": Changing("fb_memory_usage/free", 600 * MIB, MIB),
    "memory_reserved_bytes": Changing("fb_memory_usage/reserved", MIB, MIB),
    "bar1_used_bytes": Changing("bar1_memory_usage/used", 600 * MIB, MIB),
    "pcie_generation": Changing(f"{PCI}/pcie_gen/current_link_gen", 4),
    "pcie_width": Changing(f"{PCI}/link_widths/current_link_width", 0),
    "utilization_gpu_percent": Changing("utilization/gpu_util", 20),
    "utilization_memory_percent": Changing("utilization/memory_util", 20),
    "utilization_encoder_percent": Changing("utilization/encoder_util", 5),
    "utilization_decoder_percent": Changing("utilization/decoder_util", 5),
    "utilization_jpeg_percent": Changing("utilization/jpeg_util", 5),
    "utilization_ofa_percent": Changing("utilization/ofa_util", 5),
    "temperature_gpu_c": Changing("temperature/gpu_temp", 3),
    "temperature_margin_c": Changing("temperature/gpu_temp_tlimit", 3),
    "temperature_memory_c": Changing("temperature/memory_temp", 3),
    "power_draw_w": Changing("gpu_power_readings/average_power_draw", 30),
    "power_average_w": Changing("gpu_power_readings/average_power_draw", 30),
    "power_instant_w": Changing("gpu_power_readings/instant_power_draw", 60),
    "clock_graphics_mhz": Changing("clocks/graphics_clock", 300),
    "clock_sm_mhz": Changing("clocks/sm_clock", 300),
    "clock_memory_mhz": Changing("clocks/mem_clock", 300),
    "clock_video_mhz": Changing("clocks/video_clock", 300),
    "slowed_by_power_cap_ns": Changing(
        "clocks_event_reasons_counters/clocks_event_reasons_counters_sw_power_cap", 1e8, 1e3
    ),
}

# Properties of PyTorch's devices, and the value of cudakit for each.
TORCH: Mapping[str, Callable[[Device], Any]] = {
    "name": lambda device: device.name,
    "major": lambda device: device.field("compute_capability_major"),
    "minor": lambda device: device.field("compute_capability_minor"),
    "total_memory": lambda device: device.field("usable_memory_bytes"),
    "multi_processor_count": lambda device: device.field("multiprocessor_count"),
    "max_threads_per_multi_processor": lambda d: d.field("max_threads_per_multiprocessor"),
    "max_threads_per_block": lambda device: device.field("max_threads_per_block"),
    "warp_size": lambda device: device.field("warp_size"),
    "regs_per_multiprocessor": lambda device: device.field("max_registers_per_multiprocessor"),
    "shared_memory_per_block": lambda d: d.field("max_shared_memory_per_block_bytes"),
    "shared_memory_per_block_optin": lambda d: d.field("max_shared_memory_per_block_optin_bytes"),
    "shared_memory_per_multiprocessor": lambda d: d.field(
        "max_shared_memory_per_multiprocessor_bytes"
    ),
    "L2_cache_size": lambda device: device.field("l2_cache_size_bytes"),
    "is_integrated": lambda device: int(bool(device.field("integrated"))),
    "is_multi_gpu_board": lambda device: int(bool(device.field("multi_gpu_board"))),
    "clock_rate": lambda device: device.field("clock_rate_khz"),
    "memory_clock_rate": lambda device: device.field("memory_clock_rate_khz"),
    "memory_bus_width": lambda device: device.field("global_memory_bus_width_bits"),
    "pci_bus_id": lambda device: device.field("pci_bus_number"),
    "pci_device_id": lambda device: device.field("pci_device_number"),
    "pci_domain_id": lambda device: device.field("pci_domain_number"),
    "uuid": lambda device: str(device.uuid).removeprefix("GPU-"),
}


@dataclass(frozen=True)
class Comparison:
    """One comparison."""

    source: str
    name: str
    ours: str
    theirs: str
    verdict: str  # equal, within ..., absent or DIFFERS


def compare() -> list[Comparison]:
    query = open_query(open_machine())
    before = query.read()
    report = ElementTree.fromstring(  # noqa: S314 nvidia-smi's own
        subprocess.run(["nvidia-smi", "-q", "-x"], check=True, capture_output=True).stdout  # noqa: S607
    )
    after = query.read()
    gpus = {gpu.findtext("uuid"): gpu for gpu in report.iter("gpu")}
    lines = []
    for device, later in zip(before.devices, after.devices, strict=True):
        gpu = gpus[str(device.uuid)]
        lines += [compare_constant(device, name, field, gpu) for name, field in CONSTANT.items()]
        lines += [
            compare_changing((device, later), name, field, gpu) for name, field in CHANGING.items()
        ]
        lines.append(compare_clock_reasons((device, later), gpu))
    lines.append(
        compare_equal(
            "smi", "driver_version", before.driver_version, report.findtext("driver_version")
        )
    )
    cuda = before.cuda
    version = cuda if isinstance(cuda, Unavailable) else cuda.version
    lines.append(compare_equal("smi", "cuda_version", version, report.findtext("cuda_version")))
    return lines + list(compare_with_torch(before.visible))


def compare_constant(
    device: Device, name: str, field: Constant, gpu: ElementTree.Element
) -> Comparison:
    text = (gpu.findtext(field.path) or "").strip()
    ours = device.field(name)
    if name == "recovery_action" or (name == "addressing_mode" and text == "None"):
        return compare_equal("smi", name, ours, field.read(text))
    if text in ABSENT:
        verdict = "absent" if isinstance(ours, Unavailable) else "DIFFERS"
        return Comparison("smi", name, formatted(ours), text, verdict)
    return compare_equal("smi", name, ours, field.read(text))


def compare_changing(
    readings: tuple[Device, Device], name: str, field: Changing, gpu: ElementTree.Element
) -> Comparison:
    text = (gpu.findtext(field.path) or "").strip()
    ours = [reading.field(name) for reading in readings]
    numbers = [value for value in ours if isinstance(value, int | float)]
    if text in ABSENT or len(numbers) < 2:
        agree = text in ABSENT and not numbers
        return Comparison("smi", name, formatted(ours[0]), text, "absent" if agree else "DIFFERS")
    theirs = number(text) * field.scale
    fits = min(numbers) - field.tolerance <= theirs <= max(numbers) + field.tolerance
    verdict = f"within {field.tolerance / field.scale:g}" if fits else "DIFFERS"
    return Comparison("smi", name, " .. ".join(map(formatted, ours)), text, verdict)


def compare_clock_reasons(readings: tuple[Device, Device], gpu: ElementTree.Element) -> Comparison:
    """Compare the clock event reasons with those that nvidia-smi reports as active."""
    prefix = "clocks_event_reason_"
    names = {
        "gpu_idle": "idle",
        "applications_clocks_setting": "application clocks setting",
        "sw_power_cap": "software power cap",
        "hw_slowdown": "hardware slowdown",
        "hw_thermal_slowdown": "hardware thermal slowdown",
        "hw_power_brake_slowdown": "hardware power brake slowdown",
        "sync_boost": "sync boost",
        "sw_thermal_slowdown": "software thermal slowdown",
        "display_clocks_setting": "display clock setting",
    }
    parent = gpu.find("clocks_event_reasons")
    active = {
        names.get(child.tag.removeprefix(prefix), child.tag)
        for child in (parent if parent is not None else ())
        if child.text == "Active"
    }
    ours = [reading.field("clock_event_reasons") for reading in readings]
    sets = [set(value) if isinstance(value, tuple) else set() for value in ours]
    verdict = "equal" if active in sets else "DIFFERS"
    return Comparison("smi", "clock_event_reasons", formatted(ours[0]), ", ".join(active), verdict)


def compare_with_torch(devices: tuple[Device, ...]) -> Iterator[Comparison]:
    import torch

    for device in devices:
        properties: Any = torch.cuda.get_device_properties(device.cuda_index)
        for name, ours in TORCH.items():
            if hasattr(properties, name):
                theirs = getattr(properties, name)
                yield compare_equal(
                    "torch", name, ours(device), str(theirs) if name == "uuid" else theirs
                )


def compare_equal(source: str, name: str, ours: Field | Any, theirs: Any) -> Comparison:
    return Comparison(
        source, name, formatted(ours), str(theirs), "equal" if ours == theirs else "DIFFERS"
    )


def formatted(value: Field) -> str:
    return f"n/a ({value.reason})" if isinstance(value, Unavailable) else str(value)


def main() -> int:
    lines = compare()
    for line in lines:
        print(
            f"{line.source:5} {line.name:33} {line.ours:44.44} {line.theirs:38.38} {line.verdict}"
        )
    differ = [line for line in lines if line.verdict == "DIFFERS"]
    known = [line for line in lines if line.verdict not in ("DIFFERS", "absent")]
    absent = len(lines) - len(known) - len(differ)
    print(f"{len(known)} agree, {absent} are absent for both, {len(differ)} differ")
    return 1 if differ or len(known) < LEAST_COMPARED else 0


if __name__ == "__main__":
    sys.exit(main())
