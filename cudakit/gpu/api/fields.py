"""The device fields that NVML reports: unit, meaning and the NVML call that reads each.

The fields of the CUDA driver are in attributes.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["identity", "fact", "telemetry", "activity"]

# The group of fields that only MIG instances have.
INSTANCE_GROUP = "MIG instance"

# Matches "function(arguments)" or "field_id(scope)", followed by the part of the result to use.
_CALL = re.compile(r"(\w+)(?:\(([\w,]+)\))?(\S*)")


@dataclass(frozen=True, slots=True)
class FieldInfo:
    """One field of a device."""

    name: str  # name of the field, as --fields accepts it
    unit: str  # printed after the number; "" for none; "bytes", "bool" and "hex" select a format
    source: str  # NVML function or field id, or CUDA attribute
    description: str  # meaning of the field
    group: str  # heading above the field in --long
    kind: Kind  # which query reads the field


@dataclass(frozen=True, slots=True)
class NvmlField:
    """One NVML field and the call that reads it."""

    info: FieldInfo
    arguments: tuple[str, ...]  # numbers or names of nvidia-ml-py constants
    result_part: str  # the part of the result to use: ".member", "[index]", or "" for all


def nvml_fields() -> Iterator[NvmlField]:
    """Yield the NVML fields in display order."""
    yield from _parse_fields(_FACT_TABLE, "fact")
    yield from _parse_fields(_TELEMETRY_TABLE, "telemetry")
    yield from _parse_fields(_ACTIVITY_TABLE, "activity")


def _parse_fields(table: str, kind: Kind) -> Iterator[NvmlField]:
    group = ""
    for line in table.replace(",\n    ", ",").replace("\n    ", " ").strip().splitlines():
        if line.startswith("["):
            group = line.strip("[]")
            continue
        name, unit, call, description = line.split(" ", 3)
        match = _CALL.fullmatch(call)
        assert match, call  # noqa: S101 the tables below are constants
        source, arguments, result_part = match.groups(default="")
        info = FieldInfo(name, unit.replace("-", ""), source, description, group, kind)
        yield NvmlField(info, tuple(filter(None, arguments.split(","))), result_part)


# --- name, unit ("-" for none), call, meaning; an indented line continues the row --------------------


_FACT_TABLE = """
[identity]
name - nvmlDeviceGetName Name of the product
brand - nvmlDeviceGetBrand Brand of the product
architecture - nvmlDeviceGetArchitecture Architecture
compute_capability - nvmlDeviceGetCudaComputeCapability Compute capability
cuda_cores - nvmlDeviceGetNumGpuCores Number of CUDA cores
serial - nvmlDeviceGetSerial Serial number
minor_number - nvmlDeviceGetMinorNumber Minor device number: N of /dev/nvidiaN
board_id - nvmlDeviceGetBoardId Board id, shared by all GPUs of a board
board_part_number - nvmlDeviceGetBoardPartNumber Part number of the board
module_id - nvmlDeviceGetModuleId Module id on the baseboard
multi_gpu_board bool nvmlDeviceGetMultiGpuBoard Whether the board carries several GPUs
vbios_version - nvmlDeviceGetVbiosVersion Version of the video BIOS
inforom_image_version - nvmlDeviceGetInforomImageVersion Version of the infoROM
inforom_oem_version - nvmlDeviceGetInforomVersion(NVML_INFOROM_OEM) Version of the infoROM's OEM object
inforom_ecc_version - nvmlDeviceGetInforomVersion(NVML_INFOROM_ECC) Version of the infoROM's ECC object
inforom_power_version - nvmlDeviceGetInforomVersion(NVML_INFOROM_POWER) Version of the infoROM's power object
gsp_firmware_version - nvmlDeviceGetGspFirmwareVersion Version of the GSP firmware
gsp_firmware bool nvmlDeviceGetGspFirmwareMode[0] Whether the GSP firmware is in use
gpm bool nvmlGpmQueryDeviceSupport.isSupportedDevice Whether GPM activity metrics are supported
[location]
pci_device_id hex nvmlDeviceGetPciInfo.pciDeviceId PCI device and vendor id
pci_subsystem_id hex nvmlDeviceGetPciInfo.pciSubSystemId PCI subsystem id
bus - nvmlDeviceGetBusType Bus type
interrupt - nvmlDeviceGetIrqNum Interrupt number
numa_node - nvmlDeviceGetNumaNodeId NUMA node of the GPU's memory
cpu_affinity - nvmlDeviceGetCpuAffinity(32) CPUs near the GPU
addressing_mode - nvmlDeviceGetAddressingMode Access to pageable host memory: HMM, ATS or none
power_source - nvmlDeviceGetPowerSource Power source
[links]
pcie_generation_max - nvmlDeviceGetMaxPcieLinkGeneration Maximum PCIe generation of GPU and slot
pcie_generation_device_max - nvmlDeviceGetGpuMaxPcieLinkGeneration Maximum PCIe generation of the GPU
pcie_width_max - nvmlDeviceGetMaxPcieLinkWidth Maximum PCIe lanes of GPU and slot
nvlink_count - NVML_FI_DEV_NVLINK_LINK_COUNT Number of NVLinks
nvlink_version - nvmlDeviceGetNvLinkVersion(0) NVLink version
nvlink_speed_mbps MB/s NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON Speed of one NVLink
c2c_mode bool nvmlDeviceGetC2cModeInfoV.isC2cEnabled Whether NVLink-C2C to the CPU is on
c2c_links - NVML_FI_DEV_C2C_LINK_COUNT Number of NVLink-C2C links
fabric_state - nvmlDeviceGetGpuFabricInfoV.state State of the NVLink fabric registration
fabric_status - nvmlDeviceGetGpuFabricInfoV.status Status of the fabric registration; 0 is success
fabric_clique_id - nvmlDeviceGetGpuFabricInfoV.cliqueId Fabric clique id
fabric_cluster_uuid - nvmlDeviceGetGpuFabricInfoV.clusterUuid Fabric cluster UUID
fabric_health_mask hex nvmlDeviceGetGpuFabricInfoV.healthMask Fabric health bit mask
[modes]
persistence_mode bool nvmlDeviceGetPersistenceMode Whether the driver stays loaded without a process
compute_mode - nvmlDeviceGetComputeMode Which processes may create contexts
display_attached bool nvmlDeviceGetDisplayMode Whether a display is attached
display_active bool nvmlDeviceGetDisplayActive Whether a display uses memory
accounting_mode bool nvmlDeviceGetAccountingMode Whether process accounting is on
accounting_buffer_size - nvmlDeviceGetAccountingBufferSize
    Maximum number of processes in the accounting buffer
