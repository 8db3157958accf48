"""How many operations an SM can begin in one clock, by kind of operation and compute capability.

A fused multiply-add counts as two. Matrix kinds are of dense operands, with fp32 accumulation (int32 for
int8). Rates of scalar fp32 and fp64 are those of the CUDA C++ Programming Guide, "Arithmetic
Instructions"; the others are stated in the white paper or follow from the dense rate of the datasheet
named, over its SMs and its boost clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from cudakit.gpu.api.facts import Field
from cudakit.units import Unavailable

# GeForce products accumulate fp16, bf16, tf32 and fp8 in fp32 at half the rate of their chip (NVIDIA
# Turing, GA102 and Ada white papers, tables of peak rates; from 8.6 on tf32 and bf16 as well).
_HALVED = frozenset({"fp16", "bf16", "tf32", "fp8"})
_HALVING = frozenset({"7.5", "8.6", "8.9"})

_RATES: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        # Turing white paper: 512 fp16 multiply-adds a clock; T4 datasheet: 130 TOP/s int8.
        "7.5": {"fp64": 4, "fp32": 128, "fp16": 1024, "int8": 2048},
        # A100 white paper: 1024 fp16 multiply-adds a clock, 64 of fp64 in tensor cores.
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
        # HGX B200 datasheet, a GPU of eight: 2.25 PFLOP/s bf16 dense, 37 TFLOP/s fp64, 148 SMs.
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


def rate_per_clock(kind: str, fields: Mapping[str, Field]) -> int | Unavailable:
    """Return the operations of a kind that an SM of this device can begin in one clock.

    Kinds are fp64, fp64_tensor, fp32, tf32, fp16, bf16, fp8 and int8. Unavailable with the reason for a
    device that is not in the table, or that does not compute the kind.
    """
    capability = str(fields.get("compute_capability"))
    rates = _RATES.get(capability)
    if rates is None:
        return Unavailable(f"no peak is known for compute capability {capability}")
    if kind not in rates:
        return Unavailable(f"no peak is known for {kind} with compute capability {capability}")
    halved = kind in _HALVED and capability in _HALVING and "GeForce" in str(fields.get("name"))
    return rates[kind] // 2 if halved else rates[kind]


def matrix_kind(dtype: str, fields: Mapping[str, Field]) -> str:
    """Name the kind of operation by which a product of matrices of this type is fastest.

    ``fp8_e4m3`` and ``fp8_e5m2`` are fp8; fp64 has tensor cores on some devices.
    """
    kind = dtype.split("_")[0]
    rates = _RATES.get(str(fields.get("compute_capability")), {})
    return "fp64_tensor" if kind == "fp64" and "fp64_tensor" in rates else kind
