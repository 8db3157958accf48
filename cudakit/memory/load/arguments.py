"""Convert the argument of a pickle opcode that is a line or a text, for both pickle machines."""

from __future__ import annotations

import re

# The limit of Python's int() (sys.int_info.default_max_str_digits), whose time grows faster than the
# number of digits.
_MAX_DIGITS = 4300

_DECIMAL = re.compile(rb"-?[0-9]+")
_UNSIGNED_DECIMAL = re.compile(rb"[0-9]+")


def convert_argument(opcode: int, argument_bytes: bytes) -> bool | int | float | str:
    """Return the value of an opcode's argument, for both machines. ``raw`` is a line or the bytes of a text.

    Raises ValueError if the argument is invalid.
    """
    match chr(opcode):
        case "I" if argument_bytes in (b"00", b"01"):
            return argument_bytes == b"01"
        case "I":
            return _parse_integer(argument_bytes, _DECIMAL)
        case "L":
            return _parse_integer(argument_bytes.removesuffix(b"L"), _DECIMAL)
        case "g" | "p":
            return _parse_integer(argument_bytes, _UNSIGNED_DECIMAL)
        case "F":
            return _parse_float(argument_bytes)
        case "V":
            return _decode_printable(argument_bytes, "raw-unicode-escape")
        case "S":
            return _parse_quoted(argument_bytes)
        case "T" | "U":
            return _decode_printable(argument_bytes, "latin-1")
        case _:
            return _decode_printable(argument_bytes, "utf-8")


def _parse_integer(digits_bytes: bytes, pattern: re.Pattern[bytes]) -> int:
    if len(digits_bytes) > _MAX_DIGITS or not pattern.fullmatch(digits_bytes):
        raise ValueError("not an integer")
    return int(digits_bytes)


def _parse_float(text_bytes: bytes) -> float:
    if len(text_bytes) > _MAX_DIGITS:
        raise ValueError("not a number")
    return float(text_bytes)


def _parse_quoted(quoted_bytes: bytes) -> str:
    # Python 2 wrote quoted texts with escapes, which are not decoded here.
    if (
        len(quoted_bytes) < 2
        or quoted_bytes[:1] not in (b"'", b'"')
        or quoted_bytes[-1] != quoted_bytes[0]
    ):
        raise ValueError("not a quoted text")
    return _decode_printable(quoted_bytes[1:-1], "latin-1")


def _decode_printable(text_bytes: bytes, codec: str) -> str:
    """Decode a text; invalid bytes and lone surrogates become escapes, which any encoder accepts."""
    text = text_bytes.decode(codec, "backslashreplace")
    return text.encode("utf-8", "backslashreplace").decode()
