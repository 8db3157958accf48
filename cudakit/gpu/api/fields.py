"""The fields of devices: unit, source and meaning of each, and of NVML's the call that reads it.

The fields of the CUDA driver are in ``attributes``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["identity", "fact", "telemetry", "activity"]

# Only MIG instances have the fields of this group.
INSTANCE_GROUP = "MIG instance"

# A function and its arguments, or a value that NVML identifies by number and its scope; then the part.
_CALL = re.compile(r"(\w+)(?:\(([\w,]+)\))?(\S*)")


@dataclass(frozen=True, slots=True)
class FieldInfo:
    """One field of a device."""

    name: str
    unit: str  # as written behind a number; "" for none, "bytes", "bool" and "hex" for the form
    source: str  # the function, value or attribute that it comes from
    description: str
    group: str
    kind: Kind  # who reads it, and whether it moves


@dataclass(frozen=True, slots=True)
class NvmlField:
    """One field of NVML, and how to read it."""

    info: FieldInfo
    arguments: tuple[str, ...]  # numbers, and names of nvidia-ml-py's constants
    part: str  # of the result: ".member", "[index]" or "" for all of it


def nvml_fields() -> Iterator[NvmlField]:
    """Yield the fields of NVML, in the order of a first reading."""
    yield from _parse(_FACTS, "fact")
    yield from _parse(_TELEMETRY, "telemetry")
    yield from _parse(_ACTIVITY, "activity")


def _parse(table: str, kind: Kind) -> Iterator[NvmlField]:
    group = ""
    for line in table.replace(",\n    ", ",").replace("\n    ", " ").strip().splitlines():
        if line.startswith("["):
            group = line.strip("[]")
            continue
        name, unit, call, description = line.split(" ", 3)
        found = _CALL.fullmatch(call)
        assert found, call  # noqa: S101 the tables below are constants
        source, arguments, part = found.groups(default="")
        info = FieldInfo(name, unit.replace("-", ""), source, description, group, kind)
        yield NvmlField(info, tuple(filter(None, arguments.split(","))), part)


# --- name, unit ("-" for none), call, meaning; an indented line continues a row --------------------


_FACTS = """
[identity]
name - nvmlDeviceGetName Name of the product
brand - nvmlDeviceGetBrand Brand of the product
architecture - nvmlDeviceGetArchitecture Architecture
compute_capability - nvmlDeviceGetCudaComputeCapability Compute capability
cuda_cores - nvmlDeviceGetNumGpuCores Cores for 32-bit arithmetic
serial - nvmlDeviceGetSerial Serial number
minor_number - nvmlDeviceGetMinorNumber The N of /dev/nvidiaN
board_id - nvmlDeviceGetBoardId Number of the board, equal on GPUs of one
board_part_number - nvmlDeviceGetBoardPartNumber Part number of the board
module_id - nvmlDeviceGetModuleId Number of the module on its baseboard
multi_gpu_board bool nvmlDeviceGetMultiGpuBoard Whether the board carries several GPUs
vbios_version - nvmlDeviceGetVbiosVersion Version of the video BIOS
inforom_image_version - nvmlDeviceGetInforomImageVersion Version of the infoROM
inforom_oem_version - nvmlDeviceGetInforomVersion(NVML_INFOROM_OEM) Version of the infoROM's OEM object
inforom_ecc_version - nvmlDeviceGetInforomVersion(NVML_INFOROM_ECC) Version of the infoROM's ECC object
inforom_power_version - nvmlDeviceGetInforomVersion(NVML_INFOROM_POWER) Version of the infoROM's power object
gsp_firmware_version - nvmlDeviceGetGspFirmwareVersion Version of the GSP firmware
gsp_firmware bool nvmlDeviceGetGspFirmwareMode[0] Whether the GSP firmware runs the GPU
gpm bool nvmlGpmQueryDeviceSupport.isSupportedDevice Whether the GPU counts activity (GPM)
[place]
pci_device_id hex nvmlDeviceGetPciInfo.pciDeviceId PCI device and vendor id
pci_subsystem_id hex nvmlDeviceGetPciInfo.pciSubSystemId PCI subsystem id
bus - nvmlDeviceGetBusType Kind of bus
interrupt - nvmlDeviceGetIrqNum Number of the interrupt
numa_node - nvmlDeviceGetNumaNodeId NUMA node of the GPU's memory
cpu_affinity - nvmlDeviceGetCpuAffinity(32) CPUs near the GPU
addressing_mode - nvmlDeviceGetAddressingMode How the GPU reads pageable memory: HMM, ATS or not
power_source - nvmlDeviceGetPowerSource Where the power comes from
[links]
pcie_generation_max - nvmlDeviceGetMaxPcieLinkGeneration Highest PCIe generation of GPU and slot
pcie_generation_device_max - nvmlDeviceGetGpuMaxPcieLinkGeneration Highest PCIe generation of the GPU
pcie_width_max - nvmlDeviceGetMaxPcieLinkWidth Most PCIe lanes of GPU and slot
nvlink_count - NVML_FI_DEV_NVLINK_LINK_COUNT NVLinks of the GPU
nvlink_version - nvmlDeviceGetNvLinkVersion(0) Version of NVLink
nvlink_speed_mbps MB/s NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON Speed of one NVLink
c2c_mode bool nvmlDeviceGetC2cModeInfoV.isC2cEnabled Whether NVLink-C2C to the CPU is on
c2c_links - NVML_FI_DEV_C2C_LINK_COUNT NVLink-C2C links
fabric_state - nvmlDeviceGetGpuFabricInfoV.state How far the NVLink fabric is set up
fabric_status - nvmlDeviceGetGpuFabricInfoV.status Result of setting it up; 0 is success
fabric_clique_id - nvmlDeviceGetGpuFabricInfoV.cliqueId Clique in the fabric
fabric_cluster_uuid - nvmlDeviceGetGpuFabricInfoV.clusterUuid Cluster of the fabric
fabric_health_mask hex nvmlDeviceGetGpuFabricInfoV.healthMask Health of the fabric
[modes]
persistence_mode bool nvmlDeviceGetPersistenceMode Whether the driver stays loaded without a process
compute_mode - nvmlDeviceGetComputeMode Who may create contexts
display_attached bool nvmlDeviceGetDisplayMode Whether a display is attached
display_active bool nvmlDeviceGetDisplayActive Whether a display uses memory
accounting_mode bool nvmlDeviceGetAccountingMode Whether the driver keeps account of processes
accounting_buffer_size - nvmlDeviceGetAccountingBufferSize Processes that it keeps account of
virtualization_mode - nvmlDeviceGetVirtualizationMode How the GPU is virtualized
host_vgpu_mode - nvmlDeviceGetHostVgpuMode Kind of vGPU of the host
operation_mode - nvmlDeviceGetGpuOperationMode[0] What the GPU is set to do well
mig_mode bool nvmlDeviceGetMigMode[0] Whether the GPU is divided into MIG instances
mig_mode_pending bool nvmlDeviceGetMigMode[1] Whether it will be after the next reset
mig_instances_max - nvmlDeviceGetMaxMigDeviceCount Most MIG instances
ecc_mode bool nvmlDeviceGetEccMode[0] Whether ECC is on
ecc_mode_pending bool nvmlDeviceGetEccMode[1] Whether ECC is on after the next reset
ecc_mode_default bool nvmlDeviceGetDefaultEccMode[0] Whether ECC is on by default
dram_encryption bool nvmlDeviceGetDramEncryptionMode[0] Whether memory is encrypted
[MIG instance]
gpu_instance_id - nvmlDeviceGetGpuInstanceId Number of the GPU instance
compute_instance_id - nvmlDeviceGetComputeInstanceId Number of the compute instance
instance_multiprocessors - nvmlDeviceGetAttributes.multiprocessorCount Multiprocessors (SMs)
instance_memory_bytes bytes nvmlDeviceGetAttributes.memorySizeMB Memory
instance_copy_engines - nvmlDeviceGetAttributes.sharedCopyEngineCount Copy engines
[memory]
memory_total_bytes bytes nvmlDeviceGetMemoryInfo.total Memory of the GPU
memory_bus_width_bits bits nvmlDeviceGetMemoryBusWidth Width of the memory bus
bar1_total_bytes bytes nvmlDeviceGetBAR1MemoryInfo.bar1Total
    Window through which the host reaches memory (BAR1)
