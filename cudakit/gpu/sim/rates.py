"""How fast a simulated device multiplies: round numbers of the right order, and no measurements."""

from __future__ import annotations

from dataclasses import dataclass

from cudakit.gpu.api.facts import DeviceFacts

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
