"""Convert Columns to texts, and join texts in chunks, for exports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

import numpy as np

from cudakit.report.document import Array

Texts: TypeAlias = Callable[[Array], list[str]]

_CHUNK_CHARACTERS = 64 * 1024


def join_in_chunks(texts: Iterable[str]) -> Iterator[str]:
    """Join texts into chunks of about 64 KiB."""
    pending_texts: list[str] = []
    character_count = 0
    for text in texts:
        pending_texts.append(text)
        character_count += len(text)
        if character_count >= _CHUNK_CHARACTERS:
            yield "".join(pending_texts)
            pending_texts, character_count = [], 0
    yield "".join(pending_texts)


def is_address(name: str, array: Array) -> bool:
    """Return whether an array holds addresses, which are written in hexadecimal."""
    return array.dtype.kind == "u" and (name == "address" or name.endswith("_address"))


def text_decoder(texts: Iterable[str], *, unknown_text: str) -> Texts:
    """Return a function from an array of ids to their texts; ``unknown_text`` is the text of any other id."""
    text_by_index = np.array([*texts, unknown_text], dtype=object)
    last_index = len(text_by_index) - 1

    def decode(ids: Array) -> list[str]:
        text_indices = ids.astype(np.int64)
        texts: list[str] = text_by_index[
            np.where((text_indices >= 0) & (text_indices < last_index), text_indices, last_index)
        ].tolist()
        return texts

    return decode
