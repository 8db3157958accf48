"""The numbers of an allocator, and the frees that it refused."""

from __future__ import annotations

from collections import deque
from itertools import count

from cudakit.core.allocator.block import Trail
from cudakit.core.allocator.entrance import Entrance
from cudakit.core.allocator.fragmentation import Fragmentation, fragmentation_of
from cudakit.core.allocator.invalid import InvalidFree, InvalidPointer, reason_for
from cudakit.core.allocator.upstream import Upstream
from cudakit.torch_rules.settings import Settings

_MOST_INVALID_FREES = 1000


class Counted(Entrance):
    """The allocator of one device, and what is counted of it."""

    def __init__(self, upstream: Upstream, settings: Settings, device: int) -> None:
        super().__init__(upstream, settings)
        self._device = device
        self._invalid: deque[InvalidFree] = deque(maxlen=_MOST_INVALID_FREES)
        self._invalid_numbers = count(1)

    def statistics(self) -> dict[str, int]:
        """Return the 122 numbers of torch.cuda.memory_stats, and what each private pool has reserved.

        That is ``reserved_bytes_by_private_pools.<a>_<b>.<pool>.<metric>`` for the pool of id (a, b), as in
        PyTorch 2.15; of a pool that is gone ``current`` is 0, and the rest stays.
        """
        with self._inside():
            return self._cache.statistics.read()

    def counters(self) -> dict[str, int]:
        """Return what PyTorch does not count."""
        with self._inside():
            known = self._cache.statistics
            return {
                "num_invalid_frees": known.num_invalid_frees,
                "num_oom_rejections": known.num_oom_rejections,
                "num_sync_rescues": known.num_sync_rescues,
            }

    def fragmentation(self) -> Fragmentation:
        """Say how much of what is reserved is of use to nobody, and to whom the rest is."""
        with self._inside():
            return fragmentation_of(self._cache.segments.values(), self._uses.awaited())

    def invalid_frees(self) -> tuple[InvalidFree, ...]:
        """Return the latest frees that were refused, oldest first."""
        return tuple(self._invalid)

    def reset_peaks(self) -> None:
        """Let every peak be the value now."""
        with self._inside():
            self._cache.statistics.reset_peaks()

    def reset_sums(self) -> None:
        """Begin to add up anew what was allocated and freed."""
        with self._inside():
            self._cache.statistics.reset_sums()

    def _reason_for(self, ptr: int) -> str:
        """Say what is known of an address at which no live allocation begins. The guard is held."""
        self._front.flush()  # for the pools, what is kept there is still allocated
        return reason_for(self._cache, ptr)

    def _refuse_free(self, ptr: int, stack: Trail | None) -> InvalidPointer:
        reason = "it was freed from within the allocator"
        if self._guard.try_enter():
            try:
                reason = self._reason_for(ptr)
            finally:
                self._guard.leave()
        self._invalid.append(InvalidFree(ptr, reason, stack))
        self._cache.statistics.num_invalid_frees = next(self._invalid_numbers)
        return InvalidPointer(
            f"nothing is allocated at {ptr:#x}: {reason}",
            hint="free each allocation once, by the address that alloc returned",
        )
