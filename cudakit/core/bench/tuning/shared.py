"""Operands that several algorithms of one product share, so that all read the same memory."""

from __future__ import annotations

from cudakit.core.bench.verification import Verification
from cudakit.core.bench.workloads.gemm import GemmWorkload, PreparedGemm
from cudakit.gpu.api import Gpu, Stream
from cudakit.gpu.api.gemm import Multiplication


class Shared:
    """The operands of a product, which can be made anew."""

    def __init__(self, gpu: Gpu, workload: GemmWorkload, seed: int) -> None:
        self._gpu, self._workload, self._seed = gpu, workload, seed
        self._product = self._make()

    @property
    def footprint_bytes(self) -> int:
        return self._product.footprint_bytes

    @property
    def bytes_moved(self) -> int:
        return self._product.bytes_moved

    @property
    def operations(self) -> int:
        return self._product.operations

    def rotate(self, sets: int) -> None:
        """Have so many buffer sets, one of which is there."""
        if sets > 1:
            self._product.rotate(sets)

    def enqueue_by(self, multiplication: Multiplication, stream: Stream, index: int) -> None:
        """Run a multiplication once, on a buffer set."""
        self._product.enqueue_by(multiplication, stream, index)

    def verify(self) -> Verification:
        """Check every buffer set, and poison what was computed."""
        return self._product.verify()

    def renew(self) -> None:
        """Have one buffer set, in other memory if the device gives other."""
        self._product.close()
        self._product = self._make()

    def close(self) -> None:
        """Give the memory back. A second time does nothing."""
        self._product.close()

    def _make(self) -> PreparedGemm:
        return PreparedGemm(self._gpu, self._workload, self._seed)


class ByAlgorithm:
    """A Prepared: the product by one algorithm, on shared operands."""

    def __init__(self, shared: Shared, multiplication: Multiplication) -> None:
        self._shared, self._multiplication = shared, multiplication

    @property
    def footprint_bytes(self) -> int:
        return self._shared.footprint_bytes

    @property
    def bytes_moved(self) -> int:
        return self._shared.bytes_moved

    @property
    def operations(self) -> int:
        return self._shared.operations

    def rotate(self, sets: int) -> None:
        """Have so many buffer sets, which all algorithms share."""
        self._shared.rotate(sets)

    def enqueue(self, stream: Stream, index: int) -> None:
        self._shared.enqueue_by(self._multiplication, stream, index)

    def verify(self) -> Verification:
        return self._shared.verify()

    def close(self) -> None:
        """Give back what the algorithm needs; the operands are others' as well."""
        self._multiplication.close()
