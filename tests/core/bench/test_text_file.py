from __future__ import annotations

from pathlib import Path

import pytest

from cudakit.core.bench.text_file import read_text
from cudakit.errors import InputError


def test_a_byte_order_mark_is_not_part_of_the_text(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"\xef\xbb\xbf4 4 4\r\n")

    assert read_text(file, hint="") == "4 4 4\r\n"


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="none cannot be read: No such file"):
        read_text(tmp_path / "none", hint="")
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        read_text(tmp_path, hint="")


def test_what_is_no_text_is_refused_with_the_hint(tmp_path: Path) -> None:
    file = tmp_path / "image"
    file.write_bytes(b"\x89PNG\xff")

    with pytest.raises(InputError, match="is not a text file") as caught:
        read_text(file, hint="write one")
    assert caught.value.hint == "write one"
