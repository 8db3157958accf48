"""``document`` and ``render`` depend on no feature: the package of a feature has its Views."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import cudakit

PACKAGE = Path(str(cudakit.__file__)).parent
GENERIC = sorted((PACKAGE / "report").rglob("*.py"))
# Words of single features. Names in external formats, such as "samples", are allowed.
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
    """Return the words of code, comments and texts; ``race_view`` is two words."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", source)}


def view_kinds() -> Iterator[str]:
    """Return the kinds of Views and Explorers of all features."""
    for place in sorted(
        place
        for name in ("bench", "memory", "profile", "sanitize")
        for place in (PACKAGE / name).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(place.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(
                    func=ast.Name("View" | "Explorer"), args=[ast.Constant(str(kind)), *_]
                ):
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

    assert {"race", "roofline", "memory", "memory_difference"} <= kinds
    assert kinds & texts == set()
