"""Libraries of collective operations on real devices: NCCL and torch."""

from __future__ import annotations

from cudakit.gpu.api.collectives import CollectiveLibrary, CollectiveLibraryName
from cudakit.gpu.collectives.library import CollectiveDevice


def open_collectives(
    gpu: CollectiveDevice, library: CollectiveLibraryName = "nccl"
) -> CollectiveLibrary:
    """Open a library of collective operations. Raises MissingDependency with the package to install."""
    if library == "torch":
        from cudakit.gpu.collectives.torch import TorchCollectives

        return TorchCollectives(gpu)
    from cudakit.gpu.collectives.nccl import Nccl

    return Nccl(gpu)
