"""What a pickle's scalars mean where that takes more than copying bytes. Both machines ask here."""

from __future__ import annotations

import re

# As many digits as Python itself reads into an integer (sys.int_info.default_max_str_digits). Above
# that, the time would not be linear in the length.
_LONGEST_NUMBER = 4300

_DECIMAL = re.compile(rb"-?[0-9]+")
_INDEX = re.compile(rb"[0-9]+")


def convert(opcode: int, raw: bytes) -> bool | int | float | str:
    """Make the value of one argument: the line of a textual opcode, or the bytes of a text.

    Raises ValueError where it is none.
    """
    match chr(opcode):
        case "I" if raw in (b"00", b"01"):
            return raw == b"01"
        case "I":
            return _integer(raw, _DECIMAL)
        case "L":
            return _integer(raw.removesuffix(b"L"), _DECIMAL)
        case "g" | "p":
            return _integer(raw, _INDEX)
        case "F":
            return _float(raw)
        case "V":
            return _printable(raw, "raw-unicode-escape")
        case "S":
            return _quoted(raw)
        case "T" | "U":
            return _printable(raw, "latin-1")
        case _:
            return _printable(raw, "utf-8")


def _integer(raw: bytes, form: re.Pattern[bytes]) -> int:
    if len(raw) > _LONGEST_NUMBER or not form.fullmatch(raw):
        raise ValueError("not an integer")
    return int(raw)


def _float(raw: bytes) -> float:
    if len(raw) > _LONGEST_NUMBER:
        raise ValueError("not a number")
    return float(raw)


def _quoted(raw: bytes) -> str:
    # Python 2 wrote these, in quotes and with escapes. The escapes stay as they are written.
    if len(raw) < 2 or raw[:1] not in (b"'", b'"') or raw[-1] != raw[0]:
        raise ValueError("not a quoted text")
    return _printable(raw[1:-1], "latin-1")


def _printable(raw: bytes, codec: str) -> str:
    """Decode to a text that every encoder accepts: what is wrong is spelled with backslashes."""
    text = raw.decode(codec, "backslashreplace")
    return text.encode("utf-8", "backslashreplace").decode()