virtualization_mode - nvmlDeviceGetVirtualizationMode Virtualization mode
host_vgpu_mode - nvmlDeviceGetHostVgpuMode Host vGPU mode
operation_mode - nvmlDeviceGetGpuOperationMode[0] GPU operation mode
mig_mode bool nvmlDeviceGetMigMode[0] Whether the GPU is divided into MIG instances
mig_mode_pending bool nvmlDeviceGetMigMode[1] Whether MIG is on after the next reset
mig_instances_max - nvmlDeviceGetMaxMigDeviceCount Maximum MIG instances
ecc_mode bool nvmlDeviceGetEccMode[0] Whether ECC is on
ecc_mode_pending bool nvmlDeviceGetEccMode[1] Whether ECC is on after the next reset
ecc_mode_default bool nvmlDeviceGetDefaultEccMode[0] Whether ECC is on by default
dram_encryption bool nvmlDeviceGetDramEncryptionMode[0] Whether memory is encrypted
[MIG instance]
gpu_instance_id - nvmlDeviceGetGpuInstanceId GPU instance id
compute_instance_id - nvmlDeviceGetComputeInstanceId Compute instance id
instance_multiprocessors - nvmlDeviceGetAttributes.multiprocessorCount Multiprocessors (SMs)
instance_memory_bytes bytes nvmlDeviceGetAttributes.memorySizeMB Memory
instance_copy_engines - nvmlDeviceGetAttributes.sharedCopyEngineCount Copy engines
[memory]
memory_total_bytes bytes nvmlDeviceGetMemoryInfo.total Total GPU memory
memory_bus_width_bits bits nvmlDeviceGetMemoryBusWidth Width of the memory bus
bar1_total_bytes bytes nvmlDeviceGetBAR1MemoryInfo.bar1Total
    Size of BAR1, the window for host access to GPU memory
