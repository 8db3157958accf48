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


# --- The device attributes of the CUDA driver: number, name, unit and meaning ----------------------
#
# From CUdevice_attribute of the CUDA Driver API 13.5 (cuda.h). Names are CUDA's, in lower case, with
# units. ``pci_bus_id`` is the full PCI address. Unsupported attributes become Unavailable fields.

# The columns of the table: number, name, unit ("-" for a plain number) and meaning of an attribute.
_TABLE = """
1 max_threads_per_block - Maximum threads per block
2 max_block_dim_x - Maximum threads per block along x
3 max_block_dim_y - Maximum threads per block along y
4 max_block_dim_z - Maximum threads per block along z
5 max_grid_dim_x - Maximum blocks per grid along x
6 max_grid_dim_y - Maximum blocks per grid along y
7 max_grid_dim_z - Maximum blocks per grid along z
8 max_shared_memory_per_block_bytes bytes Maximum shared memory per block without opting in
9 total_constant_memory_bytes bytes Constant memory for __constant__ variables
10 warp_size - Threads of a warp
11 max_pitch_bytes bytes Maximum pitch of a pitched copy
12 max_registers_per_block - Maximum 32-bit registers per block
13 clock_rate_khz kHz Maximum clock of the SMs
14 texture_alignment_bytes bytes Alignment of texture base addresses
15 gpu_overlap bool Whether copies overlap kernels (deprecated: see async_engine_count)
16 multiprocessor_count - Multiprocessors (SMs)
17 kernel_exec_timeout bool Whether kernels have a time limit (a display is attached)
18 integrated bool Whether the GPU shares the memory of the host
19 can_map_host_memory bool Whether host memory can be mapped
20 compute_mode word Which processes may create contexts
21 maximum_texture1d_width - Maximum width of a 1D texture
22 maximum_texture2d_width - Maximum width of a 2D texture
23 maximum_texture2d_height - Maximum height of a 2D texture
24 maximum_texture3d_width - Maximum width of a 3D texture
25 maximum_texture3d_height - Maximum height of a 3D texture
26 maximum_texture3d_depth - Maximum depth of a 3D texture
27 maximum_texture2d_layered_width - Maximum width of a layered 2D texture
28 maximum_texture2d_layered_height - Maximum height of a layered 2D texture
29 maximum_texture2d_layered_layers - Maximum layers per layered 2D texture
30 surface_alignment_bytes bytes Alignment of surface base addresses
31 concurrent_kernels bool Whether kernels of one context can run concurrently
32 ecc_enabled bool Whether ECC is on
33 pci_bus_number - PCI bus number
34 pci_device_number - PCI device number (slot)
35 tcc_driver bool Whether the driver model is TCC (Windows)
36 memory_clock_rate_khz kHz Maximum clock of the memory
37 global_memory_bus_width_bits bits Width of the memory bus
38 l2_cache_size_bytes bytes L2 cache
39 max_threads_per_multiprocessor - Maximum resident threads per SM
40 async_engine_count - Engines that copy while kernels run
41 unified_addressing bool Whether device and host share one address space
42 maximum_texture1d_layered_width - Maximum width of a layered 1D texture
43 maximum_texture1d_layered_layers - Maximum layers per layered 1D texture
44 can_tex2d_gather bool Deprecated: whether 2D texture gather works
45 maximum_texture2d_gather_width - Maximum width of a gather 2D texture
46 maximum_texture2d_gather_height - Maximum height of a gather 2D texture
47 maximum_texture3d_width_alternate - Maximum width of a 3D texture in the alternate form
48 maximum_texture3d_height_alternate - Maximum height of a 3D texture in the alternate form
49 maximum_texture3d_depth_alternate - Maximum depth of a 3D texture in the alternate form
50 pci_domain_number - PCI domain number
51 texture_pitch_alignment_bytes bytes Alignment of the pitch of pitched textures
52 maximum_texturecubemap_width - Maximum width of a cubemap texture
53 maximum_texturecubemap_layered_width - Maximum width of a layered cubemap texture
54 maximum_texturecubemap_layered_layers - Maximum layers per layered cubemap texture
55 maximum_surface1d_width - Maximum width of a 1D surface
56 maximum_surface2d_width - Maximum width of a 2D surface
57 maximum_surface2d_height - Maximum height of a 2D surface
58 maximum_surface3d_width - Maximum width of a 3D surface
59 maximum_surface3d_height - Maximum height of a 3D surface
60 maximum_surface3d_depth - Maximum depth of a 3D surface
61 maximum_surface1d_layered_width - Maximum width of a layered 1D surface
62 maximum_surface1d_layered_layers - Maximum layers per layered 1D surface
63 maximum_surface2d_layered_width - Maximum width of a layered 2D surface
64 maximum_surface2d_layered_height - Maximum height of a layered 2D surface
65 maximum_surface2d_layered_layers - Maximum layers per layered 2D surface
66 maximum_surfacecubemap_width - Maximum width of a cubemap surface
67 maximum_surfacecubemap_layered_width - Maximum width of a layered cubemap surface
68 maximum_surfacecubemap_layered_layers - Maximum layers per layered cubemap surface
69 maximum_texture1d_linear_width - Maximum width of a linear 1D texture
70 maximum_texture2d_linear_width - Maximum width of a linear 2D texture
71 maximum_texture2d_linear_height - Maximum height of a linear 2D texture
72 maximum_texture2d_linear_pitch_bytes bytes Maximum pitch of a linear 2D texture
73 maximum_texture2d_mipmapped_width - Maximum width of a mipmapped 2D texture
74 maximum_texture2d_mipmapped_height - Maximum height of a mipmapped 2D texture
75 compute_capability_major - Compute capability, major number
76 compute_capability_minor - Compute capability, minor number
77 maximum_texture1d_mipmapped_width - Maximum width of a mipmapped 1D texture
78 stream_priorities_supported bool Whether streams have priorities
79 global_l1_cache_supported bool Whether global loads can be cached in L1
80 local_l1_cache_supported bool Whether local loads can be cached in L1
81 max_shared_memory_per_multiprocessor_bytes bytes Shared memory of an SM
82 max_registers_per_multiprocessor - Maximum 32-bit registers of an SM
83 managed_memory bool Whether managed memory works
84 multi_gpu_board bool Whether the board carries several GPUs
85 multi_gpu_board_group_id - Board number, equal for GPUs on one board
86 host_native_atomic_supported bool Whether atomics on host memory are native
87 single_to_double_precision_perf_ratio - Single-precision operations for each double-precision one
88 pageable_memory_access bool Whether the GPU can access pageable host memory
89 concurrent_managed_access bool Whether host and GPU may access managed memory concurrently
90 compute_preemption_supported bool Whether kernels can be preempted
91 can_use_host_pointer_for_registered_mem bool Whether registered host memory keeps its address on the GPU
92 can_use_stream_mem_ops_v1 bool Deprecated: stream memory operations of version 1
93 can_use_64_bit_stream_mem_ops_v1 bool Deprecated: 64-bit stream memory operations of version 1
94 can_use_stream_wait_value_nor_v1 bool Deprecated: NOR waits of version 1
95 cooperative_launch bool Whether cooperative launches work
96 cooperative_multi_device_launch bool Deprecated: cooperative launches over several GPUs
97 max_shared_memory_per_block_optin_bytes bytes Maximum shared memory per block that opts in
98 can_flush_remote_writes bool Whether remote writes can be flushed
99 host_register_supported bool Whether host memory can be registered
100 pageable_memory_access_uses_host_page_tables bool Whether pageable access uses the host's page tables
101 direct_managed_mem_access_from_host bool Whether the host reads managed memory on the GPU directly
102 virtual_address_management_supported bool Whether virtual memory management works
103 handle_type_posix_file_descriptor_supported bool Whether memory can be shared as POSIX file descriptors
104 handle_type_win32_handle_supported bool Whether memory can be shared as Win32 handles
105 handle_type_win32_kmt_handle_supported bool Whether memory can be shared as Win32 KMT handles
106 max_blocks_per_multiprocessor - Maximum resident blocks per SM
107 generic_compression_supported bool Whether compressible memory works
108 max_persisting_l2_cache_size_bytes bytes Maximum L2 cache set aside for persisting accesses
109 max_access_policy_window_size_bytes bytes Maximum window of an access policy
110 gpu_direct_rdma_with_cuda_vmm_supported bool Whether GPUDirect RDMA works with virtual memory
111 reserved_shared_memory_per_block_bytes bytes Shared memory that the driver keeps in each block
112 sparse_cuda_array_supported bool Whether sparse arrays work
113 read_only_host_register_supported bool Whether host memory can be registered read-only
114 timeline_semaphore_interop_supported bool Whether timeline semaphores of other APIs work
115 memory_pools_supported bool Whether stream-ordered allocation works
116 gpu_direct_rdma_supported bool Whether GPUDirect RDMA works
117 gpu_direct_rdma_flush_writes_options mask Supported ways to flush GPUDirect RDMA writes
118 gpu_direct_rdma_writes_ordering - Scope of RDMA writes without a flush: 0 none, 100 GPU, 200 all
119 mempool_supported_handle_types mask Supported handle types for sharing memory pools
120 cluster_launch bool Whether clusters can be launched
121 deferred_mapping_cuda_array_supported bool Whether arrays can be mapped late
122 can_use_64_bit_stream_mem_ops bool Whether 64-bit stream memory operations work
123 can_use_stream_wait_value_nor bool Whether NOR waits work
124 dma_buf_supported bool Whether memory can be shared as a dma-buf
125 ipc_event_supported bool Whether events can be shared between processes
126 mem_sync_domain_count - Memory synchronization domains
127 tensor_map_access_supported bool Whether tensor maps work (TMA)
128 handle_type_fabric_supported bool Whether memory can be shared by fabric handles
129 unified_function_pointers bool Whether function pointers are unified
130 numa_config word NUMA configuration of the memory
131 numa_id - NUMA node of the GPU's memory
132 multicast_supported bool Whether multicast objects work (NVLink SHARP)
133 mps_enabled bool Whether a context would run under MPS
134 host_numa_id - NUMA node of the host nearest to the GPU
135 d3d12_cig_supported bool Whether CUDA in graphics works with D3D12
136 mem_decompress_algorithm_mask mask Algorithms of the decompression engine
137 mem_decompress_maximum_length_bytes bytes Maximum input of the decompression engine
138 vulkan_cig_supported bool Whether CUDA in graphics works with Vulkan
139 gpu_pci_device_id hex PCI device and vendor id, as reported by CUDA
140 gpu_pci_subsystem_id hex PCI subsystem id, as reported by CUDA
141 host_numa_virtual_memory_management_supported bool Whether virtual memory works on host NUMA nodes
142 host_numa_memory_pools_supported bool Whether memory pools work on host NUMA nodes
143 host_numa_multinode_ipc_supported bool Whether host NUMA memory can be shared between machines
144 host_memory_pools_supported bool Whether memory pools work on the host
145 host_virtual_memory_management_supported bool Whether virtual memory management works on the host
146 host_alloc_dma_buf_supported bool Whether host memory can be shared as a dma-buf
147 only_partial_host_native_atomic_supported bool Whether only some atomics on host memory are native
148 atomic_reduction_supported bool Whether atomic reductions work
149 locality_domain_count - Locality domains of the GPU
150 max_oversized_shared_memory_per_block_bytes bytes Maximum oversized shared memory per block
151 d3d12_cig_streams_supported bool Whether CUDA in graphics with D3D12 takes streams
152 dma_buf_mmap_supported bool Whether a dma-buf can be mapped by the host
153 logical_endpoint_unicast_supported bool Whether unicast logical endpoints work
154 logical_endpoint_multicast_supported bool Whether multicast logical endpoints work
155 logical_endpoint_counted_ops_supported bool Whether counted operations on logical endpoints work
156 logical_endpoint_unicast_access_on_owner_device_supported bool Whether an endpoint's owner can access it
157 locality_domain_multiprocessor_count - Multiprocessors of a locality domain
158 logical_endpoint_supported_handle_types mask Handle types for sharing logical endpoints
159 vulkan_cig_streams_supported bool Whether CUDA in graphics with Vulkan takes streams
160 tensor_map_large_tensor_min_size_bytes bytes Minimum tensor that counts as large to a tensor map
161 gpu_direct_rdma_with_localized_memory_supported bool Whether GPUDirect RDMA works with localized memory
"""


# The names of the bits of each bit mask, from bit 0 on.
BIT_NAMES = {
    "gpu_direct_rdma_flush_writes_options": ("host call", "stream memory operation"),
    "mempool_supported_handle_types": (
        "POSIX file descriptor",
        "Win32",
        "Win32 KMT",
        "fabric",
    ),
    "mem_decompress_algorithm_mask": ("Deflate", "Snappy", "LZ4"),
    "logical_endpoint_supported_handle_types": ("fabric",),
}


@dataclass(frozen=True, slots=True)
class Attribute:
    """One CUdevice_attribute."""

    number: int
    name: str
    unit: str  # "bytes", "kHz", "bits", "bool", "mask", "hex", "word" or "" for a plain number
    description: str


def attributes() -> tuple[Attribute, ...]:
    """Return all attributes in the order of CUdevice_attribute."""
    rows = (line.split(" ", 3) for line in _TABLE.strip().splitlines())
    return tuple(
        Attribute(int(number), name, unit.replace("-", ""), description)
        for number, name, unit, description in rows
    )