protected_memory_total_bytes bytes nvmlDeviceGetConfComputeProtectedMemoryUsage.total Confidential memory
[clocks]
clock_graphics_max_mhz MHz nvmlDeviceGetMaxClockInfo(NVML_CLOCK_GRAPHICS) Highest graphics clock
clock_sm_max_mhz MHz nvmlDeviceGetMaxClockInfo(NVML_CLOCK_SM) Highest clock of the SMs
clock_memory_max_mhz MHz nvmlDeviceGetMaxClockInfo(NVML_CLOCK_MEM) Highest memory clock
clock_video_max_mhz MHz nvmlDeviceGetMaxClockInfo(NVML_CLOCK_VIDEO) Highest video clock
clock_customer_boost_max_mhz MHz nvmlDeviceGetMaxCustomerBoostClock(NVML_CLOCK_GRAPHICS)
    Highest boost clock that may be set
clock_graphics_default_mhz MHz nvmlDeviceGetDefaultApplicationsClock(NVML_CLOCK_GRAPHICS)
    Default graphics clock of applications
clock_memory_default_mhz MHz nvmlDeviceGetDefaultApplicationsClock(NVML_CLOCK_MEM)
    Default memory clock of applications
clocks_memory_supported_mhz MHz nvmlDeviceGetSupportedMemoryClocks Memory clocks that can be set
clock_event_reasons_supported - nvmlDeviceGetSupportedClocksEventReasons Reasons that it can report
[power and temperature]
power_management bool nvmlDeviceGetPowerManagementMode Whether the power limit works
power_limit_min_w W nvmlDeviceGetPowerManagementLimitConstraints[0] Lowest power limit that can be set
power_limit_max_w W nvmlDeviceGetPowerManagementLimitConstraints[1] Highest power limit that can be set
power_limit_default_w W nvmlDeviceGetPowerManagementDefaultLimit Default power limit
temperature_shutdown_c °C nvmlDeviceGetTemperatureThreshold(NVML_TEMPERATURE_THRESHOLD_SHUTDOWN)
    GPU temperature at which it shuts down
