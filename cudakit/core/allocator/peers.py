"""Other devices of the machine, whose kernels use the memory of this one.

Source: PyTorch's c10/cuda/CUDACachingAllocator.cpp (enablePeerAccess, ExpandableSegment::addPeer).
"""

from __future__ import annotations

from cudakit.core.allocator.observed import Observed
from cudakit.core.allocator.upstream import Reachable
from cudakit.errors import Unsupported


class WithPeers(Observed):
    """The allocator of one device, whose memory other devices may use."""

    def enable_peer_access(self, device: int) -> None:
        """Let kernels of another device use all that is allocated here, now and later.

        A second time does nothing. The context of that device reaches plain segments, for good, and whatever
        else is allocated in this one (cuCtxEnablePeerAccess); pages of expandable segments have access of
        their own (cuMemSetAccess). Raises CudaError where the machine does not link the two, or there is no
        such device, and takes back what access pages have got by then; Unsupported for an upstream without a
        device.
        """
        upstream = self._upstream
        if not isinstance(upstream, Reachable):
            raise Unsupported("memory of this upstream is that of no device with peers")
        with self._inside(flushes=False):
            if device not in upstream.peers:
                expandable = self._cache.expandable
                upstream.enable_peer(device, expandable.mapped if expandable else ())

    @property
    def peer_accessible_by(self) -> tuple[int, ...]:
        """The other devices that may use the memory, as cuda.core calls it: those that were enabled here."""
        upstream = self._upstream
        return tuple(sorted(upstream.peers)) if isinstance(upstream, Reachable) else ()
