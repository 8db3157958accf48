"""How the values of a configuration are read and written, one pair of functions for each kind."""

from __future__ import annotations

import re
from itertools import pairwise

from cudakit.allocator_config.reserve import Reserve
from cudakit.allocator_config.rules import (
    BACKENDS,
    DIVISION_SLOTS,
    LARGEST_MIB,
    MIB,
    is_power_of_two,
)
from cudakit.allocator_config.text import Entry, Piece
from cudakit.errors import InputError

_WHOLE = re.compile(r"[+-]?[0-9]{1,400}")  # Python reads no number of 5000 digits
_SHORT = re.compile(r"\+?[0-9]{1,40}")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_DIVISIONS = "divisions as one number (4) or by intervals in MiB ([256:1,512:2,>:4])"
_RESERVE = "a share of the device's memory above 0, up to 1.125 (0.5), or GiB (40G)"


def read_switch(entry: Entry) -> bool:
    """Read True or False, written so."""
    if entry.word("True or False") not in ("True", "False"):
        raise entry.takes("True or False")
    return entry.value.text == "True"


def read_backend(entry: Entry) -> str:
    """Read who allocates."""
    if entry.word(" or ".join(BACKENDS)) not in BACKENDS:
        raise entry.takes(" or ".join(BACKENDS))
    return entry.value.text


def read_size(entry: Entry) -> int:
    """Read MiB as bytes."""
    return _whole(entry, "a whole number of MiB, without a unit", LARGEST_MIB) * MIB


def read_size_above_0(entry: Entry) -> int:
    """Read MiB as bytes, where 0 is no value to give."""
    size = read_size(entry)
    if size == 0:
        raise entry.takes("a whole number of MiB above 0")
    return size


def read_count(entry: Entry) -> int:
    """Read a whole number."""
    return _whole(entry, "a whole number", (1 << 63) - 1)


def read_number(entry: Entry) -> float:
    """Read a number with or without a fraction."""
    if _NUMBER.fullmatch(entry.word("a number")) is None:
        raise entry.takes("a number")
    return float(entry.value.text)


def read_threshold(entry: Entry) -> float:
    """Read a number between 0 and 1, where 0 is no value to give."""
    threshold = read_number(entry)
    if not 0 < threshold < 1:
        raise entry.takes("a number above 0 and below 1")
    return threshold


def read_divisions(entry: Entry) -> tuple[int, ...]:
    """Read one number for all slots, or the slots that are named and, with ``>``, all after them.

    The first that is named counts for all before it too; a slot between two that are named, and left
    out, has none (AcceleratorAllocatorConfig::parseRoundUpPower2Divisions).
    """
    if entry.pairs is None:
        return (_divisions(entry, entry.value, least=1),) * DIVISION_SLOTS
    if not entry.pairs:
        raise entry.value.refused(f"{entry.key.text} takes {_DIVISIONS}, not an empty list")
    slots, last = [0] * DIVISION_SLOTS, -1
    for interval, piece in entry.pairs:
        divisions = _divisions(entry, piece, least=0)
        if interval.text == ">":
            _check_rest(interval, last, ends=interval is entry.pairs[-1][0])
            slots[last + 1 :] = [divisions] * (DIVISION_SLOTS - last - 1)
        else:
            slot = _slot(interval, last)
            begin = slot if last >= 0 else 0
            slots[begin : slot + 1] = [divisions] * (slot + 1 - begin)
            last = slot
    return tuple(slots)


def read_reserve(entry: Entry) -> Reserve:
    """Read a share of the device's memory, or GiB that end in G."""
    entry.word(_RESERVE)
    return _reserve(entry, entry.value)


