"""One allocator for each device: which of them is asked."""

from __future__ import annotations

from collections.abc import Iterable

from cudakit.errors import UsageError
from cudakit.gpu.api.allocator import Allocator


class Devices(dict[int, Allocator]):
    """Allocators by CUDA's number of their devices. Raises UsageError for a device that has none, or two."""

    def __init__(self, allocators: Iterable[Allocator]) -> None:
        super().__init__()
        for allocator in allocators:
            if allocator.device in self:
                raise UsageError(
                    f"two allocators were given for cuda:{allocator.device}",
                    hint="give one for each device",
                )
            self[allocator.device] = allocator
        if not self:
            raise UsageError(
                "no allocator was given",
                hint="give one for each device: cudakit.CachingAllocator(0)",
            )

    def __missing__(self, device: int) -> Allocator:
        known = ", ".join(f"cuda:{number}" for number in sorted(self))
        raise UsageError(
            f"memory of cuda:{device} was asked for, and the allocators given are of {known}",
            hint=f"give one more: cudakit.CachingAllocator({device})",
        )
