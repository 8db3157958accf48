"""Files of JSON that a bench wrote, as plain values."""

from __future__ import annotations

import json
from pathlib import Path

from cudakit.core.bench.text_file import read_text
from cudakit.errors import InputError


def read_saved(path: Path, *, hint: str) -> object:
    """Read the JSON of a file.

    Raises InputError, with the place of what is wrong; ``hint`` says how to make such a file.
    """
    text = read_text(path, hint=hint)
    try:
        plain: object = json.loads(text)
    except json.JSONDecodeError as error:
        end = "it ends too soon" if error.pos >= len(text.rstrip()) else error.msg
        raise InputError(
            f"{path} is not JSON: {end} (line {error.lineno}, column {error.colno})", hint=hint
        ) from None
    except RecursionError:
        raise InputError(f"{path} is not JSON of a result: too deep", hint=hint) from None
    except ValueError:  # of int: sys.set_int_max_str_digits
        raise InputError(
            f"{path} is not JSON of a result: a number is too long", hint=hint
        ) from None
    return plain
