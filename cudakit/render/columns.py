"""Convert Columns to texts, and join texts in chunks, for exports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

import numpy as np

from cudakit.document import Array

Texts: TypeAlias = Callable[[Array], list[str]]

_CHUNK_CHARACTERS = 64 * 1024


def chunks(texts: Iterable[str]) -> Iterator[str]:
    """Join texts into chunks of about 64 KiB."""
    pending_texts: list[str] = []
    size = 0
    for text in texts:
        pending_texts.append(text)
        size += len(text)
        if size >= _CHUNK_CHARACTERS:
            yield "".join(pending_texts)
            pending_texts, size = [], 0
    yield "".join(pending_texts)


def is_address(name: str, array: Array) -> bool:
    """Return whether an array holds addresses, which are written in hexadecimal."""
    return array.dtype.kind == "u" and (name == "address" or name.endswith("_address"))


def decoder(texts: Iterable[str], *, unknown: str) -> Texts:
    """Return a function from an array of ids to their texts; ``unknown`` is the text of any other id."""
    table = np.array([*texts, unknown], dtype=object)
    last_index = len(table) - 1

    def decode(ids: Array) -> list[str]:
        index = ids.astype(np.int64)
        texts: list[str] = table[
            np.where((index >= 0) & (index < last_index), index, last_index)
        ].tolist()
        return texts

    return decode
