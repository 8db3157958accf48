"""The grammar of a configuration: pieces that know where they stand, and entries of them.

    configuration   [entry {"," entry} [","]]
    entry           word ":" (word | "[" [pair {"," pair} [","]] "]")
    pair            word ":" word

Space around words means nothing. PyTorch drops it inside of words too, and does not insist on the
separators (c10/core/AllocatorConfig.h, ConfigTokenizer); here both are errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from cudakit.errors import InputError

_PIECE = re.compile(r"[,:\[\]]|[^,:\[\]]+")
_SPACE = " \t\n\v\f\r"  # isspace of C
_SHOWN = 40


@dataclass(frozen=True, slots=True)
class Piece:
    """A word or a separator of the value of a variable; the empty one is its end."""

    variable: str
    at: int  # from 0
    text: str

    @property
    def shown(self) -> str:
        """Return the piece as an error shows it: on one line, and not too long."""
        if not self.text:
            return "the end"
        return repr(self.text if len(self.text) <= _SHOWN else f"{self.text[:_SHOWN]}...")

    def refused(self, why: str, *, hint: str = "") -> InputError:
        """Return an error that points here; characters are counted from 1."""
        return InputError(f"{self.variable}, character {self.at + 1}: {why}", hint=hint)


@dataclass(frozen=True, slots=True)
class Entry:
    """A key and its value: a word, or pairs in brackets."""

    key: Piece
    value: Piece  # the word, or the opening bracket
    pairs: tuple[tuple[Piece, Piece], ...] | None = None

    def word(self, right: str) -> str:
        """Return the value, if it is a word; ``right`` is what the key takes."""
        if self.pairs is not None:
            raise self.value.refused(f"{self.key.text} takes {right}, not a list")
        return self.value.text

    def takes(self, right: str, instead: Piece | None = None, *, hint: str = "") -> InputError:
        """Return the error that the key takes something else."""
        piece = instead or self.value
        return piece.refused(f"{self.key.text} takes {right}, not {piece.shown}", hint=hint)


def read_entries(variable: str, text: str) -> Iterator[Entry]:
    """Read entries one by one. Raises InputError at the first piece that does not belong where it is."""
    cursor = _Cursor([*_pieces(variable, text), Piece(variable, len(text), "")])
    while cursor.here.text:
        yield cursor.entry()
        if cursor.here.text:
            cursor.separator(",")


def _pieces(variable: str, text: str) -> Iterator[Piece]:
    for found in _PIECE.finditer(text):
        word = found.group().lstrip(_SPACE)
        if word:
            yield Piece(variable, found.end() - len(word), word.rstrip(_SPACE))


class _Cursor:
    """Where the reading of the pieces stands."""

    def __init__(self, pieces: list[Piece]) -> None:
        self._pieces = iter(pieces)
        self.here = next(self._pieces)
        self._before = self.here

    def entry(self) -> Entry:
        key = self.word("the name of a setting")
        self.separator(":")
        if self.here.text != "[":
            return Entry(key, self.word(f"the value of {key.text}"))
        opening = self.take()
        return Entry(key, opening, tuple(self._pairs()))

    def _pairs(self) -> Iterator[tuple[Piece, Piece]]:
        while self.here.text != "]":
            left = self.word("a pair or ']'")
            self.separator(":")
            yield left, self.word("a value")
            if self.here.text != "]":
                self.separator(",")
        self.take()

    def word(self, expected: str) -> Piece:
        if self.here.text in ("", ",", ":", "[", "]"):
            raise self.here.refused(f"here should be {expected}, not {self.here.shown}")
        space = next((i for i, c in enumerate(self.here.text) if c.isspace()), None)
        if space is not None:
            where = Piece(self.here.variable, self.here.at + space, self.here.text[space])
            raise where.refused(
                f"there is space inside {self.here.shown}", hint="separate settings by ','"
            )
        return self.take()

    def separator(self, sign: str) -> None:
        if self.here.text != sign:
            raise self.here.refused(
                f"here should be {sign!r}, after {self._before.shown}, not {self.here.shown}"
            )
        self.take()

    def take(self) -> Piece:
        self._before = self.here
        self.here = next(self._pieces, self.here)
        return self._before
