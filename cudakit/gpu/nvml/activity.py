"""The activity of a GPU between two samples of its counters: NVML's GPM, on Hopper and newer GPUs.

Activity is the share of the hardware that is in use; ``utilization`` is only the share of time in which at
least one kernel ran. GPM uses the same counters as DCGM, so it is sampled only while activity is shown.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from cudakit.gpu.api.facts import Field, Telemetry
from cudakit.gpu.api.fields import FieldInfo, nvml_fields
from cudakit.gpu.nvml.reader import Reader
from cudakit.units import Unavailable

_MIB = 2**20
_FIRST_SAMPLE = Unavailable("needs a second sample")

# The activity fields by name. NVML returns rates in MiB per second.
METRICS = {field.info.name: field.info for field in nvml_fields() if field.info.kind == "activity"}


@dataclass(slots=True)
class Activity:
    """The previous GPM sample of one device; ``instance`` is the id of a MIG device's GPU instance."""

    handle: Any  # handle of the GPU, also for a MIG instance
    instance: int | None = None
    sample: Any = None

    def since_last(self, reader: Reader, names: Collection[str] = ()) -> Telemetry | Unavailable:
        """Take a sample, and return the metrics since the previous sample; ``names`` selects some of them."""
        selected_fields = [field for name, field in METRICS.items() if not names or name in names]
        support = reader.attempt(lambda: reader.lib.nvmlGpmQueryDeviceSupport(self.handle))
        if isinstance(support, Unavailable):
            return support
        if not support.isSupportedDevice:
            return Unavailable("the GPU does not measure it (NVML GPM needs Hopper or newer)")
        previous_sample, current_sample = self.sample, self._take_sample(reader)
        if isinstance(current_sample, Unavailable):
            return current_sample
        self.sample = current_sample
        if previous_sample is None:
            return Telemetry(
                time.time_ns(), {field.name: _FIRST_SAMPLE for field in selected_fields}
            )
        fields = reader.attempt(
            lambda: _metrics(reader, selected_fields, previous_sample, current_sample)
        )
        reader.attempt(lambda: reader.lib.nvmlGpmSampleFree(previous_sample))
        return fields if isinstance(fields, Unavailable) else Telemetry(time.time_ns(), fields)

    def _take_sample(self, reader: Reader) -> Any:
        sample = reader.attempt(reader.lib.nvmlGpmSampleAlloc)
        if isinstance(sample, Unavailable):
            return sample
        if self.instance is None:
            return reader.attempt(lambda: reader.lib.nvmlGpmSampleGet(self.handle, sample))
        return reader.attempt(
            lambda: reader.lib.nvmlGpmMigSampleGet(self.handle, self.instance, sample)
        )


def _metrics(
    reader: Reader,
    selected_fields: Collection[FieldInfo],
    previous_sample: Any,
    current_sample: Any,
) -> dict[str, Field]:
    lib = reader.lib
    request = lib.c_nvmlGpmMetricsGet_t()
    request.version = lib.NVML_GPM_METRICS_GET_VERSION
    request.numMetrics = len(selected_fields)
    request.sample1, request.sample2 = previous_sample, current_sample
    for metric, field in zip(request.metrics, selected_fields, strict=False):
        metric.metricId = getattr(lib, field.source)
    lib.nvmlGpmMetricsGet(request)
    return {
        field.name: _metric(reader, metric, _MIB if field.unit == "B/s" else 1)
        for metric, field in zip(request.metrics, selected_fields, strict=False)
    }


def _metric(reader: Reader, metric: Any, factor: int) -> Field:
    if metric.nvmlReturn:
        return reader.reason(metric.nvmlReturn)
    return float(metric.value) * factor
