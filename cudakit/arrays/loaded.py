"""The kernels of one source, compiled for a device and loaded."""

from __future__ import annotations

from collections.abc import Sequence

from cudakit.gpu.api import Argument, Dim3, Kernel, Kernels, Stream

_BLOCK_THREADS = 256
# Maximum number of blocks of a launch: more would cost scheduling time, and kernels stride over all elements.
_MAX_BLOCKS = 1 << 16


class LoadedKernels:
    """The kernels of one source, loaded until ``close`` or until the device is closed."""

    def __init__(self, gpu: Kernels, source: str, names: Sequence[str]) -> None:
        self.gpu = gpu
        self._module = gpu.load(gpu.compile(source))
        self._kernels = {name: gpu.kernel(self._module, name) for name in names}

    def kernel(self, name: str) -> Kernel:
        """Return a loaded kernel by name."""
        return self._kernels[name]

    def launch(
        self, name: str, args: Sequence[Argument], stream: Stream, *, grid: int = 1, block: int = 1
    ) -> None:
        """Launch a kernel by name with a one-dimensional grid."""
        shape: Dim3 = (grid, 1, 1)
        self.gpu.launch(self._kernels[name], shape, (block, 1, 1), args, stream)

    def launch_over(self, name: str, count: int, args: Sequence[Argument], stream: Stream) -> None:
        """Launch a kernel that strides over ``count`` elements; nothing is launched for 0 elements."""
        block_count = min(-(-count // _BLOCK_THREADS), _MAX_BLOCKS)
        if block_count:
            self.launch(name, args, stream, grid=block_count, block=_BLOCK_THREADS)

    def close(self) -> None:
        """Unload the kernels, all of which must have finished."""
        self.gpu.unload(self._module)
