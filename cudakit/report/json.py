"""Render a Result as JSON, for ``--json`` of every command.

The input is the Result, not a Document.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from cudakit.errors import CudakitError
from cudakit.serialize import to_plain

# Characters that are escaped: UTF-8 cannot encode lone surrogates. JSON does not escape C1 control
# characters, which terminals obey, and format characters such as bidirectional controls, which hide text.
_UNSAFE_CHARACTERS = re.compile(
    "[\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)

# Number of indented levels: with four, each row of a list in a list of devices is a line.
_INDENTED_LEVELS = 4


def render(result: object) -> str:
    """Return a Result as a JSON object with the outer levels indented by 2, and a newline at the end.

    ``serialize.to_plain`` defines the form of each value. The text is valid UTF-8. Raises TypeError for
    values without a JSON form.
    """
    return _json_text(to_plain(result))


def render_line(result: object) -> str:
    """Return a Result as JSON on one line, for streams of results (NDJSON)."""
    return _json_text(to_plain(result), indented_levels=0)


def render_error(error: CudakitError, exit_code: int) -> str:
    """Return an error as JSON: ``{"error": {"kind", "message", "hint", "exit_code"}}``.

    ``exit_code`` is that of the process.
    """
    return _json_text(
        {
            "error": {
                "kind": type(error).__name__,
                "message": error.message,
                "hint": error.hint,
                "exit_code": exit_code,
            }
        }
    )


def _json_text(json_value: object, *, indented_levels: int = _INDENTED_LEVELS) -> str:
    text = "".join(_indented_pieces(json_value, 0, indented_levels))
    return _UNSAFE_CHARACTERS.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n"


def _indented_pieces(json_value: object, depth: int, levels: int) -> Iterator[str]:
    """Yield the text with indented outer levels; each deeper value is one line, formatted by ``json``."""
    members: list[tuple[str, object]]
    if depth < levels and json_value and isinstance(json_value, dict):
        brackets = "{}"
        members = [
            (f"{json.dumps(key, ensure_ascii=False)}: ", item) for key, item in json_value.items()
        ]
    elif depth < levels and json_value and isinstance(json_value, list):
        brackets, members = "[]", [("", item) for item in json_value]
    else:
        yield json.dumps(json_value, ensure_ascii=False, allow_nan=False)
        return
    margin = "  " * depth
    for index, (key_text, item) in enumerate(members):
        yield f"{',' if index else brackets[0]}\n{margin}  {key_text}"
        yield from _indented_pieces(item, depth + 1, levels)
    yield f"\n{margin}{brackets[1]}"
