"""The telemetry of a device, and the call of NVML that each field comes from."""

from __future__ import annotations

from typing import Any

from cudakit.gpu.nvml import names
from cudakit.gpu.nvml.names import name_from
from cudakit.gpu.nvml.reader import (
    Convert,
    Readings,
    call,
    divided,
    filled,
    item,
    member,
    scaled,
    value,
)

_ALL_LINKS = 2**32 - 1  # the scope of a value for all NVLinks together

_MEMORY: Readings = {
    "memory_used_bytes": call("nvmlDeviceGetMemoryInfo", "nvmlMemory_v2", to=member("used")),
    "memory_free_bytes": call("nvmlDeviceGetMemoryInfo", "nvmlMemory_v2", to=member("free")),
    "memory_reserved_bytes": call(
        "nvmlDeviceGetMemoryInfo", "nvmlMemory_v2", to=member("reserved")
    ),
    "bar1_used_bytes": call("nvmlDeviceGetBAR1MemoryInfo", to=member("bar1Used")),
    "protected_memory_used_bytes": call(
        "nvmlDeviceGetConfComputeProtectedMemoryUsage", to=member("used")
    ),
}

_UTILIZATION: Readings = {
    "utilization_gpu_percent": call("nvmlDeviceGetUtilizationRates", to=member("gpu")),
    "utilization_memory_percent": call("nvmlDeviceGetUtilizationRates", to=member("memory")),
    "utilization_encoder_percent": call("nvmlDeviceGetEncoderUtilization", to=item(0)),
    "utilization_decoder_percent": call("nvmlDeviceGetDecoderUtilization", to=item(0)),
    "utilization_jpeg_percent": call("nvmlDeviceGetJpgUtilization", to=item(0)),
    "utilization_ofa_percent": call("nvmlDeviceGetOfaUtilization", to=item(0)),
    "encoder_sessions": call("nvmlDeviceGetEncoderStats", to=item(0)),
    "encoder_fps": call("nvmlDeviceGetEncoderStats", to=item(1)),
    "encoder_latency_us": call("nvmlDeviceGetEncoderStats", to=item(2)),
    "capture_sessions": call("nvmlDeviceGetFBCStats", to=member("sessionsCount")),
    "capture_fps": call("nvmlDeviceGetFBCStats", to=member("averageFPS")),
    "capture_latency_us": call("nvmlDeviceGetFBCStats", to=member("averageLatency")),
}

_HEAT_AND_POWER: Readings = {
    "temperature_gpu_c": call("nvmlDeviceGetTemperature", "NVML_TEMPERATURE_GPU"),
    "temperature_memory_c": value("MEMORY_TEMP"),
    "temperature_margin_c": call("nvmlDeviceGetMarginTemperature"),
    "fan_speed_percent": call("nvmlDeviceGetFanSpeed"),
    "power_draw_w": call("nvmlDeviceGetPowerUsage", to=divided(1000)),
    "power_average_w": value("POWER_AVERAGE", to=divided(1000)),
    "power_instant_w": value("POWER_INSTANT", to=divided(1000)),
    "power_limit_w": call("nvmlDeviceGetPowerManagementLimit", to=divided(1000)),
    "power_limit_enforced_w": call("nvmlDeviceGetEnforcedPowerLimit", to=divided(1000)),
    "energy_j": call("nvmlDeviceGetTotalEnergyConsumption", to=divided(1000)),
}

_CLOCKS: Readings = {
    "performance_state": call("nvmlDeviceGetPerformanceState", to=lambda state: f"P{state}"),
    "clock_graphics_mhz": call("nvmlDeviceGetClockInfo", "NVML_CLOCK_GRAPHICS"),
    "clock_sm_mhz": call("nvmlDeviceGetClockInfo", "NVML_CLOCK_SM"),
    "clock_memory_mhz": call("nvmlDeviceGetClockInfo", "NVML_CLOCK_MEM"),
    "clock_video_mhz": call("nvmlDeviceGetClockInfo", "NVML_CLOCK_VIDEO"),
    "clock_graphics_application_mhz": call("nvmlDeviceGetApplicationsClock", "NVML_CLOCK_GRAPHICS"),
    "clock_memory_application_mhz": call("nvmlDeviceGetApplicationsClock", "NVML_CLOCK_MEM"),
    "clock_event_reasons": call(
        "nvmlDeviceGetCurrentClocksEventReasons", to=names.clock_event_reasons
    ),
    "slowed_by_power_cap_ns": value("CLOCKS_EVENT_REASON_SW_POWER_CAP"),
    "slowed_by_sync_boost_ns": value("CLOCKS_EVENT_REASON_SYNC_BOOST"),
    "slowed_by_software_thermal_ns": value("CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN"),
    "slowed_by_hardware_thermal_ns": value("CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN"),
    "slowed_by_power_brake_ns": value("CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN"),
}

