"""Durations in virtual time: round numbers of the right order of magnitude, not measurements."""

from __future__ import annotations

from dataclasses import dataclass

from cudakit.gpu.api.facts import DeviceFacts
from cudakit.gpu.architectures import Capability

_NS = 1_000_000_000
# Used if the facts do not say.
_MEMORY_BYTES_PER_S = 1_000_000_000_000


@dataclass(frozen=True, slots=True)
class Costs:
    """The durations of one device."""

    memory_bytes_per_s: int = _MEMORY_BYTES_PER_S
    link_bytes_per_s: int = 50_000_000_000  # between host and device
    pageable_bytes_per_s: int = (
        10_000_000_000  # likewise, of pageable memory, which the driver stages
    )
    nvlink_bytes_per_s: int = 20_000_000_000  # over each NVLink to another device
    call_ns: int = 500  # of any call, at the host
    dispatch_ns: int = 2_000  # from the call until its work can begin
    node_ns: int = 500  # likewise, from one node of a graph to the next
    least_ns: int = 1_000  # of any kernel, copy or fill

    def in_memory_ns(self, size_bytes: int) -> int:
        """Return the time to read or write bytes of the device's memory."""
        return self.least_ns + size_bytes * _NS // self.memory_bytes_per_s

    def over_link_ns(self, size_bytes: int) -> int:
        """Return the time to move bytes between pinned host memory and device."""
        return self.least_ns + size_bytes * _NS // self.link_bytes_per_s

    def pageable_ns(self, size_bytes: int) -> int:
        """Return the time to move bytes between pageable host memory and device."""
        return self.least_ns + size_bytes * _NS // self.pageable_bytes_per_s

    def to_peer_ns(self, size_bytes: int, nvlinks: int) -> int:
        """Return the time to move bytes to another device: over NVLink, or as to the host."""
        if not nvlinks:
            return self.over_link_ns(size_bytes)
        return self.least_ns + size_bytes * _NS // (nvlinks * self.nvlink_bytes_per_s)


def costs_of(facts: DeviceFacts) -> Costs:
    """Derive the memory bandwidth from bus width and clock, at two transfers per cycle."""
    width_bits = facts.fields.get("global_memory_bus_width_bits")
    clock_khz = facts.fields.get("memory_clock_rate_khz")
    if isinstance(width_bits, int) and isinstance(clock_khz, int) and width_bits * clock_khz > 0:
        return Costs(memory_bytes_per_s=2 * width_bits // 8 * clock_khz * 1000)
    return Costs()


# Used if the facts do not say.
_MULTIPROCESSORS = 16
_CLOCK_KHZ = 1_000_000
# fp16 operations per cycle of the tensor cores of an SM (NVIDIA's white papers of Turing, Ampere,
# GA102, Ada, Hopper and Blackwell).
_MATRIX = {(8, 0): 2048, (8, 7): 2048, (9, 0): 4096, (10, 0): 8192}
_MATRIX_OF_OTHERS = 1024
# Relative to fp16.
_OF_MATRIX = {"fp16": 1.0, "bf16": 1.0, "tf32": 0.5, "int8": 2.0, "fp8_e4m3": 2.0, "fp8_e5m2": 2.0}
# Operations per cycle without tensor cores, but fp64 with them where they compute it (CUDA C++ Programming
# Guide, "Arithmetic Instructions").
_FP32, _FP32_OF_FIRST_HALVES = 256, 128
_FIRST_HALVES = ((7, 5), (8, 0))
_FP64 = {(8, 0): 128, (9, 0): 256, (10, 0): 128}
_FP64_OF_OTHERS = 4
# GeForce products add in fp32 at half the rate (GA102 and Ada white papers).
_GEFORCE = 0.5


@dataclass(frozen=True, slots=True)
class Rates:
    """The arithmetic throughput of a device for one data type."""

    multiprocessors: int
    operations_per_s: float  # of one SM, at most


def rates_of(facts: DeviceFacts, dtype: str) -> Rates:
    """Derive the throughput from the number of SMs, their clock and the compute capability."""
    clock_hz = 1e3 * _positive(facts, "clock_rate_khz", _CLOCK_KHZ)
    multiprocessors = _positive(facts, "multiprocessor_count", _MULTIPROCESSORS)
    return Rates(multiprocessors, clock_hz * _operations_per_clock(facts, dtype))


def capability(facts: DeviceFacts) -> Capability:
    """Return the compute capability, 0.0 if it is unknown."""
    major, _, minor = str(facts.fields.get("compute_capability")).partition(".")
    known = major.isdigit() and minor.isdigit()
    return Capability(int(major), int(minor)) if known else Capability(0, 0)


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
