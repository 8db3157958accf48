"""Files of ``-o`` whose names say what each is to hold."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeAlias

from cudakit.cli.output import Output, open_output
from cudakit.errors import UsageError

# Open files, each with its format.
Files: TypeAlias = tuple[tuple[str, Output], ...]


@contextmanager
def open_by_name(paths: Iterable[str], formats: Sequence[str], *, force: bool) -> Iterator[Files]:
    """Open files; each appears complete when the block ends well, or not at all.

    Of ``formats``, which are ends of names, the first that fits says what a file holds. Raises UsageError
    for a name that ends with none of them and for a file named twice, before any file is made.
    """
    paths = list(paths)
    _refuse_doubles(paths)
    wanted = [(_format(path, formats), path) for path in paths]
    with ExitStack() as stack:
        yield tuple(
            (form, stack.enter_context(open_output(path, force=force))) for form, path in wanted
        )


def _refuse_doubles(paths: Sequence[str]) -> None:
    places = [os.path.realpath(path) for path in paths]
    for path, place in zip(paths, places, strict=True):
        if places.count(place) > 1:
            raise UsageError(f"{path} is named twice", hint="name each file once")


def _format(path: str, formats: Sequence[str]) -> str:
    for form in formats:
        if path.lower().endswith(f".{form}"):
            return form
    known = ", ".join(f".{form}" for form in formats)
    raise UsageError(
        f"{path or repr(path)} does not say what it is to hold", hint=f"end its name in {known}"
    )
