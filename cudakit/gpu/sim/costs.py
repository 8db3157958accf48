"""Durations in virtual time: estimates of the right order of magnitude, not measurements."""

from __future__ import annotations

from dataclasses import dataclass

from cudakit.gpu.api.facts import DeviceFacts
from cudakit.gpu.architectures import Capability

_NS_PER_S = 1_000_000_000
# Memory bandwidth of devices whose facts lack the clock or the bus width.
_MEMORY_BYTES_PER_S = 1_000_000_000_000


@dataclass(frozen=True, slots=True)
class Costs:
    """Bandwidths and latencies of one device."""

    memory_bytes_per_s: int = _MEMORY_BYTES_PER_S
    link_bytes_per_s: int = 50_000_000_000  # bandwidth between host and device
    pageable_bytes_per_s: int = 10_000_000_000  # bandwidth of copies with pageable memory
    nvlink_bytes_per_s: int = 20_000_000_000  # bandwidth of one NVLink
    call_ns: int = 500  # host time of a driver call
    dispatch_ns: int = 2_000  # delay from a call to the earliest start of its work
    node_ns: int = 500  # delay between the starts of graph nodes
    minimum_ns: int = 1_000  # duration of the shortest kernel, copy or fill

    def device_memory_ns(self, size_bytes: int) -> int:
        """Return the time to read or write bytes of device memory."""
        return self.minimum_ns + size_bytes * _NS_PER_S // self.memory_bytes_per_s

    def host_link_ns(self, size_bytes: int) -> int:
        """Return the time to copy bytes between pinned host memory and the device."""
        return self.minimum_ns + size_bytes * _NS_PER_S // self.link_bytes_per_s

    def pageable_ns(self, size_bytes: int) -> int:
        """Return the time to copy bytes between pageable host memory and the device."""
        return self.minimum_ns + size_bytes * _NS_PER_S // self.pageable_bytes_per_s

    def to_peer_ns(self, size_bytes: int, nvlink_count: int) -> int:
        """Return the time to copy bytes to a peer: over NVLink, or at host link speed without NVLink."""
        if not nvlink_count:
            return self.host_link_ns(size_bytes)
        return self.minimum_ns + size_bytes * _NS_PER_S // (nvlink_count * self.nvlink_bytes_per_s)


def costs_of(facts: DeviceFacts) -> Costs:
    """Return the costs of a device: memory bandwidth is bus width times clock, two transfers per cycle."""
    width_bits = facts.fields.get("global_memory_bus_width_bits")
    clock_khz = facts.fields.get("memory_clock_rate_khz")
    if isinstance(width_bits, int) and isinstance(clock_khz, int) and width_bits * clock_khz > 0:
        return Costs(memory_bytes_per_s=2 * width_bits // 8 * clock_khz * 1000)
    return Costs()


# Number and clock of SMs for devices whose facts lack them.
_MULTIPROCESSORS = 16
_CLOCK_KHZ = 1_000_000
# fp16 operations per cycle of the tensor cores of an SM (NVIDIA's white papers of Turing, Ampere,
# GA102, Ada, Hopper and Blackwell).
_TENSOR_OPERATIONS = {(8, 0): 2048, (8, 7): 2048, (9, 0): 4096, (10, 0): 8192}
_DEFAULT_TENSOR_OPERATIONS = 1024
# Tensor core throughput relative to fp16.
_RELATIVE_TO_FP16 = {
    "fp16": 1.0,
    "bf16": 1.0,
    "tf32": 0.5,
    "int8": 2.0,
    "fp8_e4m3": 2.0,
    "fp8_e5m2": 2.0,
}
# Operations per cycle and SM without tensor cores; fp64 with tensor cores that support fp64 (CUDA C++
# Programming Guide, "Arithmetic Instructions").
_FP32_OPERATIONS, _FP32_OPERATIONS_64_LANES = 256, 128
_64_LANE_CAPABILITIES = ((7, 5), (8, 0))
_FP64_OPERATIONS = {(8, 0): 128, (9, 0): 256, (10, 0): 128}
_DEFAULT_FP64_OPERATIONS = 4
# GeForce GPUs accumulate in fp32 at half the rate (GA102 and Ada white papers).
_GEFORCE_FACTOR = 0.5


@dataclass(frozen=True, slots=True)
class Rates:
    """The arithmetic throughput of a device for one data type."""

    multiprocessors: int
    operations_per_s: float  # peak rate of one SM


def rates_of(facts: DeviceFacts, dtype: str) -> Rates:
    """Return the peak throughput, from the number of SMs, their clock and the compute capability."""
    clock_hz = 1e3 * _positive_fact(facts, "clock_rate_khz", _CLOCK_KHZ)
    multiprocessors = _positive_fact(facts, "multiprocessor_count", _MULTIPROCESSORS)
    return Rates(multiprocessors, clock_hz * _operations_per_clock(facts, dtype))


def capability(facts: DeviceFacts) -> Capability:
    """Return the compute capability; 0.0 if unknown."""
    major, _, minor = str(facts.fields.get("compute_capability")).partition(".")
    is_known = major.isdigit() and minor.isdigit()
    return Capability(int(major), int(minor)) if is_known else Capability(0, 0)


def _operations_per_clock(facts: DeviceFacts, dtype: str) -> float:
    device_capability = capability(facts)
    if dtype == "fp64":
        return _FP64_OPERATIONS.get(device_capability, _DEFAULT_FP64_OPERATIONS)
    if dtype == "fp32":
        return (
            _FP32_OPERATIONS_64_LANES
            if device_capability in _64_LANE_CAPABILITIES
            else _FP32_OPERATIONS
        )
    is_geforce = "GeForce" in str(facts.fields.get("name"))
    operations_per_cycle = (
        _TENSOR_OPERATIONS.get(device_capability, _DEFAULT_TENSOR_OPERATIONS)
        * _RELATIVE_TO_FP16[dtype]
    )
    return operations_per_cycle * _GEFORCE_FACTOR if is_geforce else operations_per_cycle


def _positive_fact(facts: DeviceFacts, name: str, default: int) -> int:
    value = facts.fields.get(name)
    return value if isinstance(value, int) and value > 0 else default
