"""Convert the argument of a pickle opcode that is a line or a text, for both pickle machines."""

from __future__ import annotations

import re

# The limit of Python's int() (sys.int_info.default_max_str_digits), whose time grows faster than the
# number of digits.
_MAX_DIGITS = 4300

_DECIMAL = re.compile(rb"-?[0-9]+")
_UNSIGNED_DECIMAL = re.compile(rb"[0-9]+")


def convert_argument(opcode: int, raw: bytes) -> bool | int | float | str:
    """Return the value of an opcode's argument, for both machines. ``raw`` is a line or the bytes of a text.

    Raises ValueError if the argument is invalid.
    """
    match chr(opcode):
        case "I" if raw in (b"00", b"01"):
            return raw == b"01"
        case "I":
            return _parse_integer(raw, _DECIMAL)
        case "L":
            return _parse_integer(raw.removesuffix(b"L"), _DECIMAL)
        case "g" | "p":
            return _parse_integer(raw, _UNSIGNED_DECIMAL)
        case "F":
            return _parse_float(raw)
        case "V":
            return _decode_printable(raw, "raw-unicode-escape")
        case "S":
            return _parse_quoted(raw)
        case "T" | "U":
            return _decode_printable(raw, "latin-1")
        case _:
            return _decode_printable(raw, "utf-8")


def _parse_integer(raw: bytes, pattern: re.Pattern[bytes]) -> int:
    if len(raw) > _MAX_DIGITS or not pattern.fullmatch(raw):
        raise ValueError("not an integer")
    return int(raw)


def _parse_float(raw: bytes) -> float:
    if len(raw) > _MAX_DIGITS:
        raise ValueError("not a number")
    return float(raw)


def _parse_quoted(raw: bytes) -> str:
    # Python 2 wrote quoted texts with escapes, which are not decoded here.
    if len(raw) < 2 or raw[:1] not in (b"'", b'"') or raw[-1] != raw[0]:
        raise ValueError("not a quoted text")
    return _decode_printable(raw[1:-1], "latin-1")


def _decode_printable(raw: bytes, codec: str) -> str:
    """Decode a text; invalid bytes and lone surrogates become escapes, which any encoder accepts."""
    text = raw.decode(codec, "backslashreplace")
    return text.encode("utf-8", "backslashreplace").decode()
