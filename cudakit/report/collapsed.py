"""Render the first Tree of a Document as collapsed stacks for flame graph tools.

Each line is a stack: ``root;child;leaf amount`` (Brendan Gregg's FlameGraph, stackcollapse).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from cudakit.errors import UsageError
from cudakit.report.columns import join_in_chunks
from cudakit.report.document import Document, Tree, walk
from cudakit.report.escape import escape_invisible

_Frame = TypeVar("_Frame")


def render(document: Document) -> Iterator[str]:
    """Yield the first Tree as collapsed stacks, in chunks of about 64 KiB.

    Each node with more bytes than the sum of its children is a line. In a label ``;`` becomes
    ``:``, and invisible characters are escaped. Raises UsageError if the document has no Tree.
    """
    tree, *_ = trees(document)
    return join_in_chunks(
        f"{';'.join(frame_path)} {size_bytes}\n"
        for frame_path, size_bytes in stacks(tree, _escaped_label)
    )


def trees(document: Document) -> tuple[Tree, ...]:
    """Return the Trees of a document in reading order. Raises UsageError if there is none."""
    nodes = tuple(node for node in walk(document.nodes) if isinstance(node, Tree))
    if not nodes:
        raise UsageError(
            f"{document.title!r} has no tree of stacks to write",
            hint="choose another output format, such as json",
        )
    return nodes


def stacks(tree: Tree, frame_of: Callable[[str], _Frame]) -> Iterator[tuple[list[_Frame], int]]:
    """Walk a tree in pre-order; yield the path from the root to each node, and the bytes of the node alone.

    ``frame_of`` makes an item of the path from a label; the yielded list is reused after each step. A node
    is left out if its children have all of its bytes, or more.
    """
    path: list[_Frame] = []
    pending_nodes = [(tree, 0)]
    while pending_nodes:
        node, depth = pending_nodes.pop()
        path[depth:] = [frame_of(node.label)]
        own_bytes = node.size_bytes - sum(child.size_bytes for child in node.children)
        if own_bytes > 0:
            yield path, own_bytes
        pending_nodes += [(child, depth + 1) for child in reversed(node.children)]


def _escaped_label(label: str) -> str:
    return escape_invisible(label).replace(";", ":").strip() or "?"
