"""The effective configuration of the allocator: every setting that PyTorch's has."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

from cudakit.allocator_config.keys import KEYS, Key
from cudakit.allocator_config.reserve import Reserve
from cudakit.allocator_config.rules import (
    DIVISION_SLOTS,
    MIB,
    RULES,
    SettingRefused,
    shown,
)

Backend: TypeAlias = Literal["native", "cudaMallocAsync"]
Recorded: TypeAlias = bool | int | float | str | dict[str, int]

_NO_DIVISIONS = (0,) * DIVISION_SLOTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Hold the settings of a caching allocator, with the meaning, the limits and the defaults of PyTorch's.

    The source is PyTorch 2.15's c10/core/AllocatorConfig and c10/cuda/CUDAAllocatorConfig, whose keys
    are these names; ``_mb`` there is ``_bytes`` here, always whole MiB, and ``memory_fraction`` is
    ``per_process_memory_fraction``. A value is whole: nothing of an earlier one lives on in it.

    Raises SettingRefused, an InputError, which says the field, the value seen and what it must be.
    """

    # Who allocates; beside cudaMallocAsync only the settings of pinned memory count.
    backend: Backend = "native"

    # Blocks from this size on are not split; None: all may be.
    max_split_size_bytes: int | None = None
    # See slack_bytes; None: large_segment_size_bytes.
    max_non_split_rounding_bytes: int | None = None
    # The segment of a request above 1 MiB and below 10 MiB.
    large_segment_size_bytes: int = 20 * MIB
    # Of sizes in [2^i, 2^(i+1)) MiB; 0 and 1: not rounded.
    roundup_power2_divisions: tuple[int, ...] = _NO_DIVISIONS
    # The share of the limit above which unused segments are given back by age; 0: off.
    garbage_collection_threshold: float = 0.0
    # The limit, as a share of the device's memory; 1: none.
    memory_fraction: float = 1.0
    # Refuse what is above the limit before the driver is asked.
    throw_on_cudamalloc_oom: bool = False
    # Let other threads go on while the driver allocates.
    release_lock_on_cudamalloc: bool = False
    # Reuse within a capture what the graph so far proves to be free.
    graph_capture_record_stream_reuse: bool = False

    # Segments that grow within a range of addresses.
    expandable_segments: bool = False
    # That range; None: 9/8 of the device's memory.
    expandable_segments_reserve: Reserve | None = None
    # The same for streams of a class, by its name.
    expandable_segments_reserve_by_class: tuple[tuple[str, Reserve], ...] = ()

    # Look after events in a thread of its own.
    pinned_use_background_threads: bool = False
    # Allocate by cudaHostRegister instead of cudaHostAlloc, with so many threads that touch the pages.
    pinned_use_cuda_host_register: bool = False
    pinned_num_register_threads: int = 1
    # What is larger is not rounded to a power of two; None: all is.
    pinned_max_round_threshold_bytes: int | None = None
    # What is larger is given back when it is freed; None: all is kept.
    pinned_max_cached_size_bytes: int | None = None
    # Set aside at the first use, and carved up; 0: nothing.
    pinned_reserve_segment_size_bytes: int = 0
    # Swallow what fails when pinned memory is freed.
    pinned_free_catch_all: bool = False

    def __post_init__(self) -> None:
        for field, rule in RULES.items():
            value = getattr(self, field)
            if not rule.holds(value):
                raise SettingRefused(field, shown(field, value), rule.right)
        self._check_against_segments()
        self._check_against_backend()

    @property
    def slack_bytes(self) -> int:
        """Return by how much an unsplit block may be larger than the request that takes it."""
        rounding = self.max_non_split_rounding_bytes
        return self.large_segment_size_bytes if rounding is None else rounding

    def as_text(self) -> str:
        """Write what is not the default as a string that PyTorch and ``parse_config`` read."""
        changed = self._changed()
        return ",".join(
            f"{name}:{key.write(getattr(self, key.field))}"
            for name, key in KEYS.items()
            if key.field in changed
        )

    def as_torch(self) -> dict[str, Recorded]:
        """Return what PyTorch 2.11 writes into a snapshot as its ``allocator_settings``.

        Sizes are bytes, -1 without a limit; divisions go by the MiB at which they begin. The string under
        PYTORCH_CUDA_ALLOC_CONF is ``as_text``: it has the settings that PyTorch leaves out too
        (torch/csrc/cuda/Module.cpp, torch_cuda_memorySnapshot).
        """
        limit = self.max_split_size_bytes
        return {
            "PYTORCH_CUDA_ALLOC_CONF": self.as_text(),
            "max_split_size": -1 if limit is None else limit,
            "garbage_collection_threshold": self.garbage_collection_threshold,
            "expandable_segments": self.expandable_segments,
            "pinned_num_register_threads": self.pinned_num_register_threads,
            "release_lock_on_cudamalloc": self.release_lock_on_cudamalloc,
            "pinned_use_cuda_host_register": self.pinned_use_cuda_host_register,
            "graph_capture_record_stream_reuse": self.graph_capture_record_stream_reuse,
            "roundup_power2_divisions": {
                str(1 << slot): n for slot, n in enumerate(self.roundup_power2_divisions)
            },
        }

    def as_recorded(self) -> dict[str, Recorded]:
        """Return what a snapshot has: what PyTorch writes, then every setting that is in force.

        By the names of the keys; sizes are bytes, without ``_mb``, and -1 without a limit.
        """
        effective = {name.removesuffix("_mb"): self._recorded(key) for name, key in KEYS.items()}
        effective["max_non_split_rounding"] = self.slack_bytes
        told = self.as_torch()
        return told | {name: value for name, value in effective.items() if name not in told}

    def _recorded(self, key: Key) -> Recorded:
        value = getattr(self, key.field)
        if value is None:
            return -1
        return value if isinstance(value, bool | int | float | str) else str(key.write(value))

    def _changed(self) -> set[str]:
        return {f.name for f in fields(self) if getattr(self, f.name) != f.default}

    def _check_against_segments(self) -> None:
        least = self.large_segment_size_bytes
        for field in ("max_split_size_bytes", "max_non_split_rounding_bytes"):
            value = getattr(self, field)
            if value is not None and value < least:
                right = f"at least the size of a large segment, {shown('large_segment_size_bytes', least)}"
                raise SettingRefused(field, shown(field, value), right)

    def _check_against_backend(self) -> None:
        if self.backend == "native":
            return
        changed = self._changed()
        for key in KEYS.values():
            if key.native and key.field in changed:
                value = shown(key.field, getattr(self, key.field))
                right = f"left out: with backend {self.backend} it does nothing"
                raise SettingRefused(key.field, value, right)
