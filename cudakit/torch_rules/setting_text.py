"""The grammar of a configuration: tokens with their positions, and entries of them.

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

_TOKEN = re.compile(r"[,:\[\]]|[^,:\[\]]+")
_SPACE = " \t\n\v\f\r"  # isspace of C
_SHOWN = 40


@dataclass(frozen=True, slots=True)
class Token:
    """A word or a separator of the value of a variable; the empty token is its end."""

    variable: str
    at: int  # from 0
    text: str

    @property
    def shown(self) -> str:
        """Return the token for an error message: on one line, shortened."""
        if not self.text:
            return "the end"
        return repr(self.text if len(self.text) <= _SHOWN else f"{self.text[:_SHOWN]}...")

    def refused(self, why: str, *, hint: str = "") -> InputError:
        """Return an error that points here; characters are counted from 1."""
        return InputError(f"{self.variable}, character {self.at + 1}: {why}", hint=hint)


@dataclass(frozen=True, slots=True)
class Entry:
    """A key and its value: a word, or pairs in brackets."""

    key: Token
    value: Token  # the word, or the opening bracket
    pairs: tuple[tuple[Token, Token], ...] | None = None

    def word(self, right: str) -> str:
        """Return the value if it is a word. ``right`` describes the valid values in the error."""
        if self.pairs is not None:
            raise self.value.refused(f"{self.key.text} takes {right}, not a list")
        return self.value.text

    def takes(self, right: str, instead: Token | None = None, *, hint: str = "") -> InputError:
        """Return the error that the key takes something else."""
        token = instead or self.value
        return token.refused(f"{self.key.text} takes {right}, not {token.shown}", hint=hint)


def read_entries(variable: str, text: str) -> Iterator[Entry]:
    """Read entries one by one. Raises InputError at the first token that the grammar does not allow."""
    cursor = _Cursor([*_tokens(variable, text), Token(variable, len(text), "")])
    while cursor.here.text:
        yield cursor.entry()
        if cursor.here.text:
            cursor.separator(",")


def _tokens(variable: str, text: str) -> Iterator[Token]:
    for found in _TOKEN.finditer(text):
        word = found.group().lstrip(_SPACE)
        if word:
            yield Token(variable, found.end() - len(word), word.rstrip(_SPACE))


class _Cursor:
    """The current position among the tokens."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = iter(tokens)
        self.here = next(self._tokens)
        self._before = self.here

    def entry(self) -> Entry:
        key = self.word("the name of a setting")
        self.separator(":")
        if self.here.text != "[":
            return Entry(key, self.word(f"the value of {key.text}"))
        opening = self.take()
        return Entry(key, opening, tuple(self._pairs()))

    def _pairs(self) -> Iterator[tuple[Token, Token]]:
        while self.here.text != "]":
            left = self.word("a pair or ']'")
            self.separator(":")
            yield left, self.word("a value")
            if self.here.text != "]":
                self.separator(",")
        self.take()

    def word(self, expected: str) -> Token:
        if self.here.text in ("", ",", ":", "[", "]"):
            raise self.here.refused(f"expected {expected}, found {self.here.shown}")
        space = next((i for i, c in enumerate(self.here.text) if c.isspace()), None)
        if space is not None:
            where = Token(self.here.variable, self.here.at + space, self.here.text[space])
            raise where.refused(
                f"there is space inside {self.here.shown}", hint="separate settings by ','"
            )
        return self.take()

    def separator(self, sign: str) -> None:
        if self.here.text != sign:
            raise self.here.refused(
                f"expected {sign!r} after {self._before.shown}, found {self.here.shown}"
            )
        self.take()

    def take(self) -> Token:
        self._before = self.here
        self.here = next(self._tokens, self.here)
        return self._before