_TRAFFIC: Readings = {
    "pcie_generation": call("nvmlDeviceGetCurrPcieLinkGeneration"),
    "pcie_width": call("nvmlDeviceGetCurrPcieLinkWidth"),
    "pcie_speed_mbps": call("nvmlDeviceGetPcieSpeed"),
    "pcie_replays": call("nvmlDeviceGetPcieReplayCounter"),
    "pcie_replay_rollovers": value("PCIE_REPLAY_ROLLOVER_COUNTER"),
    "pcie_sent_bytes": value("PCIE_COUNT_TX_BYTES"),
    "pcie_received_bytes": value("PCIE_COUNT_RX_BYTES"),
    "nvlink_sent_bytes": value("NVLINK_THROUGHPUT_DATA_TX", scope=_ALL_LINKS, to=scaled(1024)),
    "nvlink_received_bytes": value("NVLINK_THROUGHPUT_DATA_RX", scope=_ALL_LINKS, to=scaled(1024)),
    "nvlink_replay_errors": value("NVLINK_REPLAY_ERROR_COUNT_TOTAL"),
    "nvlink_recovery_errors": value("NVLINK_RECOVERY_ERROR_COUNT_TOTAL"),
    "nvlink_crc_errors": value("NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL"),
}


def _sram(name: str, to: Convert | None = None) -> Any:
    return filled(
        "nvmlDeviceGetSramEccErrorStatus",
        "c_nvmlEccSramErrorStatus_v1_t",
        version="nvmlEccSramErrorStatus_v1",
        to=member(name, to) if to else member(name),
    )


def _dram(kind: str, counter: str) -> Any:
    return call(
        "nvmlDeviceGetMemoryErrorCounter",
        f"NVML_MEMORY_ERROR_TYPE_{kind}",
        f"NVML_{counter}_ECC",
        "NVML_MEMORY_LOCATION_DRAM",
    )


# Volatile counters begin with the driver, aggregate ones with the life of the GPU.
_ERRORS: Readings = {
    "ecc_sram_corrected_volatile": _sram("volatileCor"),
    "ecc_sram_parity_volatile": _sram("volatileUncParity"),
    "ecc_sram_uncorrected_volatile": _sram("volatileUncSecDed"),
    "ecc_sram_corrected_aggregate": _sram("aggregateCor"),
    "ecc_sram_parity_aggregate": _sram("aggregateUncParity"),
    "ecc_sram_uncorrected_aggregate": _sram("aggregateUncSecDed"),
    "ecc_sram_threshold_exceeded": _sram("bThresholdExceeded", bool),
    "ecc_dram_corrected_volatile": _dram("CORRECTED", "VOLATILE"),
    "ecc_dram_uncorrected_volatile": _dram("UNCORRECTED", "VOLATILE"),
    "ecc_dram_corrected_aggregate": _dram("CORRECTED", "AGGREGATE"),
    "ecc_dram_uncorrected_aggregate": _dram("UNCORRECTED", "AGGREGATE"),
    "recovery_action": value("GET_GPU_RECOVERY_ACTION", to=name_from(names.RECOVERY_ACTIONS)),
}

TELEMETRY: Readings = {
    **_MEMORY,
    **_UTILIZATION,
    **_HEAT_AND_POWER,
    **_CLOCKS,
    **_TRAFFIC,
    **_ERRORS,
}

# Drivers before 510 lack the second version of the call; they count reserved memory as used.
OLD_MEMORY: Readings = {
    "memory_used_bytes": call("nvmlDeviceGetMemoryInfo", to=member("used")),
    "memory_free_bytes": call("nvmlDeviceGetMemoryInfo", to=member("free")),
}