temperature_slowdown_c °C nvmlDeviceGetTemperatureThreshold(NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
    GPU temperature at which the hardware slows down
temperature_gpu_max_c °C nvmlDeviceGetTemperatureThreshold(NVML_TEMPERATURE_THRESHOLD_GPU_MAX)
    GPU temperature at which software slows it down
temperature_memory_max_c °C nvmlDeviceGetTemperatureThreshold(NVML_TEMPERATURE_THRESHOLD_MEM_MAX)
    Memory temperature at which it slows down
temperature_shutdown_margin_c °C NVML_FI_DEV_TEMPERATURE_SHUTDOWN_TLIMIT Margin at which it shuts down
temperature_slowdown_margin_c °C NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT Margin at which it slows down
temperature_gpu_max_margin_c °C NVML_FI_DEV_TEMPERATURE_GPU_MAX_TLIMIT Margin at which software slows it down
temperature_memory_max_margin_c °C NVML_FI_DEV_TEMPERATURE_MEM_MAX_TLIMIT Margin of the memory
fans - nvmlDeviceGetNumFans Fans
[video]
encoder_capacity_h264_percent % nvmlDeviceGetEncoderCapacity(NVML_ENCODER_QUERY_H264)
    Share of the encoder that is free for H.264
encoder_capacity_hevc_percent % nvmlDeviceGetEncoderCapacity(NVML_ENCODER_QUERY_HEVC)
    Share of the encoder that is free for HEVC
encoder_capacity_av1_percent % nvmlDeviceGetEncoderCapacity(NVML_ENCODER_QUERY_AV1)
    Share of the encoder that is free for AV1
[errors and wear]
remapped_rows_correctable - nvmlDeviceGetRemappedRows[0] Memory rows replaced after correctable errors
remapped_rows_uncorrectable - nvmlDeviceGetRemappedRows[1] Memory rows replaced after uncorrectable errors
remapped_rows_pending bool nvmlDeviceGetRemappedRows[2] Whether rows wait for a reset to be replaced
remapped_rows_failed bool nvmlDeviceGetRemappedRows[3] Whether a row could not be replaced
remap_banks_max - nvmlDeviceGetRowRemapperHistogram.max Memory banks with all spare rows left
remap_banks_high - nvmlDeviceGetRowRemapperHistogram.high Memory banks with most spare rows left
remap_banks_partial - nvmlDeviceGetRowRemapperHistogram.partial Memory banks with some spare rows left
remap_banks_low - nvmlDeviceGetRowRemapperHistogram.low Memory banks with few spare rows left
remap_banks_none - nvmlDeviceGetRowRemapperHistogram.none Memory banks with no spare row left
retired_pages_single_bit - NVML_FI_DEV_RETIRED_SBE Pages retired after single-bit errors (before Ampere)
retired_pages_double_bit - NVML_FI_DEV_RETIRED_DBE Pages retired after double-bit errors
retired_pages_pending bool NVML_FI_DEV_RETIRED_PENDING Whether pages wait for a reset to be retired
repair_channel_pending bool nvmlDeviceGetRepairStatus[0] Whether a memory channel waits for its repair
repair_tpc_pending bool nvmlDeviceGetRepairStatus[1] Whether a TPC waits for its repair
unrepairable_memory bool nvmlDeviceGetUnrepairableMemoryFlag_v1 Whether memory is broken beyond repair
"""

_TELEMETRY = """
[memory]
memory_used_bytes bytes nvmlDeviceGetMemoryInfo(nvmlMemory_v2).used Memory in use
memory_free_bytes bytes nvmlDeviceGetMemoryInfo(nvmlMemory_v2).free Memory that is free
memory_reserved_bytes bytes nvmlDeviceGetMemoryInfo(nvmlMemory_v2).reserved
    Memory that driver and firmware keep
bar1_used_bytes bytes nvmlDeviceGetBAR1MemoryInfo.bar1Used Part of BAR1 in use
protected_memory_used_bytes bytes nvmlDeviceGetConfComputeProtectedMemoryUsage.used Confidential memory in use
[utilization]
utilization_gpu_percent % nvmlDeviceGetUtilizationRates.gpu Share of time in which any kernel ran (coarse)
utilization_memory_percent % nvmlDeviceGetUtilizationRates.memory Share of time in which memory was accessed
utilization_encoder_percent % nvmlDeviceGetEncoderUtilization[0] Use of the video encoders
utilization_decoder_percent % nvmlDeviceGetDecoderUtilization[0] Use of the video decoders
utilization_jpeg_percent % nvmlDeviceGetJpgUtilization[0] Use of the JPEG decoders
utilization_ofa_percent % nvmlDeviceGetOfaUtilization[0] Use of the optical flow accelerator
[video]
encoder_sessions - nvmlDeviceGetEncoderStats[0] Encoder sessions
encoder_fps - nvmlDeviceGetEncoderStats[1] Frames a second of the encoder sessions
encoder_latency_us us nvmlDeviceGetEncoderStats[2] Latency of encoding
capture_sessions - nvmlDeviceGetFBCStats.sessionsCount Frame capture sessions
capture_fps - nvmlDeviceGetFBCStats.averageFPS Frames a second of the capture sessions
capture_latency_us us nvmlDeviceGetFBCStats.averageLatency Latency of capturing
[power and temperature]
temperature_gpu_c °C nvmlDeviceGetTemperature(NVML_TEMPERATURE_GPU) Temperature of the GPU
temperature_memory_c °C NVML_FI_DEV_MEMORY_TEMP Temperature of the memory
temperature_margin_c °C nvmlDeviceGetMarginTemperature Degrees to the nearest slowdown
fan_speed_percent % nvmlDeviceGetFanSpeed Speed of the fans, of what is intended
power_draw_w W nvmlDeviceGetPowerUsage Power draw (since Ampere: of the last second)
power_average_w W NVML_FI_DEV_POWER_AVERAGE Power draw of the last second
power_instant_w W NVML_FI_DEV_POWER_INSTANT Power draw now
power_limit_w W nvmlDeviceGetPowerManagementLimit Power limit that was asked for
power_limit_enforced_w W nvmlDeviceGetEnforcedPowerLimit Power limit in force
energy_j J nvmlDeviceGetTotalEnergyConsumption Energy since the driver was loaded
[clocks]
performance_state - nvmlDeviceGetPerformanceState Performance state, P0 is the highest
clock_graphics_mhz MHz nvmlDeviceGetClockInfo(NVML_CLOCK_GRAPHICS) Graphics clock
clock_sm_mhz MHz nvmlDeviceGetClockInfo(NVML_CLOCK_SM) Clock of the SMs
clock_memory_mhz MHz nvmlDeviceGetClockInfo(NVML_CLOCK_MEM) Memory clock
clock_video_mhz MHz nvmlDeviceGetClockInfo(NVML_CLOCK_VIDEO) Video clock
clock_graphics_application_mhz MHz nvmlDeviceGetApplicationsClock(NVML_CLOCK_GRAPHICS)
    Graphics clock that applications get
clock_memory_application_mhz MHz nvmlDeviceGetApplicationsClock(NVML_CLOCK_MEM)
    Memory clock that applications get
clock_event_reasons - nvmlDeviceGetCurrentClocksEventReasons Why the clocks are what they are
slowed_by_power_cap_ns ns NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP Slowed by the power limit
slowed_by_sync_boost_ns ns NVML_FI_DEV_CLOCKS_EVENT_REASON_SYNC_BOOST Slowed by sync boost
slowed_by_software_thermal_ns ns NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN Slowed by software for heat
slowed_by_hardware_thermal_ns ns NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN Slowed by hardware for heat
slowed_by_power_brake_ns ns NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN Slowed by the power brake
[links]
pcie_generation - nvmlDeviceGetCurrPcieLinkGeneration PCIe generation now (less when idle)
pcie_width - nvmlDeviceGetCurrPcieLinkWidth PCIe lanes now
pcie_speed_mbps MB/s nvmlDeviceGetPcieSpeed Speed of a PCIe lane now
pcie_replays - nvmlDeviceGetPcieReplayCounter PCIe packets sent again
pcie_replay_rollovers - NVML_FI_DEV_PCIE_REPLAY_ROLLOVER_COUNTER Times the counter of replays ran over
pcie_sent_bytes bytes NVML_FI_DEV_PCIE_COUNT_TX_BYTES Bytes sent over PCIe; the counter runs over
pcie_received_bytes bytes NVML_FI_DEV_PCIE_COUNT_RX_BYTES Bytes received over PCIe; the counter runs over
nvlink_sent_bytes bytes NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX(4294967295) Bytes sent over all NVLinks
nvlink_received_bytes bytes NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX(4294967295) Bytes received over all NVLinks
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
    Corrected SRAM errors in the GPU's life
ecc_sram_parity_aggregate - nvmlDeviceGetSramEccErrorStatus.aggregateUncParity
    Uncorrectable SRAM parity errors in the GPU's life
ecc_sram_uncorrected_aggregate - nvmlDeviceGetSramEccErrorStatus.aggregateUncSecDed
    Uncorrectable SRAM errors in the GPU's life
ecc_sram_threshold_exceeded bool nvmlDeviceGetSramEccErrorStatus.bThresholdExceeded
    Whether SRAM errors are too many
ecc_dram_corrected_volatile - nvmlDeviceGetMemoryErrorCounter(NVML_MEMORY_ERROR_TYPE_CORRECTED,
    NVML_VOLATILE_ECC,NVML_MEMORY_LOCATION_DRAM) Corrected memory errors since driver load
ecc_dram_uncorrected_volatile - nvmlDeviceGetMemoryErrorCounter(NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
    NVML_VOLATILE_ECC,NVML_MEMORY_LOCATION_DRAM) Uncorrectable memory errors since driver load
ecc_dram_corrected_aggregate - nvmlDeviceGetMemoryErrorCounter(NVML_MEMORY_ERROR_TYPE_CORRECTED,
    NVML_AGGREGATE_ECC,NVML_MEMORY_LOCATION_DRAM) Corrected memory errors in the GPU's life
ecc_dram_uncorrected_aggregate - nvmlDeviceGetMemoryErrorCounter(NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
    NVML_AGGREGATE_ECC,NVML_MEMORY_LOCATION_DRAM) Uncorrectable memory errors in the GPU's life
recovery_action - NVML_FI_DEV_GET_GPU_RECOVERY_ACTION What the driver asks for to make the GPU well
"""

# Measured between two reads: shown by --watch.
_ACTIVITY = """
[activity]
graphics_activity_percent % NVML_GPM_METRIC_GRAPHICS_UTIL Share of time in which graphics or compute worked
sm_activity_percent % NVML_GPM_METRIC_SM_UTIL Share of SMs that had work
sm_occupancy_percent % NVML_GPM_METRIC_SM_OCCUPANCY Resident warps, of the most that fit
tensor_activity_percent % NVML_GPM_METRIC_ANY_TENSOR_UTIL Use of the tensor cores
tensor_fp64_activity_percent % NVML_GPM_METRIC_DFMA_TENSOR_UTIL Use of the tensor cores in double precision
tensor_half_activity_percent % NVML_GPM_METRIC_HMMA_TENSOR_UTIL Use of the tensor cores in half precision
tensor_integer_activity_percent % NVML_GPM_METRIC_IMMA_TENSOR_UTIL Use of the tensor cores in integers
integer_activity_percent % NVML_GPM_METRIC_INTEGER_UTIL Use of the integer pipes
fp64_activity_percent % NVML_GPM_METRIC_FP64_UTIL Use of the double-precision pipes
fp32_activity_percent % NVML_GPM_METRIC_FP32_UTIL Use of the single-precision pipes
fp16_activity_percent % NVML_GPM_METRIC_FP16_UTIL Use of the half-precision pipes
dram_bandwidth_percent % NVML_GPM_METRIC_DRAM_BW_UTIL Use of the memory's bandwidth
pcie_sent_bytes_per_s B/s NVML_GPM_METRIC_PCIE_TX_PER_SEC Sent over PCIe
pcie_received_bytes_per_s B/s NVML_GPM_METRIC_PCIE_RX_PER_SEC Received over PCIe
nvlink_sent_bytes_per_s B/s NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC Sent over all NVLinks
nvlink_received_bytes_per_s B/s NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC Received over all NVLinks
"""
