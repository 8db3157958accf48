"""The roofline: the lower bound of a time, from the arithmetic, memory and links of a device.

Rates are operations per SM and clock; a fused multiply-add counts as two. Rates of matrix units are of dense
operands with fp32 accumulation (int32 for int8). Rates of scalar fp32 and fp64 are those of the CUDA C++
Programming Guide, "Arithmetic Instructions". Other rates are stated in the white paper, or are the dense rate
of the named datasheet divided by its number of SMs and its boost clock.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal, TypeAlias

from cudakit.gpu.api.facts import Field
from cudakit.units import Unavailable

Fields: TypeAlias = Mapping[str, Field]

_KINDS_AT_MAX_CLOCK = ("fp32", "fp64", "fp64_tensor")


@cache
def _table(name: str) -> Mapping[str, Any]:
    """Return a table of ``rates.toml``."""
    text = files("cudakit.bench").joinpath("rates.toml").read_text("utf-8")
    table: Mapping[str, Any] = tomllib.loads(text)[name]
    return table


@dataclass(frozen=True, slots=True)
class Work:
    """The minimum work of one execution: operations, bytes of memory, and bytes over a link."""

    operations: float = 0.0  # Number of operations; a multiply-add counts as two.
    kind: str = ""  # Kind of the operations: "bf16", "fp64_tensor" (see ``rate_per_clock``).
    bytes_moved: float = 0.0  # Bytes read and written in device memory.
    link_bytes: float = 0.0  # Bytes over a link, in the direction with more bytes.
    link: Literal["host", "peer"] = "host"


@dataclass(frozen=True, slots=True)
class Limit:
    """The lower bound of the time of one execution, and its terms."""

    bound: Literal["arithmetic", "memory", "link"]  # The term that takes longest.
    datasheet_s: float  # Lower bound with the SMs at the datasheet's clock.
    datasheet_clock_hz: float | Unavailable  # SM clock of the datasheet.
    measured_s: float | Unavailable  # Lower bound with the SMs at the measured clock.
    measured_clock_hz: float | Unavailable  # Median SM clock of the samples.
    operations_per_s: float | Unavailable  # Arithmetic peak at the datasheet's clock.
    bytes_per_s: float | Unavailable  # Peak bandwidth of the device memory.
    link_bytes_per_s: float | Unavailable  # Peak bandwidth of the link in one direction.

    @property
    def seconds(self) -> float:
        """The lower bound at the measured SM clock or, if that clock is unknown, at the datasheet's clock."""
        return self.datasheet_s if isinstance(self.measured_s, Unavailable) else self.measured_s


def limit(
    work: Work, fields: Fields, measured_clock_hz: float | Unavailable
) -> Limit | Unavailable:
    """Return the roofline: max(operations / peak, bytes / memory bandwidth, link bytes / link bandwidth).

    ``fields`` are facts of CUDA and NVML. Unavailable if a term needs a fact that is unknown for the device.
    """
    if not any((work.operations, work.bytes_moved, work.link_bytes)):
        return Unavailable("a latency has no theoretical peak")
    clock = datasheet_clock(work.kind, fields)
    peak_rate = peak_operations(work.kind, fields, clock)
    memory_rate = memory_bandwidth(fields)
    link_rate = link_bandwidth(fields) if work.link == "host" else peer_bandwidth(fields)
    # The memory of a GPU is faster than its links.
    is_memory_fast = (
        work.link_bytes and isinstance(memory_rate, Unavailable) and not fields.get("integrated")
    )
    terms_s: list[float] = []
    for amount, rate in (
        (work.operations, peak_rate),
        (0.0 if is_memory_fast else work.bytes_moved, memory_rate),
        (work.link_bytes, link_rate),
    ):
        if amount and isinstance(rate, Unavailable):
            return rate
        terms_s.append(0.0 if isinstance(rate, Unavailable) else amount / rate)
    arithmetic_s, memory_s, link_s = terms_s
    longest_s = max(terms_s)
    # Only the arithmetic term depends on the SM clock.
    measured_s = measured_clock_hz
    if not isinstance(measured_clock_hz, Unavailable):
        measured_s = max(memory_s, link_s)
        if arithmetic_s and not isinstance(clock, Unavailable):
            measured_s = max(arithmetic_s * clock / measured_clock_hz, measured_s)
    return Limit(
        bound="arithmetic"
        if arithmetic_s == longest_s
        else "memory"
        if memory_s == longest_s
        else "link",
        datasheet_s=longest_s,
        datasheet_clock_hz=clock,
        measured_s=measured_s,
        measured_clock_hz=measured_clock_hz,
        operations_per_s=peak_rate,
        bytes_per_s=memory_rate,
        link_bytes_per_s=link_rate,
    )


