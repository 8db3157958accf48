"""Durations in virtual time: round numbers of the right order of magnitude, not measurements."""

from __future__ import annotations

from dataclasses import dataclass

from cudakit.gpu.api.facts import DeviceFacts

_NS = 1_000_000_000
# Where the facts do not say.
_MEMORY_BYTES_PER_S = 1_000_000_000_000


@dataclass(frozen=True, slots=True)
class Costs:
    """The table of costs of one device."""

    memory_bytes_per_s: int = _MEMORY_BYTES_PER_S
    link_bytes_per_s: int = 50_000_000_000  # between host and device
    pageable_bytes_per_s: int = 10_000_000_000  # likewise, of memory that the driver has to stage
    nvlink_bytes_per_s: int = 20_000_000_000  # over each NVLink to another device
    call_ns: int = 500  # of any call, at the host
    dispatch_ns: int = 2_000  # from the call until its work can begin
    node_ns: int = 500  # likewise, from one node of a graph to the next
    least_ns: int = 1_000  # of any kernel, copy or fill

    def in_memory_ns(self, size_bytes: int) -> int:
        """Say how long it takes to read or write so much of the device's memory."""
        return self.least_ns + size_bytes * _NS // self.memory_bytes_per_s

    def over_link_ns(self, size_bytes: int) -> int:
        """Say how long it takes to move so much between host and device."""
        return self.least_ns + size_bytes * _NS // self.link_bytes_per_s

    def pageable_ns(self, size_bytes: int) -> int:
        """Say how long it takes to move so much between pageable memory of the host and the device."""
        return self.least_ns + size_bytes * _NS // self.pageable_bytes_per_s

    def to_peer_ns(self, size_bytes: int, nvlinks: int) -> int:
        """Say how long it takes to move so much to another device: over NVLinks, or as to the host."""
        if not nvlinks:
            return self.over_link_ns(size_bytes)
        return self.least_ns + size_bytes * _NS // (nvlinks * self.nvlink_bytes_per_s)


def costs_of(facts: DeviceFacts) -> Costs:
    """Derive the speed of memory from the width of its bus and its clock, at two transfers a tick."""
    width_bits = facts.fields.get("global_memory_bus_width_bits")
    clock_khz = facts.fields.get("memory_clock_rate_khz")
    if isinstance(width_bits, int) and isinstance(clock_khz, int) and width_bits * clock_khz > 0:
        return Costs(memory_bytes_per_s=2 * width_bits // 8 * clock_khz * 1000)
    return Costs()


# Where the facts do not say.
_MULTIPROCESSORS = 16
_CLOCK_KHZ = 1_000_000
# Operations in fp16 that the matrix units of an SM do in a clock (NVIDIA's white papers of Turing, Ampere,
# GA102, Ada, Hopper and Blackwell).
_MATRIX = {(8, 0): 2048, (8, 7): 2048, (9, 0): 4096, (10, 0): 8192}
_MATRIX_OF_OTHERS = 1024
# Against fp16.
_OF_MATRIX = {"fp16": 1.0, "bf16": 1.0, "tf32": 0.5, "int8": 2.0, "fp8_e4m3": 2.0, "fp8_e5m2": 2.0}
# Likewise without matrix units, but for fp64 where those compute it (CUDA C++ Programming Guide,
# "Arithmetic Instructions").
_FP32, _FP32_OF_FIRST_HALVES = 256, 128
_FIRST_HALVES = ((7, 5), (8, 0))
_FP64 = {(8, 0): 128, (9, 0): 256, (10, 0): 128}
_FP64_OF_OTHERS = 4
# GeForce products add in fp32 at half the rate (GA102 and Ada white papers).
_GEFORCE = 0.5


@dataclass(frozen=True, slots=True)
class Rates:
    """What the SMs of a device do for one type of data."""

    multiprocessors: int
    operations_per_s: float  # of one SM, at most


def rates_of(facts: DeviceFacts, dtype: str) -> Rates:
    """Derive them from the number of SMs, their clock and their compute capability."""
    clock_hz = 1e3 * _positive(facts, "clock_rate_khz", _CLOCK_KHZ)
    multiprocessors = _positive(facts, "multiprocessor_count", _MULTIPROCESSORS)
    return Rates(multiprocessors, clock_hz * _operations_per_clock(facts, dtype))


def capability(facts: DeviceFacts) -> tuple[int, int]:
    """Return the compute capability, (0, 0) where it is not known."""
    major, _, minor = str(facts.fields.get("compute_capability")).partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)


def _operations_per_clock(facts: DeviceFacts, dtype: str) -> float:
    version = capability(facts)
    if dtype == "fp64":
        return _FP64.get(version, _FP64_OF_OTHERS)
    if dtype == "fp32":
        return _FP32_OF_FIRST_HALVES if version in _FIRST_HALVES else _FP32
    halved = "GeForce" in str(facts.fields.get("name"))
    matrix = _MATRIX.get(version, _MATRIX_OF_OTHERS) * _OF_MATRIX[dtype]
    return matrix * _GEFORCE if halved else matrix


def _positive(facts: DeviceFacts, name: str, otherwise: int) -> int:
    value = facts.fields.get(name)
    return value if isinstance(value, int) and value > 0 else otherwise
