"""The registry of fields: unit, source and meaning of everything that can be known of a device."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from cudakit.errors import UsageError
from cudakit.gpu.api.attributes import Attribute, attributes

# Only MIG instances have the fields of this group.
INSTANCE_GROUP = "MIG instance"

Kind = Literal["identity", "fact", "telemetry", "activity"]


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
class FieldsList:
    """All fields, as ``--list-fields`` gives them."""

    schema: ClassVar[str] = "cudakit.devices.list-fields/1"
    fields: tuple[FieldInfo, ...]  # in the order of a first reading


_IDENTITY = (
    ("cuda_index", "the driver", "Number that CUDA gives the device"),
    ("nvml_index", "nvmlDeviceGetIndex", "Number that NVML and nvidia-smi give the device"),
    ("uuid", "nvmlDeviceGetUUID, cuDeviceGetUuid", "UUID, the same for all who ask"),
    ("pci_bus_id", "nvmlDeviceGetPciInfo, cuDeviceGetPCIBusId", "Address on the PCI bus"),
    ("notes", "cudakit", "What is worth knowing"),
)
_OF_CUDA = (("usable_memory_bytes", "bytes", "cuDeviceTotalMem", "Memory that CUDA can give out"),)


def registry() -> Mapping[str, FieldInfo]:
    """Return all fields by name, in the order of a first reading."""
    found: dict[str, FieldInfo] = {}
    for field in (
        *(
            FieldInfo(name, "", source, text, "identity", "identity")
            for name, source, text in _IDENTITY
        ),
        *_read(FACTS, "fact"),
        *_read(TELEMETRY, "telemetry"),
        *_read(ACTIVITY, "activity"),
        *(
            FieldInfo(name, unit, source, text, "memory", "fact")
            for name, unit, source, text in _OF_CUDA
        ),
        *map(_attribute, attributes()),
    ):
        # A field that NVML and CUDA both give is listed once.
        found.setdefault(field.name, field)
    return found


def named(names: Sequence[str]) -> tuple[FieldInfo, ...]:
    """Return fields by name. Raises UsageError, with similar names, for an unknown one."""
    known = registry()
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            meant = f"did you mean {' or '.join(near)}? " if near else ""
            raise UsageError(f"no field {name!r}", hint=f"{meant}--list-fields lists them all")
    return tuple(known[name] for name in names)


def _read(table: str, kind: Kind) -> Iterator[FieldInfo]:
    group = ""
    for line in table.strip().splitlines():
        if line.startswith("["):
            group = line.strip("[]")
            continue
        name, unit, source, description = line.split(" ", 3)
        yield FieldInfo(name, unit.replace("-", ""), source, description, group, kind)


def _attribute(attribute: Attribute) -> FieldInfo:
    return FieldInfo(
        attribute.name,
        attribute.unit.replace("word", "").replace("mask", ""),
        f"cuDeviceGetAttribute({attribute.number})",
        attribute.description,
        _group(attribute),
        "fact",
    )


def _group(attribute: Attribute) -> str:
    if attribute.name.startswith("maximum_"):
        return "textures and surfaces"
    if attribute.name.startswith(("pci_", "gpu_pci_")):
        return "place"
    return "abilities" if attribute.unit == "bool" else "compute"


# --- the fields of NVML: name, unit ("-" for none), source, meaning --------------------------------


FACTS = """
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
inforom_oem_version - nvmlDeviceGetInforomVersion Version of the infoROM's OEM object
inforom_ecc_version - nvmlDeviceGetInforomVersion Version of the infoROM's ECC object
inforom_power_version - nvmlDeviceGetInforomVersion Version of the infoROM's power object
gsp_firmware_version - nvmlDeviceGetGspFirmwareVersion Version of the GSP firmware
gsp_firmware bool nvmlDeviceGetGspFirmwareMode Whether the GSP firmware runs the GPU
gpm bool nvmlGpmQueryDeviceSupport Whether the GPU counts activity (GPM)
[place]
pci_device_id hex nvmlDeviceGetPciInfo PCI device and vendor id
pci_subsystem_id hex nvmlDeviceGetPciInfo PCI subsystem id
bus - nvmlDeviceGetBusType Kind of bus
interrupt - nvmlDeviceGetIrqNum Number of the interrupt
numa_node - nvmlDeviceGetNumaNodeId NUMA node of the GPU's memory
cpu_affinity - nvmlDeviceGetCpuAffinity CPUs near the GPU
addressing_mode - nvmlDeviceGetAddressingMode How the GPU reads pageable memory: HMM, ATS or not
power_source - nvmlDeviceGetPowerSource Where the power comes from
[links]
pcie_generation_max - nvmlDeviceGetMaxPcieLinkGeneration Highest PCIe generation of GPU and slot
pcie_generation_device_max - nvmlDeviceGetGpuMaxPcieLinkGeneration Highest PCIe generation of the GPU
pcie_width_max - nvmlDeviceGetMaxPcieLinkWidth Most PCIe lanes of GPU and slot
nvlink_count - NVML_FI_DEV_NVLINK_LINK_COUNT NVLinks of the GPU
nvlink_version - nvmlDeviceGetNvLinkVersion Version of NVLink
nvlink_speed_mbps MB/s NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON Speed of one NVLink
c2c_mode bool nvmlDeviceGetC2cModeInfoV Whether NVLink-C2C to the CPU is on
c2c_links - NVML_FI_DEV_C2C_LINK_COUNT NVLink-C2C links
fabric_state - nvmlDeviceGetGpuFabricInfoV How far the NVLink fabric is set up
fabric_status - nvmlDeviceGetGpuFabricInfoV Result of setting it up; 0 is success
fabric_clique_id - nvmlDeviceGetGpuFabricInfoV Clique in the fabric
fabric_cluster_uuid - nvmlDeviceGetGpuFabricInfoV Cluster of the fabric
fabric_health_mask hex nvmlDeviceGetGpuFabricInfoV Health of the fabric
[modes]
persistence_mode bool nvmlDeviceGetPersistenceMode Whether the driver stays loaded without a process
compute_mode - nvmlDeviceGetComputeMode Who may create contexts
display_attached bool nvmlDeviceGetDisplayMode Whether a display is attached
display_active bool nvmlDeviceGetDisplayActive Whether a display uses memory
accounting_mode bool nvmlDeviceGetAccountingMode Whether the driver keeps account of processes
accounting_buffer_size - nvmlDeviceGetAccountingBufferSize Processes that it keeps account of
virtualization_mode - nvmlDeviceGetVirtualizationMode How the GPU is virtualized
host_vgpu_mode - nvmlDeviceGetHostVgpuMode Kind of vGPU of the host
operation_mode - nvmlDeviceGetGpuOperationMode What the GPU is set to do well
mig_mode bool nvmlDeviceGetMigMode Whether the GPU is divided into MIG instances
mig_mode_pending bool nvmlDeviceGetMigMode Whether it will be after the next reset
mig_instances_max - nvmlDeviceGetMaxMigDeviceCount Most MIG instances
ecc_mode bool nvmlDeviceGetEccMode Whether ECC is on
ecc_mode_pending bool nvmlDeviceGetEccMode Whether ECC is on after the next reset
ecc_mode_default bool nvmlDeviceGetDefaultEccMode Whether ECC is on by default
dram_encryption bool nvmlDeviceGetDramEncryptionMode Whether memory is encrypted
[MIG instance]
gpu_instance_id - nvmlDeviceGetGpuInstanceId Number of the GPU instance
compute_instance_id - nvmlDeviceGetComputeInstanceId Number of the compute instance
instance_multiprocessors - nvmlDeviceGetAttributes Multiprocessors (SMs)
instance_memory_bytes bytes nvmlDeviceGetAttributes Memory
instance_copy_engines - nvmlDeviceGetAttributes Copy engines
[memory]
memory_total_bytes bytes nvmlDeviceGetMemoryInfo Memory of the GPU
memory_bus_width_bits bits nvmlDeviceGetMemoryBusWidth Width of the memory bus
bar1_total_bytes bytes nvmlDeviceGetBAR1MemoryInfo Window through which the host reaches memory (BAR1)
protected_memory_total_bytes bytes nvmlDeviceGetConfComputeProtectedMemoryUsage Confidential memory
[clocks]
clock_graphics_max_mhz MHz nvmlDeviceGetMaxClockInfo Highest graphics clock
clock_sm_max_mhz MHz nvmlDeviceGetMaxClockInfo Highest clock of the SMs
clock_memory_max_mhz MHz nvmlDeviceGetMaxClockInfo Highest memory clock
clock_video_max_mhz MHz nvmlDeviceGetMaxClockInfo Highest video clock
clock_customer_boost_max_mhz MHz nvmlDeviceGetMaxCustomerBoostClock Highest boost clock that may be set
clock_graphics_default_mhz MHz nvmlDeviceGetDefaultApplicationsClock Default graphics clock of applications
clock_memory_default_mhz MHz nvmlDeviceGetDefaultApplicationsClock Default memory clock of applications
clocks_memory_supported_mhz MHz nvmlDeviceGetSupportedMemoryClocks Memory clocks that can be set
clock_event_reasons_supported - nvmlDeviceGetSupportedClocksEventReasons Reasons that it can report
[power and temperature]
power_management bool nvmlDeviceGetPowerManagementMode Whether the power limit works
power_limit_min_w W nvmlDeviceGetPowerManagementLimitConstraints Lowest power limit that can be set
power_limit_max_w W nvmlDeviceGetPowerManagementLimitConstraints Highest power limit that can be set
power_limit_default_w W nvmlDeviceGetPowerManagementDefaultLimit Default power limit
temperature_shutdown_c °C nvmlDeviceGetTemperatureThreshold GPU temperature at which it shuts down
temperature_slowdown_c °C nvmlDeviceGetTemperatureThreshold GPU temperature at which the hardware slows down
temperature_gpu_max_c °C nvmlDeviceGetTemperatureThreshold GPU temperature at which software slows it down
temperature_memory_max_c °C nvmlDeviceGetTemperatureThreshold Memory temperature at which it slows down
temperature_shutdown_margin_c °C NVML_FI_DEV_TEMPERATURE_SHUTDOWN_TLIMIT Margin at which it shuts down
temperature_slowdown_margin_c °C NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT Margin at which it slows down
temperature_gpu_max_margin_c °C NVML_FI_DEV_TEMPERATURE_GPU_MAX_TLIMIT Margin at which software slows it down
temperature_memory_max_margin_c °C NVML_FI_DEV_TEMPERATURE_MEM_MAX_TLIMIT Margin of the memory
fans - nvmlDeviceGetNumFans Fans
[video]
encoder_capacity_h264_percent % nvmlDeviceGetEncoderCapacity Share of the encoder that is free for H.264
encoder_capacity_hevc_percent % nvmlDeviceGetEncoderCapacity Share of the encoder that is free for HEVC
encoder_capacity_av1_percent % nvmlDeviceGetEncoderCapacity Share of the encoder that is free for AV1
[errors and wear]
remapped_rows_correctable - nvmlDeviceGetRemappedRows Memory rows replaced after correctable errors
remapped_rows_uncorrectable - nvmlDeviceGetRemappedRows Memory rows replaced after uncorrectable errors
remapped_rows_pending bool nvmlDeviceGetRemappedRows Whether rows wait for a reset to be replaced
remapped_rows_failed bool nvmlDeviceGetRemappedRows Whether a row could not be replaced
remap_banks_max - nvmlDeviceGetRowRemapperHistogram Memory banks with all spare rows left
remap_banks_high - nvmlDeviceGetRowRemapperHistogram Memory banks with most spare rows left
remap_banks_partial - nvmlDeviceGetRowRemapperHistogram Memory banks with some spare rows left
remap_banks_low - nvmlDeviceGetRowRemapperHistogram Memory banks with few spare rows left
remap_banks_none - nvmlDeviceGetRowRemapperHistogram Memory banks with no spare row left
retired_pages_single_bit - NVML_FI_DEV_RETIRED_SBE Pages retired after single-bit errors (before Ampere)
retired_pages_double_bit - NVML_FI_DEV_RETIRED_DBE Pages retired after double-bit errors
retired_pages_pending bool NVML_FI_DEV_RETIRED_PENDING Whether pages wait for a reset to be retired
repair_channel_pending bool nvmlDeviceGetRepairStatus Whether a memory channel waits for its repair
repair_tpc_pending bool nvmlDeviceGetRepairStatus Whether a TPC waits for its repair
unrepairable_memory bool nvmlDeviceGetUnrepairableMemoryFlag_v1 Whether memory is broken beyond repair
"""

TELEMETRY = """
[memory]
memory_used_bytes bytes nvmlDeviceGetMemoryInfo Memory in use
memory_free_bytes bytes nvmlDeviceGetMemoryInfo Memory that is free
memory_reserved_bytes bytes nvmlDeviceGetMemoryInfo Memory that driver and firmware keep
bar1_used_bytes bytes nvmlDeviceGetBAR1MemoryInfo Part of BAR1 in use
protected_memory_used_bytes bytes nvmlDeviceGetConfComputeProtectedMemoryUsage Confidential memory in use
[utilization]
utilization_gpu_percent % nvmlDeviceGetUtilizationRates Share of time in which any kernel ran (coarse)
utilization_memory_percent % nvmlDeviceGetUtilizationRates Share of time in which memory was accessed
utilization_encoder_percent % nvmlDeviceGetEncoderUtilization Use of the video encoders
utilization_decoder_percent % nvmlDeviceGetDecoderUtilization Use of the video decoders
utilization_jpeg_percent % nvmlDeviceGetJpgUtilization Use of the JPEG decoders
utilization_ofa_percent % nvmlDeviceGetOfaUtilization Use of the optical flow accelerator
[video]
encoder_sessions - nvmlDeviceGetEncoderStats Encoder sessions
encoder_fps - nvmlDeviceGetEncoderStats Frames a second of the encoder sessions
encoder_latency_us us nvmlDeviceGetEncoderStats Latency of encoding
capture_sessions - nvmlDeviceGetFBCStats Frame capture sessions
capture_fps - nvmlDeviceGetFBCStats Frames a second of the capture sessions
capture_latency_us us nvmlDeviceGetFBCStats Latency of capturing
[power and temperature]
temperature_gpu_c °C nvmlDeviceGetTemperature Temperature of the GPU
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
clock_graphics_mhz MHz nvmlDeviceGetClockInfo Graphics clock
clock_sm_mhz MHz nvmlDeviceGetClockInfo Clock of the SMs
clock_memory_mhz MHz nvmlDeviceGetClockInfo Memory clock
clock_video_mhz MHz nvmlDeviceGetClockInfo Video clock
clock_graphics_application_mhz MHz nvmlDeviceGetApplicationsClock Graphics clock that applications get
clock_memory_application_mhz MHz nvmlDeviceGetApplicationsClock Memory clock that applications get
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
nvlink_sent_bytes bytes NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX Bytes sent over all NVLinks
nvlink_received_bytes bytes NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX Bytes received over all NVLinks
nvlink_replay_errors - NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL NVLink replays
nvlink_recovery_errors - NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL NVLink recoveries
nvlink_crc_errors - NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL NVLink checksum errors
[errors and wear]
ecc_sram_corrected_volatile - nvmlDeviceGetSramEccErrorStatus Corrected SRAM errors since driver load
ecc_sram_parity_volatile - nvmlDeviceGetSramEccErrorStatus Uncorrectable SRAM parity errors since driver load
ecc_sram_uncorrected_volatile - nvmlDeviceGetSramEccErrorStatus Uncorrectable SRAM errors since driver load
ecc_sram_corrected_aggregate - nvmlDeviceGetSramEccErrorStatus Corrected SRAM errors in the GPU's life
ecc_sram_parity_aggregate - nvmlDeviceGetSramEccErrorStatus Uncorrectable SRAM parity errors in the GPU's life
ecc_sram_uncorrected_aggregate - nvmlDeviceGetSramEccErrorStatus Uncorrectable SRAM errors in the GPU's life
ecc_sram_threshold_exceeded bool nvmlDeviceGetSramEccErrorStatus Whether SRAM errors are too many
ecc_dram_corrected_volatile - nvmlDeviceGetMemoryErrorCounter Corrected memory errors since driver load
ecc_dram_uncorrected_volatile - nvmlDeviceGetMemoryErrorCounter Uncorrectable memory errors since driver load
ecc_dram_corrected_aggregate - nvmlDeviceGetMemoryErrorCounter Corrected memory errors in the GPU's life
ecc_dram_uncorrected_aggregate - nvmlDeviceGetMemoryErrorCounter Uncorrectable memory errors in the GPU's life
recovery_action - NVML_FI_DEV_GET_GPU_RECOVERY_ACTION What the driver asks for to make the GPU well
"""

# Measured between two reads: shown by --watch.
ACTIVITY = """
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