def datasheet_clock(kind: str, fields: Fields) -> float | Unavailable:
    """Return the SM clock in Hz at which the datasheet states the peak for a kind of arithmetic.

    It is the maximum clock, except for some products.
    """
    matrix_clock: float | None = _table("matrix_clocks").get(str(fields.get("name")))
    if matrix_clock is not None and kind and kind not in _KINDS_AT_MAX_CLOCK:
        return matrix_clock
    return _product(_positive_field(fields, "clock_rate_khz", "the maximum SM clock"), 1e3)


def peak_operations(
    kind: str, fields: Fields, clock_hz: float | Unavailable
) -> float | Unavailable:
    """Return the peak operations per second of a kind: SMs x clock x operations per SM and clock."""
    if not kind:
        return Unavailable("the case has no arithmetic")
    multiprocessors = _positive_field(fields, "multiprocessor_count", "the number of SMs")
    return _product(rate_per_clock(kind, fields), multiprocessors, clock_hz)


def memory_bandwidth(fields: Fields) -> float | Unavailable:
    """Return the bytes per second of device memory: bus width x clock x two transfers per clock."""
    if fields.get("integrated") is True:
        return Unavailable("the driver does not report the memory clock of an integrated GPU")
    width_bits = _positive_field(fields, "global_memory_bus_width_bits", "the memory bus width")
    clock_khz = _positive_field(fields, "memory_clock_rate_khz", "the memory clock")
    return _product(width_bits, clock_khz, 1e3 / 4)


def link_bandwidth(fields: Fields) -> float | Unavailable:
    """Return the bytes per second of PCIe in one direction, including packet framing."""
    generation = _positive_field(fields, "pcie_generation_max", "the PCIe generation")
    width = _positive_field(fields, "pcie_width_max", "the number of PCIe lanes")
    if isinstance(generation, Unavailable):
        return generation
    lane = _table("pcie_lanes").get(str(generation))
    if isinstance(width, int) and not lane:
        return Unavailable(f"the rate is unknown for PCIe {generation}.0")
    transfers_per_s, data_bits, bits = lane or (0.0, 0, 1)
    return _product(transfers_per_s * (data_bits / bits), width, 1 / 8)


def peer_bandwidth(fields: Fields) -> float | Unavailable:
    """Return the bytes per second to other devices in one direction, over all NVLinks or else over PCIe.

    This is an upper bound, because two devices may be connected by some of the NVLinks only.
    """
    link_count = fields.get("nvlink_count", Unavailable("NVML did not report it"))
    if isinstance(link_count, Unavailable):
        return Unavailable(f"the number of NVLinks, if any, is unknown: {link_count.reason}")
    if not isinstance(link_count, int) or link_count == 0:
        return link_bandwidth(fields)
    version = str(fields.get("nvlink_version"))
    if version not in (rates := _table("nvlink_rates")):
        return Unavailable(f"the rate is unknown for NVLink {version}")
    return link_count * float(rates[version])


def rate_per_clock(kind: str, fields: Fields) -> int | Unavailable:
    """Return the operations per SM and clock of a kind.

    Kinds are fp64, fp64_tensor, fp32, tf32, fp16, bf16, fp8 and int8. Unavailable if the device is not in the
    table, or does not support the kind.
    """
    capability = str(fields.get("compute_capability"))
    rates: Mapping[str, int] | None = _table("rates").get(capability)
    if rates is None:
        return Unavailable(f"the peak is unknown for compute capability {capability}")
    if kind not in rates:
        return Unavailable(f"the peak of {kind} is unknown for compute capability {capability}")
    is_geforce = "GeForce" in str(fields.get("name"))
    halved = _table("halved_on_geforce")
    is_halved = is_geforce and kind in halved["kinds"] and capability in halved["capabilities"]
    return rates[kind] // 2 if is_halved else rates[kind]


def matrix_kind(dtype: str, fields: Fields) -> str:
    """Return the fastest kind of operation for a GEMM of a data type, such as "fp8" for "fp8_e4m3".

    The kind of fp64 is fp64_tensor on devices with tensor cores for fp64.
    """
    kind = dtype.split("_")[0]
    rates = _table("rates").get(str(fields.get("compute_capability")), {})
    return "fp64_tensor" if kind == "fp64" and "fp64_tensor" in rates else kind


def _positive_field(fields: Fields, name: str, description: str) -> int | Unavailable:
    """Return a fact that is a positive integer; drivers report 0 for unknown values."""
    value = fields.get(name)
    if isinstance(value, Unavailable):
        return Unavailable(f"{description} is unknown: {value.reason}")
    return (
        value if isinstance(value, int) and value > 0 else Unavailable(f"{description} is unknown")
    )


def _product(*factors: float | Unavailable) -> float | Unavailable:
    """Return the product of the factors, or the first of them that is Unavailable."""
    product = 1.0
    for factor in factors:
        if isinstance(factor, Unavailable):
            return factor
        product *= factor
    return product