protected_memory_total_bytes bytes nvmlDeviceGetConfComputeProtectedMemoryUsage.total Confidential memory
[clocks]
clock_graphics_max_mhz MHz nvmlDeviceGetMaxClockInfo(NVML_CLOCK_GRAPHICS) Maximum graphics clock
clock_sm_max_mhz MHz nvmlDeviceGetMaxClockInfo(NVML_CLOCK_SM) Maximum clock of the SMs
clock_memory_max_mhz MHz nvmlDeviceGetMaxClockInfo(NVML_CLOCK_MEM) Maximum memory clock
clock_video_max_mhz MHz nvmlDeviceGetMaxClockInfo(NVML_CLOCK_VIDEO) Maximum video clock
clock_customer_boost_max_mhz MHz nvmlDeviceGetMaxCustomerBoostClock(NVML_CLOCK_GRAPHICS)
    Maximum boost clock that can be set
clock_graphics_default_mhz MHz nvmlDeviceGetDefaultApplicationsClock(NVML_CLOCK_GRAPHICS)
    Default graphics clock of applications
clock_memory_default_mhz MHz nvmlDeviceGetDefaultApplicationsClock(NVML_CLOCK_MEM)
    Default memory clock of applications
clocks_memory_supported_mhz MHz nvmlDeviceGetSupportedMemoryClocks Memory clocks that can be set
clock_event_reasons_supported - nvmlDeviceGetSupportedClocksEventReasons
    Clock event reasons that the GPU can report
[power and temperature]
power_management bool nvmlDeviceGetPowerManagementMode Whether power management is supported
power_limit_min_w W nvmlDeviceGetPowerManagementLimitConstraints[0] Minimum power limit that can be set
power_limit_max_w W nvmlDeviceGetPowerManagementLimitConstraints[1] Maximum power limit that can be set
power_limit_default_w W nvmlDeviceGetPowerManagementDefaultLimit Default power limit
temperature_shutdown_c °C nvmlDeviceGetTemperatureThreshold(NVML_TEMPERATURE_THRESHOLD_SHUTDOWN)
    GPU temperature at shutdown
