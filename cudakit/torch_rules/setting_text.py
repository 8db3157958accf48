"""The grammar of a configuration: tokens with their positions, and entries.

    configuration   [entry {"," entry} [","]]
    entry           word ":" (word | "[" [pair {"," pair} [","]] "]")
    pair            word ":" word

Space around words is ignored. PyTorch also ignores space within words and missing separators
(c10/core/AllocatorConfig.h, ConfigTokenizer); here both are errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from cudakit.torch_rules.setting_rules import SettingRefused

_TOKEN_PATTERN = re.compile(r"[,:\[\]]|[^,:\[\]]+")
_SPACE_CHARACTERS = " \t\n\v\f\r"  # isspace of C
_MAX_SHOWN_LENGTH = 40


@dataclass(frozen=True, slots=True)
class Token:
    """A word or a separator in the value of a variable. An empty token is the end of the value."""

    variable: str
    position: int  # Index of the token's first character.
    text: str

    @property
    def shown(self) -> str:
        """Return the token for an error message: on one line, shortened."""
        if not self.text:
            return "the end"
        return repr(
            self.text
            if len(self.text) <= _MAX_SHOWN_LENGTH
            else f"{self.text[:_MAX_SHOWN_LENGTH]}..."
        )

    def error(self, reason: str, *, hint: str = "") -> SettingRefused:
        """Return an error with the position of this token; characters count from 1."""
        return SettingRefused(
            f"{self.variable}, character {self.position + 1}: {reason}", hint=hint
        )


@dataclass(frozen=True, slots=True)
class Entry:
    """A key and its value: a word, or pairs in brackets."""

    key: Token
    value: Token  # The word, or the opening bracket of the pairs.
    pairs: tuple[tuple[Token, Token], ...] | None = None

    def word(self, expected: str) -> str:
        """Return the value if it is a word. ``expected`` describes the valid values in the error."""
        if self.pairs is not None:
            raise self.value.error(f"{self.key.text} takes {expected}, not a list")
        return self.value.text

    def value_error(
        self, expected: str, wrong_token: Token | None = None, *, hint: str = ""
    ) -> SettingRefused:
        """Return the error for an invalid value."""
        token = wrong_token or self.value
        return token.error(f"{self.key.text} takes {expected}, not {token.shown}", hint=hint)


def read_entries(variable: str, text: str) -> Iterator[Entry]:
    """Read entries one by one. Raises SettingRefused at the first token that the grammar does not allow."""
    cursor = _Cursor([*_tokens(variable, text), Token(variable, len(text), "")])
    while cursor.current.text:
        yield cursor.entry()
        if cursor.current.text:
            cursor.separator(",")


def _tokens(variable: str, text: str) -> Iterator[Token]:
    for match in _TOKEN_PATTERN.finditer(text):
        token_text = match.group().lstrip(_SPACE_CHARACTERS)
        if token_text:
            yield Token(
                variable, match.end() - len(token_text), token_text.rstrip(_SPACE_CHARACTERS)
            )


class _Cursor:
    """A position in a sequence of tokens: the current token, and the tokens after it."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = iter(tokens)
        self.current = next(self._tokens)
        self._previous_token = self.current

    def entry(self) -> Entry:
        key = self.word("the name of a setting")
        self.separator(":")
        if self.current.text != "[":
            return Entry(key, self.word(f"the value of {key.text}"))
        bracket = self.take()
        return Entry(key, bracket, tuple(self._pairs()))

    def _pairs(self) -> Iterator[tuple[Token, Token]]:
        while self.current.text != "]":
            name = self.word("a pair or ']'")
            self.separator(":")
            yield name, self.word("a value")
            if self.current.text not in (",", "]"):
                raise self.current.error(
                    f"expected ',' or ']' after {self._previous_token.shown}, found {self.current.shown}",
                    hint="write a list as [NAME:VALUE,NAME:VALUE]",
                )
            if self.current.text == ",":
                self.take()
        self.take()

    def word(self, expected: str) -> Token:
        if self.current.text in ("", ",", ":", "[", "]"):
            raise self.current.error(f"expected {expected}, found {self.current.shown}")
        space_index = next(
            (index for index, character in enumerate(self.current.text) if character.isspace()),
            None,
        )
        if space_index is not None:
            space_token = Token(
                self.current.variable,
                self.current.position + space_index,
                self.current.text[space_index],
            )
            raise space_token.error(
                f"there is space inside {self.current.shown}", hint="separate settings by ','"
            )
        return self.take()

    def separator(self, sign: str) -> None:
        if self.current.text != sign:
            raise self.current.error(
                f"expected {sign!r} after {self._previous_token.shown}, found {self.current.shown}",
                hint="write settings as NAME:VALUE, separated by commas",
            )
        self.take()

    def take(self) -> Token:
        self._previous_token = self.current
        self.current = next(self._tokens, self.current)
        return self._previous_token
