"""Compare: the number of wrong words of a buffer, and a sample of its elements.

The comparison runs on the device; only its result is copied to the host.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cudakit.errors import UsageError
from cudakit.gpu.api import ComputeDevice, Ptr, Stream
from cudakit.gpu.api.elements import Element, Floats, decode
from cudakit.gpu.api.host_kernels import Launch, host_kernel
from cudakit.kernels.loaded import LoadedKernels

_WORD_BYTES = 4

SOURCE = r"""
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define OVER(count) \
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < (count); i += (u64)gridDim.x * blockDim.x)

extern "C" __global__ void cudakit_differ(u64* wrong, const u32* one, const u32* other, u64 count) {
    u64 found = 0;
    OVER(count) found += one[i] != other[i];
    if (found) atomicAdd(wrong, found);
}

extern "C" __global__ void cudakit_differ_from_word(u64* wrong, const u32* words, u32 word, u64 count) {
    u64 found = 0;
    OVER(count) found += words[i] != word;
    if (found) atomicAdd(wrong, found);
}

extern "C" __global__ void cudakit_gather(
    void* to, const void* from, const u64* places, u64 count, int size) {
    OVER(count) switch (size) {
        case 1: ((u8*)to)[i] = ((const u8*)from)[places[i]]; break;
        case 2: ((u16*)to)[i] = ((const u16*)from)[places[i]]; break;
        case 4: ((u32*)to)[i] = ((const u32*)from)[places[i]]; break;
        case 8: ((u64*)to)[i] = ((const u64*)from)[places[i]]; break;
    }
}
"""


class Compare:
    """Comparisons on one device. Each call is stream-ordered, and waits for its result."""

    def __init__(self, gpu: ComputeDevice) -> None:
        self._gpu = gpu
        names = ("cudakit_differ", "cudakit_differ_from_word", "cudakit_gather")
        self._kernels = LoadedKernels(gpu, SOURCE, names)

    def count_different(self, one: Ptr, other: Ptr, size_bytes: int, stream: Stream) -> int:
        """Count the 32-bit words in which two buffers differ."""
        return self._count("cudakit_differ", (one, other), size_bytes, stream)

    def count_not_equal(self, ptr: Ptr, word: int, size_bytes: int, stream: Stream) -> int:
        """Count the 32-bit words that are not the given one."""
        return self._count("cudakit_differ_from_word", (ptr, np.uint32(word)), size_bytes, stream)

    def sample(
        self, ptr: Ptr, element: Element, places: npt.NDArray[np.int64], stream: Stream
    ) -> Floats:
        """Return the values of the elements with these indices, as fp64."""
        gpu, size = self._gpu, element.size_bytes
        if not len(places):
            return np.empty(0)
        with _Scratch(gpu, len(places) * (8 + size)) as scratch:
            scratch.view[: 8 * len(places)] = places.astype(np.uint64).tobytes()
            gpu.copy(scratch.device, scratch.host, 8 * len(places), stream)
            out = Ptr(scratch.device + 8 * len(places))
            args = (out, ptr, scratch.device, np.uint64(len(places)), np.int32(size))
            self._kernels.launch_over("cudakit_gather", len(places), args, stream)
            gpu.copy(scratch.host, out, size * len(places), stream)
            gpu.sync_stream(stream)
            raw: npt.NDArray[Any] = np.frombuffer(bytes(scratch.view), element.bits, len(places))
        return decode(raw, element)

    def close(self) -> None:
        """Unload the kernels."""
        self._kernels.close()

    def _count(
        self, name: str, what: tuple[Ptr | np.generic, ...], size_bytes: int, stream: Stream
    ) -> int:
        count, rest = divmod(size_bytes, _WORD_BYTES)
        if rest:
            raise UsageError(f"{size_bytes} bytes are no whole number of 32-bit words")
        with _Scratch(self._gpu, 8) as scratch:
            self._gpu.fill(scratch.device, 0, 8, stream)
            args = (scratch.device, *what, np.uint64(count))
            self._kernels.launch_over(name, count, args, stream)
            self._gpu.copy(scratch.host, scratch.device, 8, stream)
            self._gpu.sync_stream(stream)
            return int(np.frombuffer(scratch.view, np.uint64)[0])


class _Scratch:
    """Equal amounts of device and pinned host memory, within a block."""

    def __init__(self, gpu: ComputeDevice, size_bytes: int) -> None:
        self._gpu = gpu
        self.device = gpu.malloc(size_bytes)
        self.host = gpu.host_malloc(size_bytes)
        self.view = gpu.host_view(self.host, size_bytes)

    def __enter__(self) -> _Scratch:
        return self

    def __exit__(self, *_: object) -> None:
        self._gpu.free(self.device)
        self._gpu.host_free(self.host)


@host_kernel("cudakit_differ")
def _differ(launch: Launch, wrong: Ptr, one: Ptr, other: Ptr, count: np.uint64) -> None:
    found = launch.read(one, np.uint32, int(count)) != launch.read(other, np.uint32, int(count))
    _add(launch, wrong, int(np.count_nonzero(found)))


@host_kernel("cudakit_differ_from_word")
def _differ_from_word(
    launch: Launch, wrong: Ptr, words: Ptr, word: np.uint32, count: np.uint64
) -> None:
    found = launch.read(words, np.uint32, int(count)) != word
    _add(launch, wrong, int(np.count_nonzero(found)))


@host_kernel("cudakit_gather")
def _gather(
    launch: Launch, to: Ptr, from_: Ptr, places: Ptr, count: np.uint64, size: np.int32
) -> None:
    raw = np.dtype(f"u{size}")
    wanted = launch.read(places, np.uint64, int(count))
    source = launch.read(from_, raw, int(wanted.max()) + 1)
    launch.write(to, raw, int(count))[:] = source[wanted]


def _add(launch: Launch, wrong: Ptr, found: int) -> None:
    if found:
        launch.atomic(wrong, np.uint64)[:] += np.uint64(found)
