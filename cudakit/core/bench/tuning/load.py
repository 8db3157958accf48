"""Tunings read back from the files that ``--tune -o`` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cudakit.core.bench.saved import read_saved
from cudakit.core.bench.tuning.tuned import Tuned, TunedProduct, Untuned
from cudakit.errors import InputError
from cudakit.serialize import Mismatch, from_plain

_HINT = "write one with cudakit bench gemm --tune -o tuned.json"


def load_tuned(path: Path) -> Tuned:
    """Read a file that ``cudakit bench gemm --tune -o`` wrote.

    Raises InputError where it is missing, is something else, is of a newer schema or is damaged.
    """
    plain = read_saved(path, hint=_HINT)
    schema = plain.get("schema") if isinstance(plain, dict) else None
    if not isinstance(plain, dict) or schema != Tuned.schema:
        raise InputError(
            f"{path} holds no tuning: its schema is {schema!r}, and {Tuned.schema!r} is needed",
            hint=_HINT,
        )
    try:
        # Of one product after the other: a product itself does not know where in the file it stands.
        for name, kind in (("products", TunedProduct), ("untuned", Untuned)):
            _read_each(kind, plain.get(name), name)
        return from_plain(Tuned, plain)
    except Mismatch as problem:
        raise InputError(f"{path} is damaged: {problem}", hint=_HINT) from None


def _read_each(kind: type[Any], items: object, name: str) -> None:
    """Read each, so that what makes no sense is said with its place. Raises Mismatch."""
    for at, item in enumerate(items if isinstance(items, list) else ()):
        place = f"{name}[{at}]"
        try:
            from_plain(kind, item, place)
        except InputError as problem:
            raise Mismatch(f"{place}: {problem.message}") from None
