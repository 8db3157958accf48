"""Limits of the memory and the time that one snapshot file can cost.

A small file can describe a large snapshot: compression repeats bytes, and a pickle can use one list or
dictionary many times. So a file gets one budget for all of its devices and tables, in proportion to its size.
In real snapshots an event takes 7 bytes of a compressed file and 70 of a pickle, or more; analyzing it needs
about 300 bytes and 2 microseconds. A file of 5 MB is analyzed within 10 seconds and 1.5 GB.
"""

from __future__ import annotations

from cudakit.errors import SnapshotError

_MIB = 1 << 20

# A dictionary of a snapshot has at most about 40 keys, and the settings about 40 values.
MAX_KEYS = 10_000
MAX_PLAIN_ITEMS = 10_000


class Budget:
    """The rows, list items, frames, characters and bytes that one file may still use.

    A row is an event, segment, block, annotation, or a distinct frame, text or pool. Every method raises
    SnapshotError if its budget is exceeded.
    """

    def __init__(
        self, file_bytes: int, content_bytes: int, memory_bytes: int | None = None
    ) -> None:
        limits_by_content = (
            10_000 + content_bytes // 8,
            10_000 + content_bytes,
            10_000 + content_bytes,
            _MIB + 200 * content_bytes,
        )
        limits_by_file = (
            1_000_000 + file_bytes // 4,
            2_000_000 + file_bytes // 2,
            500_000 + file_bytes // 8,
            64 * _MIB + 20 * file_bytes,
        )
        (
            self._remaining_rows,
            self._remaining_items,
            self._remaining_frames,
            self._remaining_characters,
        ) = map(min, limits_by_content, limits_by_file)
        self._size_text = f"{file_bytes:,} bytes"
        is_compressed = content_bytes != file_bytes
        if is_compressed:
            self._size_text += f", {content_bytes:,} decompressed"
        # Decompressing the file raises only the limits by its size.
        self._decompressing_helps = is_compressed and any(
            file_limit < content_limit
            for file_limit, content_limit in zip(limits_by_file, limits_by_content, strict=True)
        )
        max_memory_bytes = memory_share(memory_bytes)
        # Python objects of an uncompressed snapshot take at most 20 bytes per byte.
        self._max_object_bytes = min(768 * _MIB + 64 * file_bytes, max_memory_bytes)
        # Trees of real snapshots take at most 2.2 bytes per byte.
        self.tree_bytes = min(256 * _MIB + 3 * content_bytes, max_memory_bytes)

    def spend_rows(self, count: int) -> None:
        """Count rows of the tables of a snapshot."""
        self._remaining_rows -= count
        if self._remaining_rows < 0:
            raise self._expansion_error()

    def spend_items(self, count: int) -> None:
        """Count items that are read from lists."""
        self._remaining_items -= count
        if self._remaining_items < 0:
            raise self._expansion_error()

    def spend_stacks(self, frame_count: int, character_count: int) -> None:
        """Count the frames and the characters of the distinct call stacks of a device."""
        self._remaining_frames -= frame_count
        self._remaining_characters -= character_count
        if self._remaining_frames < 0 or self._remaining_characters < 0:
            raise self._expansion_error()

    def check_objects(self, estimated_bytes: int) -> None:
        """Check an estimate of the memory that the Python objects of the content take."""
        if estimated_bytes > self._max_object_bytes:
            raise memory_error(self._max_object_bytes)

    def _expansion_error(self) -> SnapshotError:
        return SnapshotError(
            "the file describes more events, blocks or call stacks than a snapshot of its size"
            f" ({self._size_text}) can contain",
            hint="write the snapshot again"
            + ("; if you trust the file, decompress it first" if self._decompressing_helps else ""),
        )


def memory_share(memory_bytes: int | None) -> int:
    """Return the maximum bytes of the content of a file, or of its tree: half of the available memory."""
    return 1 << 62 if memory_bytes is None else memory_bytes // 2


def memory_error(limit_bytes: int) -> SnapshotError:
    """Return the error for a file whose content takes too much memory."""
    return SnapshotError(
        f"reading the file needs more than {limit_bytes // _MIB:,} MiB of memory: the limit for its size, or "
        "half of the available memory",
        hint="if you trust the file, decompress it first, or use a machine with more memory",
    )
