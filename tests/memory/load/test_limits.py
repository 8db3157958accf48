"""The error for a file that describes more than its size allows."""

from __future__ import annotations

import pytest

from cudakit.errors import SnapshotError
from cudakit.memory.load.limits import Budget

_MIB = 1 << 20


@pytest.mark.parametrize(
    ("file_bytes", "content_bytes", "size_text", "hint"),
    [
        (7_171, 7_171, "(7,171 bytes)", "write the snapshot again"),
        (771, 209_806, "(771 bytes, 209,806 decompressed)", "write the snapshot again"),
        (
            _MIB,
            50 * _MIB,
            "(1,048,576 bytes, 52,428,800 decompressed)",
            "write the snapshot again; if you trust the file, decompress it first",
        ),
    ],
)
def test_hint_names_decompression_only_if_it_raises_the_limit(
    file_bytes: int, content_bytes: int, size_text: str, hint: str
) -> None:
    with pytest.raises(SnapshotError) as caught:
        Budget(file_bytes, content_bytes).spend_rows(1 << 40)
    assert size_text in str(caught.value)
    assert caught.value.hint == hint
