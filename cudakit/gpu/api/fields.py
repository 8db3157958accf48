"""The device fields that NVML and the CUDA driver report: unit, meaning, and the NVML call of each."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal, cast

Kind = Literal["identity", "fact", "telemetry", "activity"]

# The group of fields that only MIG instances have.
INSTANCE_GROUP = "MIG instance"

# Matches "function(arguments)" or "field_id(scope)", followed by the part of the result to use.
_CALL = re.compile(r"(\w+)(?:\(([\w,]+)\))?(\S*)")


@dataclass(frozen=True, slots=True)
class FieldInfo:
    """One field of a device."""

    name: str  # name of the field, as --fields accepts it
    unit: str  # printed after the number; "" for none; "bytes", "bool" and "hex" select a format
    source: str  # NVML function or field id, or CUDA attribute
    description: str  # meaning of the field
    group: str  # heading above the field in --long
    kind: Kind  # which query reads the field


@dataclass(frozen=True, slots=True)
class NvmlField:
    """One NVML field and the call that reads it."""

    info: FieldInfo
    arguments: tuple[str, ...]  # numbers or names of nvidia-ml-py constants
    result_part: str  # the part of the result to use: ".member", "[index]", or "" for all


def nvml_fields() -> Iterator[NvmlField]:
    """Yield the NVML fields in display order: facts, telemetry, and activity between two reads."""
    for row in _rows("nvml_fields.csv"):
        match = re.fullmatch(_CALL, row["call"])
        assert match, row  # noqa: S101 the table is a constant
        source, arguments, result_part = match.groups(default="")
        info = FieldInfo(
            row["name"],
            row["unit"],
            source,
            row["meaning"],
            row["group"],
            cast("Kind", row["kind"]),
        )
        yield NvmlField(info, tuple(filter(None, arguments.split(","))), result_part)


def _rows(table: str) -> Iterator[dict[str, str]]:
    text = files("cudakit.gpu.api").joinpath(table).read_text("utf-8")
    return csv.DictReader(text.splitlines())


# --- The device attributes of the CUDA driver: number, name, unit and meaning ----------------------
#
# From CUdevice_attribute of the CUDA Driver API 13.5 (cuda.h). Names are CUDA's, in lower case, with
# units. ``pci_bus_id`` is the full PCI address. Unsupported attributes become Unavailable fields.

# The names of the bits of each bit mask, from bit 0 on.
BIT_NAMES = {
    "gpu_direct_rdma_flush_writes_options": ("host call", "stream memory operation"),
    "mempool_supported_handle_types": (
        "POSIX file descriptor",
        "Win32",
        "Win32 KMT",
        "fabric",
    ),
    "mem_decompress_algorithm_mask": ("Deflate", "Snappy", "LZ4"),
    "logical_endpoint_supported_handle_types": ("fabric",),
}


@dataclass(frozen=True, slots=True)
class Attribute:
    """One CUdevice_attribute."""

    number: int
    name: str
    unit: str  # "bytes", "kHz", "bits", "bool", "mask", "hex", "word" or "" for a plain number
    description: str


def attributes() -> tuple[Attribute, ...]:
    """Return all attributes in the order of CUdevice_attribute."""
    return tuple(
        Attribute(int(row["number"]), row["name"], row["unit"], row["meaning"])
        for row in _rows("cuda_attributes.csv")
    )
