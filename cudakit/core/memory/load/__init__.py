"""From a file to a Snapshot. Nothing in a file is ever looked up as a class or called."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from cudakit.core.memory.load import pickled, schema, source
from cudakit.core.memory.load.tree import ObjectTree
from cudakit.errors import SnapshotError

if TYPE_CHECKING:
    from cudakit.core.memory.load.tree import Tree
    from cudakit.core.memory.snapshot import Snapshot


def load(path: str) -> Snapshot:
    """Read a memory snapshot: pickle (protocols 0 to 5) or JSON, plain, gzip or Zstandard; ``-`` is stdin.

    Raises SnapshotError, with one line of reason, for whatever is not such a file.
    """
    file = source.read(path)
    try:
        form, tree = _tree(file.content)
        return schema.build(tree, source=file.name, form=form, size_bytes=len(file.content))
    except SnapshotError as error:
        raise SnapshotError(f"{file.name}: {error.message}", hint=error.hint) from None


def _tree(content: bytes) -> tuple[str, Tree]:
    if content.lstrip()[:1] in (b"{", b"["):
        return "json", _json_tree(content)
    return "pickle", pickled.read(content)


def _json_tree(content: bytes) -> Tree:
    try:
        return ObjectTree(json.loads(content), len(content))
    except (ValueError, RecursionError) as error:
        raise SnapshotError(
            f"looks like JSON, but is not: {error}", hint="export the snapshot again"
        ) from None
