"""The roofline: the lower bound of a time, from the arithmetic, memory and links of a device.

Rates are operations per SM and clock; a fused multiply-add counts as two. Rates of matrix units are of dense
operands with fp32 accumulation (int32 for int8). Rates of scalar fp32 and fp64 are those of the CUDA C++
Programming Guide, "Arithmetic Instructions". Other rates are stated in the white paper, or are the dense rate
of the named datasheet divided by its number of SMs and its boost clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias

from cudakit.gpu.api.facts import Field
from cudakit.units import Unavailable

Fields: TypeAlias = Mapping[str, Field]

# GeForce products accumulate fp16, bf16, tf32 and fp8 in fp32 at half the rate of their chip (tables of peak
# rates in the NVIDIA Turing, GA102 and Ada white papers).
_HALVED_KINDS = frozenset({"fp16", "bf16", "tf32", "fp8"})
_HALVING_CAPABILITIES = frozenset({"7.5", "8.6", "8.9"})

# Operations per SM and clock, by compute capability and kind.
_RATES: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        # Turing white paper: 512 fp16 multiply-adds per clock; T4 datasheet: 130 TOP/s int8.
        "7.5": {"fp64": 4, "fp32": 128, "fp16": 1024, "int8": 2048},
        # A100 white paper: 1024 fp16 multiply-adds per clock, 64 of fp64 in tensor cores.
        "8.0": {
            "fp64": 64,
            "fp64_tensor": 128,
            "fp32": 128,
            "tf32": 1024,
            "fp16": 2048,
            "bf16": 2048,
            "int8": 4096,
        },
        # GA102 white paper: RTX A6000, 154.8 TFLOP/s fp16, 77.4 tf32, 309.7 TOP/s int8.
        "8.6": {"fp64": 4, "fp32": 256, "tf32": 512, "fp16": 1024, "bf16": 1024, "int8": 2048},
        # L40S datasheet: 362 TFLOP/s fp16, 183 tf32, 733 fp8, 733 TOP/s int8, without sparsity.
        "8.9": {
            "fp64": 4,
            "fp32": 256,
            "tf32": 512,
            "fp16": 1024,
            "bf16": 1024,
            "fp8": 2048,
            "int8": 2048,
        },
        # H100 white paper and datasheet of the H200: 989.4 TFLOP/s bf16 with 132 SMs at 1830 MHz.
        "9.0": {
            "fp64": 128,
            "fp64_tensor": 256,
            "fp32": 256,
            "tf32": 2048,
            "fp16": 4096,
            "bf16": 4096,
            "fp8": 8192,
            "int8": 8192,
        },
        # HGX B200 datasheet, for one of the eight GPUs: 2.25 PFLOP/s bf16 dense, 37 TFLOP/s fp64, 148 SMs.
        "10.0": {
            "fp64": 128,
            "fp64_tensor": 128,
            "fp32": 256,
            "tf32": 4096,
            "fp16": 8192,
            "bf16": 8192,
            "fp8": 16384,
            "int8": 16384,
        },
    }
)

# Products whose datasheet states matrix rates at a lower clock than the maximum, in Hz: the dense bf16 rate
# divided by the SMs and 4096 operations per clock (H100 and H200 SXM: 989.4 TFLOP/s, 132 SMs).
_MATRIX_CLOCKS = MappingProxyType({"NVIDIA H200": 1.83e9, "NVIDIA H100 80GB HBM3": 1.83e9})

_KINDS_AT_MAX_CLOCK = ("fp32", "fp64", "fp64_tensor")

# Transfers per second of a lane, and the share of bits that are data (PCI Express Base Specification 1 to 6).
_PCIE_LANES = MappingProxyType(
    {
        1: (2.5e9, 8 / 10),
        2: (5e9, 8 / 10),
        3: (8e9, 128 / 130),
        4: (16e9, 128 / 130),
        5: (32e9, 128 / 130),
        6: (64e9, 236 / 256),
    }
)
# Bytes per second of one link in one direction by NVML's version: the rates in the datasheets of P100, V100,
# A100, H100 and B200 divided by their 4, 6, 12, 18 and 18 links and two directions.
_NVLINK_RATES = MappingProxyType(
    {"1.0": 20e9, "2.0": 25e9, "2.2": 25e9, "3.0": 25e9, "3.1": 25e9, "4.0": 25e9, "5.0": 50e9}
)


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
    clock = datasheet_clock(work.kind, fields)
    peak_rate = peak_operations(work.kind, fields, clock)
    memory_rate = memory_bandwidth(fields)
    link_rate = link_bandwidth(fields) if work.link == "host" else peer_bandwidth(fields)
    terms = {
        "arithmetic": _time(work.operations, peak_rate),
        "memory": _time(work.bytes_moved, memory_rate),
        "link": _time(work.link_bytes, link_rate),
    }
    # The memory of a GPU is faster than its links.
    if (
        work.link_bytes
        and isinstance(terms["memory"], Unavailable)
        and not fields.get("integrated")
    ):
        terms["memory"] = 0.0
    if not any((work.operations, work.bytes_moved, work.link_bytes)):
        return Unavailable("a latency has no theoretical peak")
    terms_s: dict[str, float] = {}
    for name, seconds in terms.items():
        if isinstance(seconds, Unavailable):
            return seconds
        terms_s[name] = seconds
    return Limit(
        bound=_longest_term(terms_s),
        datasheet_s=max(terms_s.values()),
        datasheet_clock_hz=clock,
        measured_s=_bound_at_clock(terms_s, clock, measured_clock_hz),
        measured_clock_hz=measured_clock_hz,
        operations_per_s=peak_rate,
        bytes_per_s=memory_rate,
        link_bytes_per_s=link_rate,
    )


def datasheet_clock(kind: str, fields: Fields) -> float | Unavailable:
    """Return the SM clock in Hz at which the datasheet states the peak for a kind of arithmetic.

    It is the maximum clock, except for some products.
    """
    matrix_clock = _MATRIX_CLOCKS.get(str(fields.get("name")))
    if matrix_clock is not None and kind and kind not in _KINDS_AT_MAX_CLOCK:
        return matrix_clock
    max_khz = _positive_field(fields, "clock_rate_khz", "the maximum SM clock")
    return max_khz if isinstance(max_khz, Unavailable) else max_khz * 1e3


def peak_operations(
    kind: str, fields: Fields, clock_hz: float | Unavailable
) -> float | Unavailable:
    """Return the peak operations per second of a kind: SMs x clock x operations per SM and clock."""
    if not kind:
        return Unavailable("the case has no arithmetic")
    rate = rate_per_clock(kind, fields)
    multiprocessors = _positive_field(fields, "multiprocessor_count", "the number of SMs")
    if isinstance(rate, Unavailable):
        return rate
    if isinstance(multiprocessors, Unavailable):
        return multiprocessors
    return clock_hz if isinstance(clock_hz, Unavailable) else multiprocessors * rate * clock_hz


def memory_bandwidth(fields: Fields) -> float | Unavailable:
    """Return the bytes per second of device memory: bus width x clock x two transfers per clock."""
    if fields.get("integrated") is True:
        return Unavailable("the driver does not report the memory clock of an integrated GPU")
    width_bits = _positive_field(fields, "global_memory_bus_width_bits", "the memory bus width")
    if isinstance(width_bits, Unavailable):
        return width_bits
    clock_khz = _positive_field(fields, "memory_clock_rate_khz", "the memory clock")
    return clock_khz if isinstance(clock_khz, Unavailable) else clock_khz * 1e3 * width_bits / 4


def link_bandwidth(fields: Fields) -> float | Unavailable:
    """Return the bytes per second of PCIe in one direction, including packet framing."""
    generation = _positive_field(fields, "pcie_generation_max", "the PCIe generation")
    if isinstance(generation, Unavailable):
        return generation
    width = _positive_field(fields, "pcie_width_max", "the number of PCIe lanes")
    if isinstance(width, Unavailable):
        return width
    if generation not in _PCIE_LANES:
        return Unavailable(f"the rate is unknown for PCIe {generation}.0")
    transfers_per_s, data_share = _PCIE_LANES[generation]
    return transfers_per_s * data_share * width / 8


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
    if version not in _NVLINK_RATES:
        return Unavailable(f"the rate is unknown for NVLink {version}")
    return link_count * _NVLINK_RATES[version]


def rate_per_clock(kind: str, fields: Fields) -> int | Unavailable:
    """Return the operations per SM and clock of a kind.

    Kinds are fp64, fp64_tensor, fp32, tf32, fp16, bf16, fp8 and int8. Unavailable if the device is not in the
    table, or does not support the kind.
    """
    capability = str(fields.get("compute_capability"))
    rates = _RATES.get(capability)
    if rates is None:
        return Unavailable(f"the peak is unknown for compute capability {capability}")
    if kind not in rates:
        return Unavailable(f"the peak of {kind} is unknown for compute capability {capability}")
    is_geforce = "GeForce" in str(fields.get("name"))
    is_halved = is_geforce and kind in _HALVED_KINDS and capability in _HALVING_CAPABILITIES
    return rates[kind] // 2 if is_halved else rates[kind]


def matrix_kind(dtype: str, fields: Fields) -> str:
    """Return the fastest kind of operation for a GEMM of a data type, such as "fp8" for "fp8_e4m3".

    The kind of fp64 is fp64_tensor on devices with tensor cores for fp64.
    """
    kind = dtype.split("_")[0]
    rates = _RATES.get(str(fields.get("compute_capability")), {})
    return "fp64_tensor" if kind == "fp64" and "fp64_tensor" in rates else kind


def _positive_field(fields: Fields, name: str, description: str) -> int | Unavailable:
    """Return a fact that is a positive integer; drivers report 0 for unknown values."""
    value = fields.get(name)
    if isinstance(value, Unavailable):
        return Unavailable(f"{description} is unknown: {value.reason}")
    return (
        value if isinstance(value, int) and value > 0 else Unavailable(f"{description} is unknown")
    )


def _time(amount: float, per_second: float | Unavailable) -> float | Unavailable:
    if not amount:
        return 0.0
    return per_second if isinstance(per_second, Unavailable) else amount / per_second


def _longest_term(terms: Mapping[str, float]) -> Literal["arithmetic", "memory", "link"]:
    if terms["arithmetic"] >= max(terms["memory"], terms["link"]):
        return "arithmetic"
    return "memory" if terms["memory"] >= terms["link"] else "link"


def _bound_at_clock(
    terms: Mapping[str, float], datasheet_hz: float | Unavailable, hz: float | Unavailable
) -> float | Unavailable:
    """Return the bound at another SM clock: only the arithmetic term depends on the SM clock."""
    if isinstance(hz, Unavailable):
        return hz
    transfer_s = max(terms["memory"], terms["link"])
    if not terms["arithmetic"] or isinstance(datasheet_hz, Unavailable):
        return transfer_s
    return max(terms["arithmetic"] * datasheet_hz / hz, transfer_s)
