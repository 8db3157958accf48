"""Compare the fields of cudakit with those of nvidia-smi and PyTorch for each GPU.

    python scripts/compare_devices.py

Constant fields must be equal. cudakit reads changing fields before and after nvidia-smi, whose value must lie
between the two values or differ from the nearer one by at most the tolerance. Exits with 1 if a field differs
or fewer than 60 fields were compared.
"""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cudakit.devices.query import open_query
from cudakit.devices.result import Device
from cudakit.gpu.api.facts import Field
from cudakit.gpu.machine import open_machine
from cudakit.units import Unavailable

MIN_COMPARED = 60
MIB = 2**20
ABSENT_TEXTS = ("N/A", "None", "", "Requested functionality has been deprecated")


@dataclass(frozen=True)
class Constant:
    """A field that must equal the value at a path in the XML of nvidia-smi."""

    path: str
    read: Callable[[str], Any] = str


@dataclass(frozen=True)
class Changing:
    """A field that changes over time, and the tolerated difference from cudakit's nearer value."""

    path: str
    tolerance: float
    scale: float = 1.0


def parse_number(text: str) -> float:
    match = re.search(r"-?\d+(\.\d+)?", text)
    if match is None:
        raise ValueError(f"no number in {text!r}")
    return float(match[0])


def parse_flag(text: str) -> bool:
    return text in ("Enabled", "Yes", "Active")


def lower_case(text: str) -> str:
    return text.lower()


def parse_mebibytes(text: str) -> float:
    return parse_number(text) * MIB


def hexadecimal(text: str) -> str:
    return f"0x{text.lower()}"


def short_address(text: str) -> str:
    return text.lower().removeprefix("0000")


PCI = "pci/pci_gpu_link_info"
ECC = "ecc_errors"
ROWS = "remapped_rows"

