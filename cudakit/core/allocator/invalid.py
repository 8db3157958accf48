"""Frees of what is not allocated: recorded, and raised as one error that says what the pointer is."""

from __future__ import annotations

from dataclasses import dataclass

from cudakit.core.allocator.block import Block, Trail
from cudakit.core.allocator.cache import Cache
from cudakit.errors import CudakitError
from cudakit.units import format_bytes


class InvalidPointer(CudakitError):
    """An address is not the beginning of a live allocation."""


@dataclass(frozen=True, slots=True)
class InvalidFree:
    """A free that was refused."""

    ptr: int
    reason: str
    stack: Trail | None


def reason_for(cache: Cache, ptr: int) -> str:
    """Say what is known of an address at which no live allocation begins."""
    for segment in cache.segments.values():
        if segment.ptr <= ptr < segment.ptr + segment.size:
            block = max(
                (block for block in segment.blocks() if block.ptr <= ptr),
                key=lambda block: block.ptr,
            )
            return _reason_within(block, ptr)
    return "it belongs to no segment of this allocator, or its segment was given back"


def _reason_within(block: Block, ptr: int) -> str:
    if not block.allocated or ptr == block.ptr:
        waits = "" if block.free else ", and other streams still use it"
        return f"it was freed before{waits}"
    return (
        f"it lies {ptr - block.ptr} bytes into the allocation of {format_bytes(block.requested)}"
        f" at {block.ptr:#x}"
    )