temperature_slowdown_c °C nvmlDeviceGetTemperatureThreshold(NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
    GPU temperature at hardware slowdown
temperature_gpu_max_c °C nvmlDeviceGetTemperatureThreshold(NVML_TEMPERATURE_THRESHOLD_GPU_MAX)
    GPU temperature at software slowdown
temperature_memory_max_c °C nvmlDeviceGetTemperatureThreshold(NVML_TEMPERATURE_THRESHOLD_MEM_MAX)
    Memory temperature at slowdown
temperature_shutdown_margin_c °C NVML_FI_DEV_TEMPERATURE_SHUTDOWN_TLIMIT
    Value of temperature_margin_c at which the GPU shuts down
temperature_slowdown_margin_c °C NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT
    Value of temperature_margin_c at hardware slowdown
temperature_gpu_max_margin_c °C NVML_FI_DEV_TEMPERATURE_GPU_MAX_TLIMIT
    Value of temperature_margin_c at software slowdown
temperature_memory_max_margin_c °C NVML_FI_DEV_TEMPERATURE_MEM_MAX_TLIMIT
    Thermal margin of the memory at which its slowdown begins
fans - nvmlDeviceGetNumFans Number of fans
[video]
encoder_capacity_h264_percent % nvmlDeviceGetEncoderCapacity(NVML_ENCODER_QUERY_H264)
    Available H.264 encoder capacity
encoder_capacity_hevc_percent % nvmlDeviceGetEncoderCapacity(NVML_ENCODER_QUERY_HEVC)
    Available HEVC encoder capacity
encoder_capacity_av1_percent % nvmlDeviceGetEncoderCapacity(NVML_ENCODER_QUERY_AV1)
    Available AV1 encoder capacity
[errors and wear]
remapped_rows_correctable - nvmlDeviceGetRemappedRows[0] Rows remapped after correctable errors
remapped_rows_uncorrectable - nvmlDeviceGetRemappedRows[1] Rows remapped after uncorrectable errors
remapped_rows_pending bool nvmlDeviceGetRemappedRows[2] Whether a row remapping is pending until reset
remapped_rows_failed bool nvmlDeviceGetRemappedRows[3] Whether a row remapping failed
remap_banks_max - nvmlDeviceGetRowRemapperHistogram.max Memory banks with all spare rows left
remap_banks_high - nvmlDeviceGetRowRemapperHistogram.high Memory banks with most spare rows left
remap_banks_partial - nvmlDeviceGetRowRemapperHistogram.partial Memory banks with some spare rows left
remap_banks_low - nvmlDeviceGetRowRemapperHistogram.low Memory banks with few spare rows left
remap_banks_none - nvmlDeviceGetRowRemapperHistogram.none Memory banks with no spare row left
retired_pages_single_bit - NVML_FI_DEV_RETIRED_SBE Pages retired after single-bit errors (before Ampere)
retired_pages_double_bit - NVML_FI_DEV_RETIRED_DBE Pages retired after double-bit errors
retired_pages_pending bool NVML_FI_DEV_RETIRED_PENDING Whether a page retirement is pending until reset
repair_channel_pending bool nvmlDeviceGetRepairStatus[0] Whether a memory channel repair is pending
repair_tpc_pending bool nvmlDeviceGetRepairStatus[1] Whether a TPC repair is pending
unrepairable_memory bool nvmlDeviceGetUnrepairableMemoryFlag_v1 Whether memory has unrepairable errors
"""

_TELEMETRY_TABLE = """
[memory]
memory_used_bytes bytes nvmlDeviceGetMemoryInfo(nvmlMemory_v2).used Memory in use
memory_free_bytes bytes nvmlDeviceGetMemoryInfo(nvmlMemory_v2).free Free memory
memory_reserved_bytes bytes nvmlDeviceGetMemoryInfo(nvmlMemory_v2).reserved
    Memory reserved by driver and firmware
bar1_used_bytes bytes nvmlDeviceGetBAR1MemoryInfo.bar1Used BAR1 memory in use
protected_memory_used_bytes bytes nvmlDeviceGetConfComputeProtectedMemoryUsage.used Confidential memory in use
[utilization]
utilization_gpu_percent % nvmlDeviceGetUtilizationRates.gpu Share of time with a kernel running
utilization_memory_percent % nvmlDeviceGetUtilizationRates.memory Share of time with memory accesses
utilization_encoder_percent % nvmlDeviceGetEncoderUtilization[0] Utilization of the video encoders
utilization_decoder_percent % nvmlDeviceGetDecoderUtilization[0] Utilization of the video decoders
utilization_jpeg_percent % nvmlDeviceGetJpgUtilization[0] Utilization of the JPEG decoders
utilization_ofa_percent % nvmlDeviceGetOfaUtilization[0] Utilization of the optical flow accelerator
[video]
encoder_sessions - nvmlDeviceGetEncoderStats[0] Encoder sessions
encoder_fps - nvmlDeviceGetEncoderStats[1] Frames per second of the encoder sessions
encoder_latency_us us nvmlDeviceGetEncoderStats[2] Encoding latency
capture_sessions - nvmlDeviceGetFBCStats.sessionsCount Frame capture sessions
capture_fps - nvmlDeviceGetFBCStats.averageFPS Frames per second of the capture sessions
capture_latency_us us nvmlDeviceGetFBCStats.averageLatency Capture latency
[power and temperature]
temperature_gpu_c °C nvmlDeviceGetTemperature(NVML_TEMPERATURE_GPU) Temperature of the GPU
temperature_memory_c °C NVML_FI_DEV_MEMORY_TEMP Temperature of the memory
temperature_margin_c °C nvmlDeviceGetMarginTemperature Temperature margin to the nearest slowdown
fan_speed_percent % nvmlDeviceGetFanSpeed Fan speed relative to maximum
power_draw_w W nvmlDeviceGetPowerUsage Power draw (since Ampere, except GA100: average of the last second)
power_average_w W NVML_FI_DEV_POWER_AVERAGE Average power draw of the last second
power_instant_w W NVML_FI_DEV_POWER_INSTANT Instantaneous power draw
power_limit_w W nvmlDeviceGetPowerManagementLimit Requested power limit
power_limit_enforced_w W nvmlDeviceGetEnforcedPowerLimit Enforced power limit
energy_j J nvmlDeviceGetTotalEnergyConsumption Energy consumed since driver load
[clocks]
performance_state - nvmlDeviceGetPerformanceState Performance state, P0 is the highest
clock_graphics_mhz MHz nvmlDeviceGetClockInfo(NVML_CLOCK_GRAPHICS) Graphics clock
clock_sm_mhz MHz nvmlDeviceGetClockInfo(NVML_CLOCK_SM) Clock of the SMs
clock_memory_mhz MHz nvmlDeviceGetClockInfo(NVML_CLOCK_MEM) Memory clock
clock_video_mhz MHz nvmlDeviceGetClockInfo(NVML_CLOCK_VIDEO) Video clock
clock_graphics_application_mhz MHz nvmlDeviceGetApplicationsClock(NVML_CLOCK_GRAPHICS)
    Application graphics clock
clock_memory_application_mhz MHz nvmlDeviceGetApplicationsClock(NVML_CLOCK_MEM)
    Application memory clock
clock_event_reasons - nvmlDeviceGetCurrentClocksEventReasons Reasons that limit the current clocks
slowed_by_power_cap_ns ns NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP Time throttled by the power limit
slowed_by_sync_boost_ns ns NVML_FI_DEV_CLOCKS_EVENT_REASON_SYNC_BOOST Time throttled by sync boost
slowed_by_software_thermal_ns ns NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN
    Time in software thermal slowdown
slowed_by_hardware_thermal_ns ns NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN
    Time in hardware thermal slowdown
slowed_by_power_brake_ns ns NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN
    Time throttled by the power brake
[links]
pcie_generation - nvmlDeviceGetCurrPcieLinkGeneration Current PCIe generation (lower when idle)
pcie_width - nvmlDeviceGetCurrPcieLinkWidth Current PCIe lanes
pcie_speed_mbps Mbit/s nvmlDeviceGetPcieSpeed Current raw speed of one PCIe lane, such as 32000 for PCIe 5
pcie_replays - nvmlDeviceGetPcieReplayCounter PCIe packet replays
pcie_replay_rollovers - NVML_FI_DEV_PCIE_REPLAY_ROLLOVER_COUNTER Rollovers of the PCIe replay counter
pcie_sent_bytes bytes NVML_FI_DEV_PCIE_COUNT_TX_BYTES Data sent over PCIe (the counter wraps)
pcie_received_bytes bytes NVML_FI_DEV_PCIE_COUNT_RX_BYTES Data received over PCIe (the counter wraps)
nvlink_sent_bytes bytes NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX(4294967295) Data sent over all NVLinks
nvlink_received_bytes bytes NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX(4294967295) Data received over all NVLinks
nvlink_replay_errors - NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL NVLink replays
nvlink_recovery_errors - NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL NVLink recoveries
nvlink_crc_errors - NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL NVLink checksum errors
[errors and wear]
ecc_sram_corrected_volatile - nvmlDeviceGetSramEccErrorStatus.volatileCor
    Corrected SRAM errors since driver load
ecc_sram_parity_volatile - nvmlDeviceGetSramEccErrorStatus.volatileUncParity
    Uncorrectable SRAM parity errors since driver load
ecc_sram_uncorrected_volatile - nvmlDeviceGetSramEccErrorStatus.volatileUncSecDed
    Uncorrectable SRAM errors since driver load
ecc_sram_corrected_aggregate - nvmlDeviceGetSramEccErrorStatus.aggregateCor
    Corrected SRAM errors over the GPU's lifetime
ecc_sram_parity_aggregate - nvmlDeviceGetSramEccErrorStatus.aggregateUncParity
    Uncorrectable SRAM parity errors over the GPU's lifetime
ecc_sram_uncorrected_aggregate - nvmlDeviceGetSramEccErrorStatus.aggregateUncSecDed
    Uncorrectable SRAM errors over the GPU's lifetime
ecc_sram_threshold_exceeded bool nvmlDeviceGetSramEccErrorStatus.bThresholdExceeded
    Whether SRAM errors exceed the threshold
ecc_dram_corrected_volatile - nvmlDeviceGetMemoryErrorCounter(NVML_MEMORY_ERROR_TYPE_CORRECTED,
    NVML_VOLATILE_ECC,NVML_MEMORY_LOCATION_DRAM) Corrected memory errors since driver load
ecc_dram_uncorrected_volatile - nvmlDeviceGetMemoryErrorCounter(NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
    NVML_VOLATILE_ECC,NVML_MEMORY_LOCATION_DRAM) Uncorrectable memory errors since driver load
ecc_dram_corrected_aggregate - nvmlDeviceGetMemoryErrorCounter(NVML_MEMORY_ERROR_TYPE_CORRECTED,
    NVML_AGGREGATE_ECC,NVML_MEMORY_LOCATION_DRAM) Corrected memory errors over the GPU's lifetime
ecc_dram_uncorrected_aggregate - nvmlDeviceGetMemoryErrorCounter(NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
    NVML_AGGREGATE_ECC,NVML_MEMORY_LOCATION_DRAM) Uncorrectable memory errors over the GPU's lifetime
recovery_action - NVML_FI_DEV_GET_GPU_RECOVERY_ACTION Recovery action that the driver requests
"""

# Fields measured between two reads, for ``devices --watch``.
_ACTIVITY_TABLE = """
[activity]
graphics_activity_percent % NVML_GPM_METRIC_GRAPHICS_UTIL Share of time with graphics or compute active
sm_activity_percent % NVML_GPM_METRIC_SM_UTIL Share of SMs with resident warps
sm_occupancy_percent % NVML_GPM_METRIC_SM_OCCUPANCY Resident warps relative to the maximum
tensor_activity_percent % NVML_GPM_METRIC_ANY_TENSOR_UTIL Utilization of the tensor cores
tensor_fp64_activity_percent % NVML_GPM_METRIC_DFMA_TENSOR_UTIL
    Utilization of the tensor cores in double precision
tensor_half_activity_percent % NVML_GPM_METRIC_HMMA_TENSOR_UTIL
    Utilization of the tensor cores in half precision
tensor_integer_activity_percent % NVML_GPM_METRIC_IMMA_TENSOR_UTIL Utilization of the tensor cores in integers
integer_activity_percent % NVML_GPM_METRIC_INTEGER_UTIL Utilization of the integer pipes
fp64_activity_percent % NVML_GPM_METRIC_FP64_UTIL Utilization of the double-precision pipes
fp32_activity_percent % NVML_GPM_METRIC_FP32_UTIL Utilization of the single-precision pipes
fp16_activity_percent % NVML_GPM_METRIC_FP16_UTIL Utilization of the half-precision pipes
dram_bandwidth_percent % NVML_GPM_METRIC_DRAM_BW_UTIL Utilization of the memory bandwidth
pcie_sent_bytes_per_s B/s NVML_GPM_METRIC_PCIE_TX_PER_SEC Sent over PCIe
pcie_received_bytes_per_s B/s NVML_GPM_METRIC_PCIE_RX_PER_SEC Received over PCIe
nvlink_sent_bytes_per_s B/s NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC Sent over all NVLinks
nvlink_received_bytes_per_s B/s NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC Received over all NVLinks
"""
