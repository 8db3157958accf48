"""Files of JSON that a bench wrote, as plain values."""

from __future__ import annotations

import json
from pathlib import Path

from cudakit.errors import InputError


def read_saved(path: Path, *, hint: str) -> object:
    """Read the JSON of a file.

    Raises InputError, with the place of what is wrong; ``hint`` says how to make such a file.
    """
    text = _text(path, hint)
    try:
        plain: object = json.loads(text)
    except json.JSONDecodeError as error:
        end = "it ends too soon" if error.pos >= len(text.rstrip()) else error.msg
        raise InputError(
            f"{path} is not JSON: {end} (line {error.lineno}, column {error.colno})", hint=hint
        ) from None
    except (RecursionError, ValueError) as error:
        raise InputError(f"{path} is not JSON of a result: {error}", hint=hint) from None
    return plain


def _text(path: Path, hint: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{path} is not a text file", hint=hint) from None
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {error.strerror or error}", hint="check the name of the file"
        ) from None