def read_reserves(entry: Entry) -> tuple[tuple[str, Reserve], ...]:
    """Read a reserve for each class of streams that is named."""
    if not entry.pairs:
        right = "a list of classes of streams ([serving:0.25,training:40G])"
        raise (
            entry.takes(right)
            if entry.pairs is None
            else entry.value.refused(f"{entry.key.text} takes {right}, not an empty one")
        )
    reserves: dict[str, Reserve] = {}
    for name, piece in entry.pairs:
        if name.text in reserves:
            raise name.refused(f"the class {name.shown} is there twice")
        reserves[name.text] = _reserve(entry, piece)
    return tuple(reserves.items())


def write_switch(value: bool) -> str:
    """Write True or False."""
    return str(value)


def write_word(value: str) -> str:
    """Write a name."""
    return value


def write_size(size_bytes: int) -> str:
    """Write bytes as MiB."""
    return f"{size_bytes // MIB:d}"


def write_count(value: int) -> str:
    """Write a whole number."""
    return f"{value:d}"


def write_number(value: float) -> str:
    """Write the shortest number that is read as the same."""
    return repr(float(value))


def write_divisions(slots: tuple[int, ...]) -> str:
    """Write one number where all slots agree; else from the end of the first run to the last run."""
    runs = [slot for slot, (a, b) in enumerate(pairwise(slots)) if a != b]
    if not runs and slots[0]:
        return f"{slots[0]:d}"
    begin, end = (runs[0], runs[-1]) if runs else (0, 0)
    named = "".join(f"{1 << slot}:{slots[slot]:d}," for slot in range(begin, end + 1))
    return f"[{named}>:{slots[-1]:d}]"


def write_reserve(reserve: Reserve) -> str:
    """Write a share, or GiB with their G."""
    return f"{float(reserve.value)!r}{'G' if reserve.unit == 'GiB' else ''}"


def write_reserves(reserves: tuple[tuple[str, Reserve], ...]) -> str:
    """Write a list of classes with their reserves."""
    return f"[{','.join(f'{name}:{write_reserve(reserve)}' for name, reserve in reserves)}]"


def _whole(entry: Entry, right: str, most: int) -> int:
    if _WHOLE.fullmatch(entry.word(right)) is None:
        raise entry.takes(right)
    value = int(entry.value.text)
    if not 0 <= value <= most:
        raise entry.takes(f"{right}, 0 to {most}", hint="leave it out to have the default")
    return value


def _divisions(entry: Entry, piece: Piece, *, least: int) -> int:
    value = int(piece.text) if _SHORT.fullmatch(piece.text) else -1
    if value < least or value >= 1 << 63 or (value and not is_power_of_two(value)):
        raise entry.takes("powers of two" if least else "powers of two or 0", piece)
    return value


def _slot(interval: Piece, last: int) -> int:
    """Return the slot that begins at so many MiB; it must come after the last one."""
    begin = int(interval.text) if _SHORT.fullmatch(interval.text) else -1
    if not is_power_of_two(begin) or begin > 1 << (DIVISION_SLOTS - 1):
        raise interval.refused(
            f"an interval begins at a power of two of MiB, 1 to {1 << (DIVISION_SLOTS - 1)},"
            f" or is '>', not {interval.shown}"
        )
    slot = begin.bit_length() - 1
    if slot <= last:
        raise interval.refused(f"intervals must rise: {begin} comes after {1 << last}")
    return slot


def _check_rest(interval: Piece, last: int, *, ends: bool) -> None:
    if not ends or not 0 <= last < DIVISION_SLOTS - 1:
        raise interval.refused(
            "'>' is all intervals after the one before it: it ends the list, and is not alone in it",
            hint="write for example [256:1,512:2,>:4]",
        )


def _reserve(entry: Entry, piece: Piece) -> Reserve:
    absolute = piece.text[-1] in "Gg"
    number = piece.text[:-1] if absolute else piece.text
    if _NUMBER.fullmatch(number) is None:
        raise entry.takes(_RESERVE, piece)
    try:
        return Reserve(value=float(number), unit="GiB" if absolute else "share")
    except InputError:
        raise entry.takes(_RESERVE, piece) from None
