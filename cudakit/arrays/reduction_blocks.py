"""The division of a reduction into blocks, threads and vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cudakit.arrays.expressions.dtypes import DType
from cudakit.arrays.layout import Layout
from cudakit.gpu.api.arrays import ArrayView

_SHORT_BLOCK, _LONG_BLOCK = 256, 1024  # number of threads of a block
# Minimum number of vectors that each thread of a split reduction reads.
_VECTORS_PER_THREAD = 4
_THREAD_ELEMENTS = 8  # maximum number of elements that one thread reduces alone
# Maximum number of blocks of a split reduction: about the number that a large GPU runs at once.
_MAX_BLOCKS = 1024
# A reduction of all elements with at least this number of vectors has fewer blocks, with more threads each.
# The three numbers were measured on an H200, on which two such blocks run on each multiprocessor.
_LARGE_VECTOR_COUNT, _LARGE_BLOCK, _LARGE_MAX_BLOCKS = 1 << 17, 512, 264
_MANY_OUTPUTS, _MANY_OUTPUTS_VECTORS = 4096, 32
_FEW_OUTPUTS = 64  # with fewer outputs than this, a block of more threads occupies the GPU better
_WARP = 32
_VECTOR_BYTES = 16
_COUNTER_BYTES = 4


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The division of a reduction into blocks and threads."""

    columns: int  # number of outputs that a block computes
    threads: int  # number of threads of a block
    width: int  # number of elements of a vector
    chunk: int  # number of elements of each output that one block reduces
    splits: int  # number of blocks that reduce one output
    are_outputs_adjacent: bool  # whether adjacent threads compute adjacent outputs

    def scratch_bytes(self, outputs: int, accumulator: DType) -> int:
        """Return the bytes of counters and partial results; 0 if one block reduces each output."""
        if self.splits == 1:
            return 0
        tile_count = -(-outputs // self.columns)
        # Counters come first, padded so that the partial results are aligned.
        counter_bytes = -(-tile_count * _COUNTER_BYTES // _VECTOR_BYTES) * _VECTOR_BYTES
        return counter_bytes + outputs * self.splits * accumulator.compute.itemsize


def choose_block_shape(
    output_layout: Layout,
    reduced_layout: Layout,
    views: Sequence[ArrayView],
    dtypes: Sequence[DType],
) -> BlockShape:
    """Return the numbers of threads and blocks that reduce each output, and the vector width."""
    element_bytes = [dtype.size_bytes for dtype in dtypes]
    width = _vector_width(output_layout, reduced_layout, views, element_bytes)
    reduced_count, threads = max(reduced_layout.count, 1), _SHORT_BLOCK
    max_blocks = _MAX_BLOCKS
    is_column_sum = width == 1 and _are_outputs_adjacent(
        output_layout, reduced_layout, element_bytes
    )
    if reduced_count <= _THREAD_ELEMENTS and output_layout.count > 1:
        columns = threads  # one thread reduces one output
    elif is_column_sum:
        columns = _WARP
    elif output_layout.count > 1 and reduced_count <= _WARP * width * _vectors_of_warp(
        output_layout.count
    ):
        columns = threads // _WARP  # one warp reduces one output
    else:
        columns = 1
        is_one_block_faster = reduced_count <= _LONG_BLOCK * _VECTORS_PER_THREAD * width
        if (
            is_one_block_faster
            and reduced_count > threads * width
            and output_layout.count < _FEW_OUTPUTS
        ):
            threads = _LONG_BLOCK
        elif output_layout.count == 1 and reduced_count >= _LARGE_VECTOR_COUNT * width:
            threads, max_blocks = _LARGE_BLOCK, _LARGE_MAX_BLOCKS
    threads_per_output = threads // columns
    tile_count = max(-(-output_layout.count // columns), 1)
    smallest_chunk = threads_per_output * width * _VECTORS_PER_THREAD
    splits = max(1, min(-(-reduced_count // smallest_chunk), max_blocks // tile_count))
    chunk = -(-reduced_count // splits)
    chunk = -(-chunk // (threads_per_output * width)) * threads_per_output * width
    is_adjacent = is_column_sum or columns == threads
    return BlockShape(columns, threads, width, chunk, -(-reduced_count // chunk), is_adjacent)


def _vectors_of_warp(outputs: int) -> int:
    """Return the largest number of vectors per thread with which one warp should reduce an output.

    With many outputs, warps occupy the whole GPU, and blocks would only add synchronization.
    """
    return _MANY_OUTPUTS_VECTORS if outputs >= _MANY_OUTPUTS else _VECTORS_PER_THREAD


def _vector_width(
    output_layout: Layout,
    reduced_layout: Layout,
    views: Sequence[ArrayView],
    element_bytes: Sequence[int],
) -> int:
    """Return the number of adjacent reduced elements that a thread can load from every array at once."""
    width = min(8, _VECTOR_BYTES // min(element_bytes))
    while width > 1:
        is_allowed = reduced_layout.sizes[0] % width == 0 or (
            len(reduced_layout.sizes) == 1 and output_layout.count == 1
        )
        for index, (view, size_bytes) in enumerate(zip(views, element_bytes, strict=True)):
            innermost_stride, *other_strides = (
                *reduced_layout.strides[index],
                *output_layout.strides[index],
            )
            alignment = min(width * size_bytes, _VECTOR_BYTES)
            is_aligned = all(offset % alignment == 0 for offset in (view.ptr, *other_strides))
            is_allowed &= innermost_stride == 0 or (innermost_stride == size_bytes and is_aligned)
        if is_allowed:
            break
        width //= 2
    return width


def _are_outputs_adjacent(
    output_layout: Layout, reduced_layout: Layout, element_bytes: Sequence[int]
) -> bool:
    """Return whether adjacent threads should compute adjacent outputs, as in a sum of columns."""
    return output_layout.count >= _WARP and any(
        output_layout.strides[index][0] == size_bytes
        and reduced_layout.strides[index][0] != size_bytes
        for index, size_bytes in enumerate(element_bytes)
    )
