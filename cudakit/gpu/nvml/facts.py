"""The constant facts of a device, and the call of NVML that each comes from."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

from cudakit.gpu.nvml import names
from cudakit.gpu.nvml.names import name_from
from cudakit.gpu.nvml.reader import (
    Convert,
    Readings,
    call,
    cpu_ranges,
    divided,
    filled,
    hexadecimal,
    item,
    member,
    same,
    value,
)
from cudakit.units import Unavailable

_CPU_WORDS = 32  # of 64 CPUs each
_MIB = 2**20
_FABRIC_COMPLETED = 3  # NVML_GPU_FABRIC_STATE_COMPLETED

_IDENTITY: Readings = {
    "name": call("nvmlDeviceGetName"),
    "brand": call("nvmlDeviceGetBrand", to=name_from(names.BRANDS)),
    "architecture": call("nvmlDeviceGetArchitecture", to=name_from(names.ARCHITECTURES)),
    "compute_capability": call(
        "nvmlDeviceGetCudaComputeCapability", to=lambda pair: f"{pair[0]}.{pair[1]}"
    ),
    "cuda_cores": call("nvmlDeviceGetNumGpuCores"),
    "serial": call("nvmlDeviceGetSerial"),
    "minor_number": call("nvmlDeviceGetMinorNumber"),
    "board_id": call("nvmlDeviceGetBoardId", to=hex),
    "board_part_number": call("nvmlDeviceGetBoardPartNumber"),
    "module_id": call("nvmlDeviceGetModuleId"),
    "multi_gpu_board": call("nvmlDeviceGetMultiGpuBoard", to=bool),
    "vbios_version": call("nvmlDeviceGetVbiosVersion"),
    "inforom_image_version": call("nvmlDeviceGetInforomImageVersion"),
    "inforom_oem_version": call("nvmlDeviceGetInforomVersion", "NVML_INFOROM_OEM"),
    "inforom_ecc_version": call("nvmlDeviceGetInforomVersion", "NVML_INFOROM_ECC"),
    "inforom_power_version": call("nvmlDeviceGetInforomVersion", "NVML_INFOROM_POWER"),
    "gsp_firmware_version": call("nvmlDeviceGetGspFirmwareVersion"),
    "gsp_firmware": call("nvmlDeviceGetGspFirmwareMode", to=item(0, bool)),
    "gpm": call("nvmlGpmQueryDeviceSupport", to=member("isSupportedDevice", bool)),
}

_PLACE: Readings = {
    "pci_device_id": call("nvmlDeviceGetPciInfo", to=member("pciDeviceId", hexadecimal)),
    "pci_subsystem_id": call("nvmlDeviceGetPciInfo", to=member("pciSubSystemId", hexadecimal)),
    "bus": call("nvmlDeviceGetBusType", to=name_from(names.BUSES)),
    "interrupt": call("nvmlDeviceGetIrqNum"),
    "numa_node": call("nvmlDeviceGetNumaNodeId"),
    "cpu_affinity": call("nvmlDeviceGetCpuAffinity", _CPU_WORDS, to=cpu_ranges),
    "addressing_mode": call("nvmlDeviceGetAddressingMode", to=name_from(names.ADDRESSING_MODES)),
    "pcie_generation_max": call("nvmlDeviceGetMaxPcieLinkGeneration"),
    "pcie_generation_device_max": call("nvmlDeviceGetGpuMaxPcieLinkGeneration"),
    "pcie_width_max": call("nvmlDeviceGetMaxPcieLinkWidth"),
    "power_source": call("nvmlDeviceGetPowerSource", to=name_from(names.POWER_SOURCES)),
}

_MODES: Readings = {
    "persistence_mode": call("nvmlDeviceGetPersistenceMode", to=bool),
    "compute_mode": call("nvmlDeviceGetComputeMode", to=name_from(names.COMPUTE_MODES)),
    "display_attached": call("nvmlDeviceGetDisplayMode", to=bool),
    "display_active": call("nvmlDeviceGetDisplayActive", to=bool),
    "accounting_mode": call("nvmlDeviceGetAccountingMode", to=bool),
    "accounting_buffer_size": call("nvmlDeviceGetAccountingBufferSize"),
    "virtualization_mode": call(
        "nvmlDeviceGetVirtualizationMode", to=name_from(names.VIRTUALIZATION_MODES)
    ),
    "host_vgpu_mode": call("nvmlDeviceGetHostVgpuMode", to=name_from(names.HOST_VGPU_MODES)),
    "operation_mode": call(
        "nvmlDeviceGetGpuOperationMode", to=item(0, name_from(names.OPERATION_MODES))
    ),
    "mig_mode": call("nvmlDeviceGetMigMode", to=item(0, bool)),
    "mig_mode_pending": call("nvmlDeviceGetMigMode", to=item(1, bool)),
    "mig_instances_max": call("nvmlDeviceGetMaxMigDeviceCount"),
    "ecc_mode": call("nvmlDeviceGetEccMode", to=item(0, bool)),
    "ecc_mode_pending": call("nvmlDeviceGetEccMode", to=item(1, bool)),
    "ecc_mode_default": call("nvmlDeviceGetDefaultEccMode", to=item(0, bool)),
    "dram_encryption": call("nvmlDeviceGetDramEncryptionMode", to=item(0, bool)),
}

_LIMITS: Readings = {
    "memory_total_bytes": call("nvmlDeviceGetMemoryInfo", to=member("total")),
    "memory_bus_width_bits": call("nvmlDeviceGetMemoryBusWidth"),
    "bar1_total_bytes": call("nvmlDeviceGetBAR1MemoryInfo", to=member("bar1Total")),
    "protected_memory_total_bytes": call(
        "nvmlDeviceGetConfComputeProtectedMemoryUsage", to=member("total")
    ),
    "clock_graphics_max_mhz": call("nvmlDeviceGetMaxClockInfo", "NVML_CLOCK_GRAPHICS"),
    "clock_sm_max_mhz": call("nvmlDeviceGetMaxClockInfo", "NVML_CLOCK_SM"),
    "clock_memory_max_mhz": call("nvmlDeviceGetMaxClockInfo", "NVML_CLOCK_MEM"),
    "clock_video_max_mhz": call("nvmlDeviceGetMaxClockInfo", "NVML_CLOCK_VIDEO"),
    "clock_customer_boost_max_mhz": call(
        "nvmlDeviceGetMaxCustomerBoostClock", "NVML_CLOCK_GRAPHICS"
    ),
    "clock_graphics_default_mhz": call(
        "nvmlDeviceGetDefaultApplicationsClock", "NVML_CLOCK_GRAPHICS"
    ),
    "clock_memory_default_mhz": call("nvmlDeviceGetDefaultApplicationsClock", "NVML_CLOCK_MEM"),
    "clocks_memory_supported_mhz": call("nvmlDeviceGetSupportedMemoryClocks", to=tuple),
    "clock_event_reasons_supported": call(
        "nvmlDeviceGetSupportedClocksEventReasons", to=names.clock_event_reasons
    ),
    "power_management": call("nvmlDeviceGetPowerManagementMode", to=bool),
    "power_limit_min_w": call(
        "nvmlDeviceGetPowerManagementLimitConstraints", to=item(0, divided(1000))
    ),
    "power_limit_max_w": call(
        "nvmlDeviceGetPowerManagementLimitConstraints", to=item(1, divided(1000))
    ),
    "power_limit_default_w": call("nvmlDeviceGetPowerManagementDefaultLimit", to=divided(1000)),
    "temperature_shutdown_c": call(
        "nvmlDeviceGetTemperatureThreshold", "NVML_TEMPERATURE_THRESHOLD_SHUTDOWN"
    ),
    "temperature_slowdown_c": call(
        "nvmlDeviceGetTemperatureThreshold", "NVML_TEMPERATURE_THRESHOLD_SLOWDOWN"
    ),
    "temperature_gpu_max_c": call(
        "nvmlDeviceGetTemperatureThreshold", "NVML_TEMPERATURE_THRESHOLD_GPU_MAX"
    ),
    "temperature_memory_max_c": call(
        "nvmlDeviceGetTemperatureThreshold", "NVML_TEMPERATURE_THRESHOLD_MEM_MAX"
    ),
    "temperature_shutdown_margin_c": value("TEMPERATURE_SHUTDOWN_TLIMIT", alone=True),
    "temperature_slowdown_margin_c": value("TEMPERATURE_SLOWDOWN_TLIMIT", alone=True),
    "temperature_gpu_max_margin_c": value("TEMPERATURE_GPU_MAX_TLIMIT", alone=True),
    "temperature_memory_max_margin_c": value("TEMPERATURE_MEM_MAX_TLIMIT", alone=True),
    "fans": call("nvmlDeviceGetNumFans"),
    "encoder_capacity_h264_percent": call(
        "nvmlDeviceGetEncoderCapacity", "NVML_ENCODER_QUERY_H264"
    ),
    "encoder_capacity_hevc_percent": call(
        "nvmlDeviceGetEncoderCapacity", "NVML_ENCODER_QUERY_HEVC"
    ),
    "encoder_capacity_av1_percent": call("nvmlDeviceGetEncoderCapacity", "NVML_ENCODER_QUERY_AV1"),
}


def _cluster(raw: Iterable[int]) -> str:
    return str(uuid.UUID(bytes=bytes(byte & 0xFF for byte in raw)))


def _of_fabric(name: str, to: Convert = same) -> Convert:
    """Return a member that is valid only after the fabric manager has set up the GPU."""

    def take(answer: Any) -> Any:
        if answer.state != _FABRIC_COMPLETED:
            return Unavailable(f"fabric: {name_from(names.FABRIC_STATES)(answer.state)}")
        return to(getattr(answer, name))

    return take


def _fabric(to: Any) -> Any:
    return filled(
        "nvmlDeviceGetGpuFabricInfoV",
        "c_nvmlGpuFabricInfoV_t",
        version="nvmlGpuFabricInfo_v2",
        to=to,
    )


_LINKS: Readings = {
    "nvlink_count": value("NVLINK_LINK_COUNT"),
    "nvlink_version": call("nvmlDeviceGetNvLinkVersion", 0, to=name_from(names.NVLINK_VERSIONS)),
    "nvlink_speed_mbps": value("NVLINK_SPEED_MBPS_COMMON"),
    "c2c_mode": call("nvmlDeviceGetC2cModeInfoV", to=member("isC2cEnabled", bool)),
    "c2c_links": value("C2C_LINK_COUNT"),
    "fabric_state": _fabric(member("state", name_from(names.FABRIC_STATES))),
    "fabric_status": _fabric(_of_fabric("status")),
    "fabric_clique_id": _fabric(_of_fabric("cliqueId")),
    "fabric_cluster_uuid": _fabric(_of_fabric("clusterUuid", _cluster)),
    "fabric_health_mask": _fabric(_of_fabric("healthMask", hex)),
}

_WEAR: Readings = {
    "remapped_rows_correctable": call("nvmlDeviceGetRemappedRows", to=item(0)),
    "remapped_rows_uncorrectable": call("nvmlDeviceGetRemappedRows", to=item(1)),
    "remapped_rows_pending": call("nvmlDeviceGetRemappedRows", to=item(2, bool)),
    "remapped_rows_failed": call("nvmlDeviceGetRemappedRows", to=item(3, bool)),
    "remap_banks_max": call("nvmlDeviceGetRowRemapperHistogram", to=member("max")),
    "remap_banks_high": call("nvmlDeviceGetRowRemapperHistogram", to=member("high")),
    "remap_banks_partial": call("nvmlDeviceGetRowRemapperHistogram", to=member("partial")),
    "remap_banks_low": call("nvmlDeviceGetRowRemapperHistogram", to=member("low")),
    "remap_banks_none": call("nvmlDeviceGetRowRemapperHistogram", to=member("none")),
    "retired_pages_single_bit": value("RETIRED_SBE"),
    "retired_pages_double_bit": value("RETIRED_DBE"),
    "retired_pages_pending": value("RETIRED_PENDING", to=bool),
    "repair_channel_pending": call("nvmlDeviceGetRepairStatus", to=item(0, bool)),
    "repair_tpc_pending": call("nvmlDeviceGetRepairStatus", to=item(1, bool)),
    "unrepairable_memory": call("nvmlDeviceGetUnrepairableMemoryFlag_v1", to=bool),
}

FACTS: Readings = {**_IDENTITY, **_PLACE, **_MODES, **_LIMITS, **_LINKS, **_WEAR}

# Additional facts of a MIG instance.
INSTANCE: Readings = {
    "gpu_instance_id": call("nvmlDeviceGetGpuInstanceId"),
    "compute_instance_id": call("nvmlDeviceGetComputeInstanceId"),
    "instance_multiprocessors": call("nvmlDeviceGetAttributes", to=member("multiprocessorCount")),
    "instance_memory_bytes": call(
        "nvmlDeviceGetAttributes", to=member("memorySizeMB", lambda size: size * _MIB)
    ),
    "instance_copy_engines": call("nvmlDeviceGetAttributes", to=member("sharedCopyEngineCount")),
}
