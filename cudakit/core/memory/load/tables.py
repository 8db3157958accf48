"""Tables of values that repeat in a snapshot: frames, call stacks, texts, pools and streams."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from itertools import islice
from typing import TypeVar

import numpy as np

from cudakit.core.memory.load.tree import Handles, Tree, expansion_error
from cudakit.core.memory.snapshot import Codes, Ids, Ints
from cudakit.document import Frame

_T = TypeVar("_T", bound=Hashable)

# Call stacks share frames, so their text can be longer than the file; in real snapshots by less than this
# factor.
_MAX_EXPANSION = 200


class Tables:
    """Tables of distinct values with their ids, which grow while columns are read.

    Ids count from 0 in the order of insertion. In all tables but ``frames``, id 0 means "none".
    """

    def __init__(self, tree: Tree, size_bytes: int) -> None:
        self._tree = tree
        self._size_bytes = size_bytes
        self._lengths: list[int] = []  # characters of the name and file name of each frame
        self._characters = 0  # total of all call stacks
        self.texts: dict[str, int] = {"": 0}
        self.frames: dict[Frame, int] = {}
        self.stacks: dict[tuple[int, ...], int] = {(): 0}  # frame ids, innermost first
        self.pools: dict[tuple[int, int], int] = {(0, 0): 0}

    def text_ids(self, handles: Handles) -> Ids:
        """Return the ids of texts; missing values and other types count as the empty text."""
        return self._ids(handles, self.texts, self.decode_texts)

    def stack_ids(self, handles: Handles) -> Ids:
        """Return the ids of call stacks, which are lists of frame dictionaries; a missing one is empty.

        Raises SnapshotError if the text of all call stacks is much longer than the file.
        """
        return self._ids(handles, self.stacks, self._decode_stacks)

    def pool_ids(self, handles: Handles) -> Ids:
        """Return the ids of pools, which are pairs of integers; a missing one is the default pool."""
        return self._ids(handles, self.pools, self._decode_pools)

    def codes(self, handles: Handles, code_of_word: Mapping[str, int], default: int) -> Codes:
        """Return the code of each word, and the default for any other value."""
        ids, representatives = self._tree.intern(handles)
        codes = [code_of_word.get(word, default) for word in self.decode_texts(representatives)]
        return np.array(codes or [default], np.uint8)[ids]

    def decode_texts(self, handles: Handles) -> list[str]:
        """Return the texts of handles. Slow: makes one call per handle."""
        values = (self._tree.plain(handle) if handle else "" for handle in handles.tolist())
        return [item if isinstance(item, str) else "" for item in values]

    def _ids(
        self, handles: Handles, table: dict[_T, int], decode: Callable[[Handles], list[_T]]
    ) -> Ids:
        local_ids, representatives = self._tree.intern(handles)
        global_ids = [table.setdefault(item, len(table)) for item in decode(representatives)]
        return np.array(global_ids, np.int32)[local_ids] if global_ids else local_ids

    def _decode_stacks(self, handles: Handles) -> list[tuple[int, ...]]:
        is_list = np.array(
            [bool(handle) and self._tree.is_list(handle) for handle in handles.tolist()], np.bool_
        )
        counts, frames = self._tree.children(np.where(is_list, handles, np.uint64(0)))
        frame_ids = self._frame_ids(frames).tolist()
        self._check_text_length(frame_ids)
        ends = np.cumsum(counts).tolist()
        return [
            tuple(frame_ids[end - count : end])
            for count, end in zip(counts.tolist(), ends, strict=True)
        ]

    def _check_text_length(self, frame_ids: list[int]) -> None:
        new_frames = islice(self.frames, len(self._lengths), None)
        self._lengths += (len(frame.name) + len(frame.filename) for frame in new_frames)
        self._characters += sum(map(self._lengths.__getitem__, frame_ids))
        if self._characters > max(_MAX_EXPANSION * self._size_bytes, 1 << 20):
            raise expansion_error(self._size_bytes)

    def _frame_ids(self, handles: Handles) -> Ids:
        return self._ids(handles, self.frames, self._decode_frames)

    def _decode_frames(self, handles: Handles) -> list[Frame]:
        names = self.decode_texts(self._tree.column(handles, "name"))
        files = self.decode_texts(self._tree.column(handles, "filename"))
        lines, _ = self._tree.integers(self._tree.column(handles, "line"))
        return [Frame(*parts) for parts in zip(names, files, lines.tolist(), strict=True)]

    def _decode_pools(self, handles: Handles) -> list[tuple[int, int]]:
        values = [self._tree.plain(handle) if handle else None for handle in handles.tolist()]
        return [_parse_pool(item) for item in values]


def _parse_pool(item: object) -> tuple[int, int]:
    if isinstance(item, (list, tuple)) and len(item) == 2:
        first, second = item
        if isinstance(first, int) and isinstance(second, int):
            return first, second
    return 0, 0


class StreamNumbers:
    """Numbers the streams of one device in order of appearance; 0 is the default stream."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {0: 0}

    @property
    def raw(self) -> tuple[int, ...]:
        """The raw handle of each stream, by number."""
        return tuple(self._numbers)

    def number(self, raw: Ints) -> Ids:
        """Return the number of each raw stream handle."""
        values, first, inverse = np.unique(raw, return_index=True, return_inverse=True)
        for value in values[np.argsort(first)].tolist():
            self._numbers.setdefault(value, len(self._numbers))
        return np.array([self._numbers[v] for v in values.tolist()], np.int32)[inverse]
