"""The activity of a GPU between two samples of its counters: NVML's GPM, on Hopper and newer.

The ``utilization`` of older GPUs is only the share of time in which any kernel ran; these are the shares
of the hardware in use. GPM shares counters with other monitors (DCGM): it is read only while shown.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from cudakit.gpu.api.facts import Field, Telemetry
from cudakit.gpu.nvml.reader import Reader
from cudakit.units import Unavailable

_MIB = 2**20
_FIRST = Unavailable("it takes two samples")

# Field: name of the metric (nvml.h: nvmlGpmMetricId_t), and the factor from NVML's unit to the field's.
METRICS: Mapping[str, tuple[str, int]] = {
    "graphics_activity_percent": ("GRAPHICS_UTIL", 1),
    "sm_activity_percent": ("SM_UTIL", 1),
    "sm_occupancy_percent": ("SM_OCCUPANCY", 1),
    "tensor_activity_percent": ("ANY_TENSOR_UTIL", 1),
    "tensor_fp64_activity_percent": ("DFMA_TENSOR_UTIL", 1),
    "tensor_half_activity_percent": ("HMMA_TENSOR_UTIL", 1),
    "tensor_integer_activity_percent": ("IMMA_TENSOR_UTIL", 1),
    "integer_activity_percent": ("INTEGER_UTIL", 1),
    "fp64_activity_percent": ("FP64_UTIL", 1),
    "fp32_activity_percent": ("FP32_UTIL", 1),
    "fp16_activity_percent": ("FP16_UTIL", 1),
    "dram_bandwidth_percent": ("DRAM_BW_UTIL", 1),
    "pcie_sent_bytes_per_s": ("PCIE_TX_PER_SEC", _MIB),
    "pcie_received_bytes_per_s": ("PCIE_RX_PER_SEC", _MIB),
    "nvlink_sent_bytes_per_s": ("NVLINK_TOTAL_TX_PER_SEC", _MIB),
    "nvlink_received_bytes_per_s": ("NVLINK_TOTAL_RX_PER_SEC", _MIB),
}


@dataclass(slots=True)
class Activity:
    """The last sample of one device; ``instance`` is the GPU instance of a MIG device."""

    handle: Any  # of the GPU, also for an instance of it
    instance: int | None = None
    sample: Any = None

    def since_last(self, reader: Reader, names: Collection[str] = ()) -> Telemetry | Unavailable:
        """Take a sample, and return the metrics since the last one, or ``names`` of them."""
        wanted = {name: METRICS[name] for name in METRICS if not names or name in names}
        support = reader.attempt(lambda: reader.lib.nvmlGpmQueryDeviceSupport(self.handle))
        if isinstance(support, Unavailable):
            return support
        if not support.isSupportedDevice:
            return Unavailable("the GPU does not count it (NVML GPM: Hopper and newer)")
        before, now = self.sample, self._take(reader)
        if isinstance(now, Unavailable):
            return now
        self.sample = now
        if before is None:
            return Telemetry(time.time_ns(), dict.fromkeys(wanted, _FIRST))
        fields = reader.attempt(lambda: _metrics(reader, wanted, before, now))
        reader.attempt(lambda: reader.lib.nvmlGpmSampleFree(before))
        return fields if isinstance(fields, Unavailable) else Telemetry(time.time_ns(), fields)

    def _take(self, reader: Reader) -> Any:
        sample = reader.attempt(reader.lib.nvmlGpmSampleAlloc)
        if isinstance(sample, Unavailable):
            return sample
        if self.instance is None:
            return reader.attempt(lambda: reader.lib.nvmlGpmSampleGet(self.handle, sample))
        return reader.attempt(
            lambda: reader.lib.nvmlGpmMigSampleGet(self.handle, self.instance, sample)
        )


def _metrics(
    reader: Reader, wanted: Mapping[str, tuple[str, int]], before: Any, now: Any
) -> dict[str, Field]:
    lib = reader.lib
    request = lib.c_nvmlGpmMetricsGet_t()
    request.version = lib.NVML_GPM_METRICS_GET_VERSION
    request.numMetrics = len(wanted)
    request.sample1, request.sample2 = before, now
    for index, (metric, _) in enumerate(wanted.values()):
        request.metrics[index].metricId = getattr(lib, f"NVML_GPM_METRIC_{metric}")
    lib.nvmlGpmMetricsGet(request)
    return {
        name: _metric(reader, request.metrics[index], factor)
        for index, (name, (_, factor)) in enumerate(wanted.items())
    }


def _metric(reader: Reader, metric: Any, factor: int) -> Field:
    if metric.nvmlReturn:
        return reader.reason(metric.nvmlReturn)
    return float(metric.value) * factor
