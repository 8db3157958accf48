"""Text files that people hand in."""

from __future__ import annotations

from pathlib import Path

from cudakit.errors import InputError
from cudakit.units import format_bytes

# No result is so large; a device that never ends, such as /dev/zero, is.
_MOST_BYTES = 256 << 20


def read_text(path: Path, *, hint: str) -> str:
    """Read a file as UTF-8, with or without a byte order mark.

    Raises InputError where it is missing, too large or no text; ``hint`` says how to make one.
    """
    content = _content(path)
    if len(content) > _MOST_BYTES:
        raise InputError(f"{path} is larger than {format_bytes(_MOST_BYTES)}", hint=hint)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{path} is not a text file", hint=hint) from None


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {error.strerror or error}", hint="check the name of the file"
        ) from None