CONSTANT: Mapping[str, Constant] = {
    "name": Constant("product_name"),
    "brand": Constant("product_brand"),
    "architecture": Constant("product_architecture"),
    "display_attached": Constant("display_attached", parse_flag),
    "display_active": Constant("display_active", parse_flag),
    "persistence_mode": Constant("persistence_mode", parse_flag),
    "addressing_mode": Constant("addressing_mode", lower_case),
    "mig_mode": Constant("mig_mode/current_mig", parse_flag),
    "mig_mode_pending": Constant("mig_mode/pending_mig", parse_flag),
    "accounting_mode": Constant("accounting_mode", parse_flag),
    "accounting_buffer_size": Constant("accounting_mode_buffer_size", parse_number),
    "serial": Constant("serial"),
    "uuid": Constant("uuid"),
    "minor_number": Constant("minor_number", parse_number),
    "vbios_version": Constant("vbios_version"),
    "multi_gpu_board": Constant("multigpu_board", parse_flag),
    "board_id": Constant("board_id"),
    "board_part_number": Constant("board_part_number"),
    "module_id": Constant("platformInfo/module_id", parse_number),
    "inforom_image_version": Constant("inforom_version/img_version"),
    "inforom_oem_version": Constant("inforom_version/oem_object"),
    "inforom_ecc_version": Constant("inforom_version/ecc_object"),
    "inforom_power_version": Constant("inforom_version/pwr_object"),
    "operation_mode": Constant("gpu_operation_mode/current_gom", lower_case),
    "c2c_mode": Constant("c2c_mode", parse_flag),
    "virtualization_mode": Constant("gpu_virtualization_mode/virtualization_mode", lower_case),
    "host_vgpu_mode": Constant("gpu_virtualization_mode/host_vgpu_mode"),
    "recovery_action": Constant("gpu_recovery_action", lower_case),
    "gsp_firmware_version": Constant("gsp_firmware_version"),
    "pci_bus_id": Constant("pci/pci_bus_id", short_address),
    "pci_device_id": Constant("pci/pci_device_id", hexadecimal),
    "pci_subsystem_id": Constant("pci/pci_sub_system_id", hexadecimal),
    "pcie_generation_max": Constant(f"{PCI}/pcie_gen/max_link_gen", parse_number),
    "pcie_generation_device_max": Constant(f"{PCI}/pcie_gen/max_device_link_gen", parse_number),
    "pcie_width_max": Constant(f"{PCI}/link_widths/max_link_width", parse_number),
    "pcie_replays": Constant("pci/replay_counter", parse_number),
    "pcie_replay_rollovers": Constant("pci/replay_rollover_counter", parse_number),
    "fan_speed_percent": Constant("fan_speed", parse_number),
    "memory_total_bytes": Constant("fb_memory_usage/total", parse_mebibytes),
    "bar1_total_bytes": Constant("bar1_memory_usage/total", parse_mebibytes),
    "protected_memory_total_bytes": Constant("cc_protected_memory_usage/total", parse_mebibytes),
    "compute_mode": Constant("compute_mode", lower_case),
    "dram_encryption": Constant("dram_encryption_mode/current_dram_encryption", parse_flag),
    "ecc_mode": Constant("ecc_mode/current_ecc", parse_flag),
    "ecc_mode_pending": Constant("ecc_mode/pending_ecc", parse_flag),
    "ecc_sram_corrected_volatile": Constant(f"{ECC}/volatile/sram_correctable", parse_number),
    "ecc_sram_parity_volatile": Constant(f"{ECC}/volatile/sram_uncorrectable_parity", parse_number),
    "ecc_sram_uncorrected_volatile": Constant(
        f"{ECC}/volatile/sram_uncorrectable_secded", parse_number
    ),
    "ecc_dram_corrected_volatile": Constant(f"{ECC}/volatile/dram_correctable", parse_number),
    "ecc_dram_uncorrected_volatile": Constant(f"{ECC}/volatile/dram_uncorrectable", parse_number),
    "ecc_sram_corrected_aggregate": Constant(f"{ECC}/aggregate/sram_correctable", parse_number),
    "ecc_sram_parity_aggregate": Constant(
        f"{ECC}/aggregate/sram_uncorrectable_parity", parse_number
    ),
    "ecc_sram_uncorrected_aggregate": Constant(
        f"{ECC}/aggregate/sram_uncorrectable_secded", parse_number
    ),
    "ecc_dram_corrected_aggregate": Constant(f"{ECC}/aggregate/dram_correctable", parse_number),
    "ecc_dram_uncorrected_aggregate": Constant(f"{ECC}/aggregate/dram_uncorrectable", parse_number),
    "ecc_sram_threshold_exceeded": Constant(f"{ECC}/aggregate/sram_threshold_exceeded", parse_flag),
    "repair_channel_pending": Constant(f"{ECC}/channel_repair_pending", parse_flag),
    "repair_tpc_pending": Constant(f"{ECC}/tpc_repair_pending", parse_flag),
    "unrepairable_memory": Constant(f"{ECC}/unrepairable_memory", parse_flag),
    "retired_pages_pending": Constant("retired_pages/pending_retirement", parse_flag),
    "remapped_rows_correctable": Constant(f"{ROWS}/remapped_row_corr", parse_number),
    "remapped_rows_uncorrectable": Constant(f"{ROWS}/remapped_row_unc", parse_number),
    "remapped_rows_pending": Constant(f"{ROWS}/remapped_row_pending", parse_flag),
    "remapped_rows_failed": Constant(f"{ROWS}/remapped_row_failure", parse_flag),
    **{
        f"remap_banks_{left}": Constant(
            f"{ROWS}/row_remapper_histogram/row_remapper_histogram_{left}", parse_number
        )
        for left in ("max", "high", "partial", "low", "none")
    },
    "temperature_shutdown_margin_c": Constant(
        "temperature/gpu_temp_max_tlimit_threshold", parse_number
    ),
    "temperature_slowdown_margin_c": Constant(
        "temperature/gpu_temp_slow_tlimit_threshold", parse_number
    ),
    "temperature_gpu_max_margin_c": Constant(
        "temperature/gpu_temp_max_gpu_tlimit_threshold", parse_number
    ),
    "temperature_memory_max_margin_c": Constant(
        "temperature/gpu_temp_max_mem_tlimit_threshold", parse_number
    ),
    "power_limit_enforced_w": Constant("gpu_power_readings/current_power_limit", parse_number),
    "power_limit_w": Constant("gpu_power_readings/requested_power_limit", parse_number),
    "power_limit_default_w": Constant("gpu_power_readings/default_power_limit", parse_number),
    "power_limit_min_w": Constant("gpu_power_readings/min_power_limit", parse_number),
    "power_limit_max_w": Constant("gpu_power_readings/max_power_limit", parse_number),
    "clock_graphics_application_mhz": Constant("applications_clocks/graphics_clock", parse_number),
    "clock_memory_application_mhz": Constant("applications_clocks/mem_clock", parse_number),
    "clock_graphics_default_mhz": Constant(
        "default_applications_clocks/graphics_clock", parse_number
    ),
    "clock_memory_default_mhz": Constant("default_applications_clocks/mem_clock", parse_number),
    "clock_graphics_max_mhz": Constant("max_clocks/graphics_clock", parse_number),
    "clock_sm_max_mhz": Constant("max_clocks/sm_clock", parse_number),
    "clock_memory_max_mhz": Constant("max_clocks/mem_clock", parse_number),
    "clock_video_max_mhz": Constant("max_clocks/video_clock", parse_number),
    "clock_customer_boost_max_mhz": Constant(
        "max_customer_boost_clocks/graphics_clock", parse_number
    ),
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

# The value of cudakit for each property of PyTorch's devices.
TORCH: Mapping[str, Callable[[Device], Any]] = {
    "name": lambda device: device.name,
    "major": lambda device: device.field("compute_capability_major"),
    "minor": lambda device: device.field("compute_capability_minor"),
    "total_memory": lambda device: device.field("usable_memory_bytes"),
    "multi_processor_count": lambda device: device.field("multiprocessor_count"),
    "max_threads_per_multi_processor": lambda device: device.field(
        "max_threads_per_multiprocessor"
    ),
    "max_threads_per_block": lambda device: device.field("max_threads_per_block"),
    "warp_size": lambda device: device.field("warp_size"),
    "regs_per_multiprocessor": lambda device: device.field("max_registers_per_multiprocessor"),
    "shared_memory_per_block": lambda device: device.field("max_shared_memory_per_block_bytes"),
    "shared_memory_per_block_optin": lambda device: device.field(
        "max_shared_memory_per_block_optin_bytes"
    ),
    "shared_memory_per_multiprocessor": lambda device: device.field(
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
    """The values of a field in cudakit and in another source, and the verdict."""

    source: str  # "smi" or "torch".
    name: str
    cudakit_text: str
    source_text: str
    verdict: str  # "equal", "within TOLERANCE", "absent" or "DIFFERS".


def compare() -> list[Comparison]:
    query = open_query(open_machine())
    before = query.read()
    report = ElementTree.fromstring(  # noqa: S314 the XML of nvidia-smi is trusted
        subprocess.run(["nvidia-smi", "-q", "-x"], check=True, capture_output=True).stdout  # noqa: S607
    )
    after = query.read()
    gpus = {gpu.findtext("uuid"): gpu for gpu in report.iter("gpu")}
    comparisons = []
    for device, later_device in zip(before.devices, after.devices, strict=True):
        gpu = gpus[str(device.uuid)]
        comparisons += [
            compare_constant(device, name, field, gpu) for name, field in CONSTANT.items()
        ]
        comparisons += [
            compare_changing((device, later_device), name, field, gpu)
            for name, field in CHANGING.items()
        ]
        comparisons.append(compare_clock_reasons((device, later_device), gpu))
    comparisons.append(
        compare_equal(
            "smi", "driver_version", before.driver_version, report.findtext("driver_version")
        )
    )
    cuda = before.cuda
    version = cuda if isinstance(cuda, Unavailable) else cuda.version
    comparisons.append(
        compare_equal("smi", "cuda_version", version, report.findtext("cuda_version"))
    )
    return comparisons + list(compare_with_torch(before.visible))


def compare_constant(
    device: Device, name: str, field: Constant, gpu: ElementTree.Element
) -> Comparison:
    text = (gpu.findtext(field.path) or "").strip()
    cudakit_value = device.field(name)
    if name == "recovery_action" or (name == "addressing_mode" and text == "None"):
        return compare_equal("smi", name, cudakit_value, field.read(text))
    if text in ABSENT_TEXTS:
        verdict = "absent" if isinstance(cudakit_value, Unavailable) else "DIFFERS"
        return Comparison("smi", name, format_field(cudakit_value), text, verdict)
    return compare_equal("smi", name, cudakit_value, field.read(text))


def compare_changing(
    readings: tuple[Device, Device], name: str, field: Changing, gpu: ElementTree.Element
) -> Comparison:
    text = (gpu.findtext(field.path) or "").strip()
    cudakit_values = [reading.field(name) for reading in readings]
    numbers = [value for value in cudakit_values if isinstance(value, int | float)]
    if text in ABSENT_TEXTS or len(numbers) < 2:
        is_absent = text in ABSENT_TEXTS and not numbers
        return Comparison(
            "smi", name, format_field(cudakit_values[0]), text, "absent" if is_absent else "DIFFERS"
        )
    smi_value = parse_number(text) * field.scale
    is_within = min(numbers) - field.tolerance <= smi_value <= max(numbers) + field.tolerance
    verdict = f"within {field.tolerance / field.scale:g}" if is_within else "DIFFERS"
    return Comparison("smi", name, " .. ".join(map(format_field, cudakit_values)), text, verdict)


def compare_clock_reasons(readings: tuple[Device, Device], gpu: ElementTree.Element) -> Comparison:
    """Compare the clock event reasons with those that nvidia-smi reports as active."""
    prefix = "clocks_event_reason_"
    cudakit_names = {
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
        cudakit_names.get(child.tag.removeprefix(prefix), child.tag)
        for child in (parent if parent is not None else ())
        if child.text == "Active"
    }
    cudakit_values = [reading.field("clock_event_reasons") for reading in readings]
    reason_sets = [set(value) if isinstance(value, tuple) else set() for value in cudakit_values]
    verdict = "equal" if active in reason_sets else "DIFFERS"
    return Comparison(
        "smi", "clock_event_reasons", format_field(cudakit_values[0]), ", ".join(active), verdict
    )


def compare_with_torch(devices: tuple[Device, ...]) -> Iterator[Comparison]:
    import torch

    for device in devices:
        properties: Any = torch.cuda.get_device_properties(device.cuda_index)
        for name, read_cudakit in TORCH.items():
            if hasattr(properties, name):
                torch_value = getattr(properties, name)
                yield compare_equal(
                    "torch",
                    name,
                    read_cudakit(device),
                    str(torch_value) if name == "uuid" else torch_value,
                )


def compare_equal(
    source: str, name: str, cudakit_value: Field | Any, source_value: Any
) -> Comparison:
    return Comparison(
        source,
        name,
        format_field(cudakit_value),
        str(source_value),
        "equal" if cudakit_value == source_value else "DIFFERS",
    )


def format_field(value: Field) -> str:
    return f"n/a ({value.reason})" if isinstance(value, Unavailable) else str(value)


def main() -> int:
    comparisons = compare()
    for comparison in comparisons:
        print(
            f"{comparison.source:5} {comparison.name:33} {comparison.cudakit_text:44.44} "
            f"{comparison.source_text:38.38} {comparison.verdict}"
        )
    verdicts = Counter(comparison.verdict for comparison in comparisons)
    absent, different = verdicts["absent"], verdicts["DIFFERS"]
    equal = len(comparisons) - absent - different
    print(f"{equal} agree, {absent} are absent for both, {different} differ")
    return 1 if different or equal < MIN_COMPARED else 0


if __name__ == "__main__":
    sys.exit(main())
