"""Tables of values that repeat in a snapshot: frames, call stacks, texts, pools and streams."""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from cudakit.memory.load.tree import Handles, Tree
from cudakit.memory.snapshot import Codes, DeviceTrace, Ids, Ints
from cudakit.stacks import Frame

_T = TypeVar("_T", bound=Hashable)

# Cost of a call stack in rows of the budget, because the report has several tables of call stacks.
_ROWS_PER_STACK = 8

_POOL_STRUCT = struct.Struct("=QQ")


class Tables:
    """Tables of distinct values with their ids, which grow while columns are read.

    Ids count from 0 in the order of insertion. In all tables but ``frames``, id 0 means "none".
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self.texts: dict[str, int] = {"": 0}
        self.frames: dict[Frame, int] = {}
        # Keys are bytes, because Python's hash of bytes is keyed: a file can choose numbers so that the
        # hashes of tuples collide.
        self._stacks: dict[bytes, int] = {b"": 0}  # frame ids as int32, innermost first
        self._pools: dict[bytes, int] = {_POOL_STRUCT.pack(0, 0): 0}

    @property
    def stacks(self) -> tuple[tuple[int, ...], ...]:
        """The frame ids of each call stack, innermost first."""
        return tuple(tuple(memoryview(key).cast("i")) for key in self._stacks)

    @property
    def pools(self) -> tuple[tuple[int, int], ...]:
        """The id of each pool: a pair of numbers."""
        return tuple(_POOL_STRUCT.unpack(key) for key in self._pools)

    def text_ids(self, handles: Handles) -> Ids:
        """Return the ids of texts; missing values and other types count as the empty text."""
        return self._table_ids(handles, self.texts, self.decode_texts)

    def stack_ids(self, handles: Handles) -> Ids:
        """Return the ids of call stacks (lists of frame dictionaries); a missing stack counts as empty."""
        return self._table_ids(handles, self._stacks, self._decode_stacks)

    def pool_ids(self, handles: Handles) -> Ids:
        """Return the ids of pools, which are pairs of 64-bit integers; other values are the default pool."""
        return self._table_ids(handles, self._pools, self._decode_pools)

    def spend_stacks(self, devices: Iterable[DeviceTrace]) -> None:
        """Count the distinct call stacks of each device against the budget of the file."""
        frame_lengths = [len(frame.name) + len(frame.filename) for frame in self.frames]
        stacks = self.stacks
        n_frames = np.array([len(stack) for stack in stacks])
        n_characters = np.array([sum(map(frame_lengths.__getitem__, stack)) for stack in stacks])
        for device in devices:
            is_used = np.zeros(len(stacks), np.bool_)
            for column_rows in (device.events, device.segments, device.blocks):
                is_used[column_rows.stack] = True
            self._tree.budget.spend_rows(_ROWS_PER_STACK * int(is_used.sum()))
            self._tree.budget.spend_stacks(
                int(n_frames[is_used].sum()), int(n_characters[is_used].sum())
            )

    def codes(self, handles: Handles, code_of_word: Mapping[str, int], default: int) -> Codes:
        """Return the code of each word, and the default for any other value."""
        text_ids, representatives = self._tree.intern(handles)
        word_codes = [
            code_of_word.get(word, default) for word in self.decode_texts(representatives)
        ]
        return np.array(word_codes or [default], np.uint8)[text_ids]

    def decode_texts(self, handles: Handles) -> list[str]:
        """Return the texts of handles; other values count as the empty text."""
        self._tree.budget.spend_rows(len(handles))
        return self._tree.texts(handles)

    def _table_ids(
        self, handles: Handles, id_by_item: dict[_T, int], decode: Callable[[Handles], Sequence[_T]]
    ) -> Ids:
        local_ids, representatives = self._tree.intern(handles)
        global_ids = [
            id_by_item.setdefault(item, len(id_by_item)) for item in decode(representatives)
        ]
        return np.array(global_ids, np.int32)[local_ids] if global_ids else local_ids

    def _decode_stacks(self, handles: Handles) -> list[bytes]:
        counts, frames = self._tree.children(self._list_handles(handles))
        frame_ids = self._frame_ids(frames)
        id_bytes, ends = frame_ids.tobytes(), np.cumsum(counts) * frame_ids.itemsize
        starts = ends - counts * frame_ids.itemsize
        return [
            id_bytes[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        ]

    def _list_handles(self, handles: Handles) -> Handles:
        """Return the handles of lists; 0 in place of every other handle."""
        is_list = [bool(handle) and self._tree.is_list(handle) for handle in handles.tolist()]
        return np.where(np.array(is_list, np.bool_), handles, np.uint64(0))

    def _frame_ids(self, handles: Handles) -> Ids:
        return self._table_ids(handles, self.frames, self._decode_frames)

    def _decode_frames(self, handles: Handles) -> list[Frame]:
        self._tree.budget.spend_rows(3 * len(handles))
        function_names = self._tree.texts(self._tree.column(handles, "name"))
        files = self._tree.texts(self._tree.column(handles, "filename"))
        lines, _ = self._tree.integers(self._tree.column(handles, "line"))
        return [
            Frame(*frame_fields)
            for frame_fields in zip(function_names, files, lines.tolist(), strict=True)
        ]

    def _decode_pools(self, handles: Handles) -> list[bytes]:
        self._tree.budget.spend_rows(len(handles))
        counts, pool_items = self._tree.children(self._list_handles(handles))
        numbers, is_integer = self._tree.integers(pool_items)
        has_two_numbers = counts == 2
        word_indices = (np.cumsum(counts) - counts)[has_two_numbers][:, np.newaxis] + np.arange(2)
        is_pool = is_integer[word_indices].all(axis=1, keepdims=True)
        pool_ids = np.zeros((len(handles), 2), np.uint64)
        pool_ids[has_two_numbers] = np.where(
            is_pool, numbers[word_indices].view(np.uint64), np.uint64(0)
        )
        pair_bytes = pool_ids.tobytes()
        return [
            pair_bytes[offset : offset + _POOL_STRUCT.size]
            for offset in range(0, len(pair_bytes), _POOL_STRUCT.size)
        ]


class StreamNumbers:
    """Numbers the streams of one device in order of appearance; 0 is the default stream."""

    def __init__(self) -> None:
        self._number_by_stream: dict[int, int] = {0: 0}

    @property
    def raw_streams(self) -> tuple[int, ...]:
        """The raw handle of each stream, by number."""
        return tuple(self._number_by_stream)

    def number_streams(self, raw_streams: Ints) -> Ids:
        """Return the number of each raw stream handle."""
        distinct_streams, first_indices, inverse = np.unique(
            raw_streams, return_index=True, return_inverse=True
        )
        for stream in distinct_streams[np.argsort(first_indices)].tolist():
            self._number_by_stream.setdefault(stream, len(self._number_by_stream))
        return np.array(
            [self._number_by_stream[stream] for stream in distinct_streams.tolist()], np.int32
        )[inverse]
