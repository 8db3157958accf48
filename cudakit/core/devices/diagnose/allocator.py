"""What PYTORCH_ALLOC_CONF asks of PyTorch's allocator."""

from __future__ import annotations

import re
from collections.abc import Iterator

from cudakit.core.devices.circumstances import Circumstances
from cudakit.core.devices.diagnose.check import Finding, ok, together, warn

# PyTorch takes the first of these that is set (c10/core/AllocatorConfig).
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
# The keys of PyTorch 2.0 to 2.15; a version refuses those that it does not know.
_KEYS = (
    "backend",
    "expandable_segments",
    "expandable_segments_reserve",
    "expandable_segments_reserve_by_class",
    "garbage_collection_threshold",
    "graph_capture_record_stream_reuse",
    "large_segment_size_mb",
    "max_non_split_rounding_mb",
    "max_split_size_mb",
    "per_process_memory_fraction",
    "pinned_free_catch_all",
    "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "release_lock_on_cudamalloc",
    "roundup_bypass_threshold_mb",
    "roundup_power2_divisions",
    "throw_on_cudamalloc_oom",
)
_SWITCHES = (
    "expandable_segments",
    "graph_capture_record_stream_reuse",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "release_lock_on_cudamalloc",
    "throw_on_cudamalloc_oom",
)
# A comma outside of brackets: roundup_power2_divisions:[256:1,512:2] is one entry.
_BETWEEN = re.compile(r",(?![^\[]*\])")


def allocator_settings(c: Circumstances) -> Finding:
    """PyTorch's allocator is set up by PYTORCH_ALLOC_CONF, and by its older name PYTORCH_CUDA_ALLOC_CONF.

    The form is key:value,key:value. A key that PyTorch does not know stops the program at its first use
    of CUDA; a switch must be True or False, written so. Where both names are set, the one with CUDA in
    it wins. With backend:cudaMallocAsync the keys of the native allocator do nothing.
    """
    told = {name: c.environment[name] for name in _ALLOCATOR if c.environment.get(name)}
    if not told:
        return ok("PyTorch's allocator has its default settings")
    name, value = next(iter(told.items()))
    problems = list(_wrong_entries(name, value))
    if len(set(told.values())) > 1:
        problems.append(
            warn(f"both {' and '.join(told)} are set; {name} wins", told, f"unset {_ALLOCATOR[0]}")
        )
    return together(
        problems, otherwise=ok(f"PyTorch's allocator is set up by {name}={value}", told)
    )


def _wrong_entries(name: str, text: str) -> Iterator[Finding]:
    entries = dict(_entries(text))
    for key, value in entries.items():
        if key not in _KEYS:
            yield _wrong(name, text, f"PyTorch knows no key {key!r}, and refuses to start with it")
        elif key in _SWITCHES and value not in ("True", "False"):
            yield _wrong(name, text, f"{key} takes True or False, not {value!r}")
    if entries.get("backend") == "cudaMallocAsync" and len(entries) > 1:
        yield _wrong(name, text, "with backend:cudaMallocAsync the other keys do nothing")


def _entries(text: str) -> Iterator[tuple[str, str]]:
    for entry in _BETWEEN.split(re.sub(r"\s", "", text)):
        key, _, value = entry.partition(":")
        if entry:
            yield key, value


def _wrong(name: str, text: str, why: str) -> Finding:
    return warn(
        f"{name}: {why}", {name: text}, f"export {name}=expandable_segments:True, or unset it"
    )
