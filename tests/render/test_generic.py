"""``document`` and ``render`` know no feature: what only one feature shows comes from that feature."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import cudakit

PACKAGE = Path(str(cudakit.__file__)).parent
GENERIC = sorted(
    place for folder in ("document", "render") for place in (PACKAGE / folder).rglob("*.py")
)
# What only features speak of; names of formats that outsiders define, such as "samples", are not here.
FEATURES = {
    "allocator",
    "bench",
    "doctor",
    "gemm",
    "memviz",
    "nvbench",
    "oom",
    "pool",
    "race",
    "races",
    "roofline",
    "sanitize",
    "sanitizer",
    "snapshot",
    "spread",
    "sweep",
    "triage",
    "whatif",
}


def words(source: str) -> set[str]:
    """Return the words of code, comments and texts; those of a name are apart: ``race_view``."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", source)}


def view_kinds() -> Iterator[str]:
    """Find what the features name their Views."""
    for place in sorted((PACKAGE / "core").rglob("*.py")):
        for node in ast.walk(ast.parse(place.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Name("View"), args=[ast.Constant(str(kind)), *_]):
                    yield kind


@pytest.mark.parametrize("place", GENERIC, ids=lambda place: str(place.relative_to(PACKAGE)))
def test_generic_module_names_no_feature(place: Path) -> None:
    assert words(place.read_text(encoding="utf-8")) & FEATURES == set()


def test_kinds_of_views_are_known_to_the_features_only() -> None:
    kinds = set(view_kinds())
    texts = {
        node.value
        for place in GENERIC
        for node in ast.walk(ast.parse(place.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }

    assert {"race", "memory-layout", "roofline"} <= kinds
    assert kinds & texts == set()
