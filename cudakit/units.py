"""Format and parse bytes, seconds, counts, rates and ratios; capitalize sentences."""

from __future__ import annotations

import re
from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Unavailable:
    """A value that is not available, and the reason."""

    reason: str


_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
# The pattern accepts at most 40 digits, which is more than any size of memory has, and less than int() and
# float() accept.
_SIZE_PATTERN = re.compile(
    r"\s*([0-9]{1,40}(?:\.[0-9]{1,40})?)\s*([KMGTPE]?)(i?)(B?)\s*", re.IGNORECASE
)


def format_bytes(size_bytes: int) -> str:
    """Format a size in binary units with three significant digits: ``1.50 MiB``."""
    magnitude = float(abs(size_bytes))
    sign = "-" if size_bytes < 0 else ""
    for unit in _BINARY_UNITS:
        if magnitude < 1024 or unit == _BINARY_UNITS[-1]:
            break
        magnitude /= 1024
    if unit == "B":
        return f"{sign}{int(magnitude)} B"
    # 1023.996 KiB would be shown as 1024 KiB, so it is shown as 1.00 MiB.
    if round(magnitude) >= 1024 and unit != _BINARY_UNITS[-1]:
        magnitude, unit = 1.0, _BINARY_UNITS[_BINARY_UNITS.index(unit) + 1]
    decimals = 2 if magnitude < 10 else 1 if magnitude < 100 else 0
    return f"{sign}{magnitude:.{decimals}f} {unit}"


def round_up_bytes(size_bytes: int) -> int:
    """Return the smallest size of at least ``size_bytes`` that ``format_bytes`` prints without loss.

    A printed minimum would otherwise be too small when a user passes the printed value to an option.
    """
    number_text, unit = format_bytes(size_bytes).split(" ")
    decimals = len(number_text.partition(".")[2])
    steps = int(number_text.replace(".", ""))
    printed_bytes, next_bytes = (
        parse_bytes(f"{count / 10**decimals:.{decimals}f} {unit}") for count in (steps, steps + 1)
    )
    return printed_bytes if printed_bytes >= size_bytes else next_bytes


def parse_bytes(text: str) -> int:
    """Parse ``10GiB``, ``512M`` or plain bytes; K, M, G, T, P and E are powers of 1024.

    Raises ValueError for other text.
    """
    match = _SIZE_PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size; write for example 512MiB or 10GiB")
    number, letter = match[1], match[2].upper()
    factor = 1024 ** ("KMGTPE".index(letter) + 1 if letter else 0)
    return int(float(number) * factor) if "." in number else int(number) * factor


def format_seconds(seconds: float, *, pad: bool = False) -> str:
    """Format a duration with the unit that fits: ``1.2 ms``, ``3.4 s``, ``2 min 05 s``.

    ``pad`` keeps trailing zeros, as in ``1.20 ms``, so that all numbers of a column have three digits.
    """
    magnitude = abs(seconds)
    sign = "-" if seconds < 0 else ""
    if magnitude >= 60:
        minutes, remaining_seconds = divmod(round(magnitude), 60)
        hours, minutes = divmod(minutes, 60)
        if hours:
            return f"{sign}{hours} h {minutes:02d} min"
        return f"{sign}{minutes} min {remaining_seconds:02d} s"
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us"), (1e9, "ns")):
        text = _three_digits(magnitude * factor, pad=pad)  # rounds 0.9999 to 1
        if float(text) >= 1 or unit == "ns":
            return f"{sign}{text} {unit}"
    raise AssertionError("unreachable")


def _three_digits(number: float, *, pad: bool) -> str:
    text = f"{number:.3g}"
    # Numbers from 100 on have three digits anyway, and numbers below 1 are not padded.
    if not pad or not 1 <= float(text) < 100:
        return text
    return f"{float(text):.{1 if float(text) >= 10 else 2}f}"


def format_count(count: int) -> str:
    """Format a count with separated thousands: ``1,139,322``."""
    return f"{count:,}"


def format_rate(number: float, unit: str, *, pad: bool = False) -> str:
    """Format a rate with a decimal prefix: ``3.35 TB/s``. ``pad`` keeps trailing zeros."""
    prefixes = ["", "k", "M", "G", "T", "P"]
    while abs(number) >= 999.5 and len(prefixes) > 1:
        number /= 1000
        del prefixes[0]
    return f"{_three_digits(number, pad=pad)} {prefixes[0]}{unit}/s"


def format_ratio(ratio: float) -> str:
    """Format a ratio as a percentage: ``12.3%``; a nonzero ratio is never shown as zero."""
    percent = ratio * 100
    if 0 < abs(percent) < 0.1:
        return "<0.1%" if percent > 0 else ">-0.1%"
    return f"{percent:.1f}%" if abs(percent) < 99.95 else f"{percent:.0f}%"


def capitalized(sentence: str) -> str:
    """Return a sentence with a capital letter at its start; the other letters stay, unlike capitalize()."""
    return f"{sentence[:1].upper()}{sentence[1:]}"


def parse_ratio(text: str) -> float:
    """Parse ``5%`` or ``0.05`` as 0.05. Raises ValueError for other text and for negative ratios."""
    number = text.strip()
    try:
        ratio = float(number[:-1]) / 100 if number.endswith("%") else float(number)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio < float("inf"):
        raise ValueError(f"{text!r} is not a percentage; write for example 5%")
    return ratio
