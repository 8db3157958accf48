"""The keys of a configuration: the setting that each is, and how its value is read and written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from cudakit.allocator_config import values
from cudakit.allocator_config.text import Entry


@dataclass(frozen=True, slots=True)
class Key:
    """A key of PyTorch's configuration."""

    field: str  # of Settings
    read: Callable[[Entry], Any]
    write: Callable[[Any], str]
    native: bool = True  # does nothing beside another backend


def _switch(field: str, *, native: bool = True) -> Key:
    return Key(field, values.read_switch, values.write_switch, native)


def _size(field: str, *, native: bool = True) -> Key:
    return Key(field, values.read_size, values.write_size, native)


# The keys of PyTorch 2.15 (AcceleratorAllocatorConfig::getKeys, CUDAAllocatorConfig::getKeys).
KEYS: Mapping[str, Key] = MappingProxyType(
    {
        "backend": Key("backend", values.read_backend, values.write_word, native=False),
        "expandable_segments": _switch("expandable_segments"),
        "expandable_segments_reserve": Key(
            "expandable_segments_reserve", values.read_reserve, values.write_reserve
        ),
        "expandable_segments_reserve_by_class": Key(
            "expandable_segments_reserve_by_class", values.read_reserves, values.write_reserves
        ),
        "garbage_collection_threshold": Key(
            "garbage_collection_threshold", values.read_threshold, values.write_number
        ),
        "graph_capture_record_stream_reuse": _switch("graph_capture_record_stream_reuse"),
        "large_segment_size_mb": _size("large_segment_size_bytes"),
        "max_non_split_rounding_mb": _size("max_non_split_rounding_bytes"),
        "max_split_size_mb": _size("max_split_size_bytes"),
        "per_process_memory_fraction": Key(
            "memory_fraction", values.read_number, values.write_number
        ),
        "pinned_free_catch_all": _switch("pinned_free_catch_all", native=False),
        "pinned_max_cached_size_mb": _size("pinned_max_cached_size_bytes", native=False),
        "pinned_max_round_threshold_mb": _size("pinned_max_round_threshold_bytes", native=False),
        "pinned_num_register_threads": Key(
            "pinned_num_register_threads", values.read_count, values.write_count, native=False
        ),
        "pinned_reserve_segment_size_mb": Key(
            "pinned_reserve_segment_size_bytes",
            values.read_size_above_0,
            values.write_size,
            native=False,
        ),
        "pinned_use_background_threads": _switch("pinned_use_background_threads", native=False),
        "pinned_use_cuda_host_register": _switch("pinned_use_cuda_host_register", native=False),
        "release_lock_on_cudamalloc": _switch("release_lock_on_cudamalloc"),
        "roundup_power2_divisions": Key(
            "roundup_power2_divisions", values.read_divisions, values.write_divisions
        ),
        "throw_on_cudamalloc_oom": _switch("throw_on_cudamalloc_oom"),
    }
)

# Other spellings that PyTorch takes on every device (CUDAAllocatorConfig::parseArgs).
SPELLINGS: Mapping[str, str] = MappingProxyType(
    {
        "pinned_use_hip_host_register": "pinned_use_cuda_host_register",
        "release_lock_on_hipmalloc": "release_lock_on_cudamalloc",
    }
)

# What PyTorch once took and now refuses.
DROPPED = frozenset({"roundup_bypass_threshold_mb"})
