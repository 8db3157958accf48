from __future__ import annotations

import pytest
from document_views import no_picture
from hypothesis import given
from hypothesis import strategies as st

from cudakit.errors import UsageError
from cudakit.report.collapsed import render
from cudakit.report.document import Document, Note, Section, Tree, View


def lines_of(tree: Tree) -> list[str]:
    return "".join(render(Document("Memory", (tree,)))).splitlines()


def test_line_is_a_path_and_the_own_bytes_of_its_last_node() -> None:
    leaf = Tree("forward", 60)
    tree = Tree("all", 100, (Tree("train", 100, (leaf, Tree("loss", 30))),))
    assert lines_of(tree) == ["all;train 10", "all;train;forward 60", "all;train;loss 30"]


def test_parent_smaller_than_its_children_has_no_line() -> None:
    assert lines_of(Tree("all", 1, (Tree("a", 2),))) == ["all;a 2"]


@pytest.mark.parametrize(
    ("label", "written"),
    [
        ("a;b", "a:b"),
        ("a\r\nb", r"a\r\nb"),
        ("\x1b[2Ja\u2028\x85\u202eb", r"\x1b[2Ja\u2028\x85\u202eb"),
        ("", "?"),
        (" ", "?"),
        ("f (train.py:3)", "f (train.py:3)"),
        ("größe\ud800", r"größe\ud800"),
    ],
)
def test_label_never_breaks_its_line(label: str, written: str) -> None:
    assert lines_of(Tree(label, 1)) == [f"{written} 1"]


def test_first_tree_is_found_in_sections_and_views() -> None:
    view = View("picture", (), no_picture, fallback=Tree("found", 1))
    document = Document("Nested", (Note("info", "a"), Section("s", (view,)), Tree("no", 1)))
    assert list(render(document)) == ["found 1\n"]


def test_document_without_a_tree_is_rejected_before_anything_is_written() -> None:
    with pytest.raises(UsageError, match="'Empty' has no tree"):
        render(Document("Empty", ()))


def test_tree_far_deeper_than_the_recursion_limit_is_written() -> None:
    tree = Tree("leaf", 1)
    for _ in range(20_000):
        tree = Tree("f", 1, (tree,))
    (line,) = lines_of(tree)
    assert line.count(";") == 20_000


def test_wide_tree_is_written_in_chunks_near_64_kib() -> None:
    leaves = tuple(Tree(f"function number {i}", 1) for i in range(10_000))
    chunks = list(render(Document("Wide", (Tree("all", 10_000, leaves),))))
    assert len(chunks) > 1
    assert max(map(len, chunks)) < 2 * 64 * 1024
    assert "".join(chunks).count("\n") == 10_000


def total(own_bytes: int, children: list[Tree]) -> int:
    return own_bytes + sum(child.size_bytes for child in children)


_trees = st.recursive(
    st.builds(Tree, st.text(), st.integers(0, 2**40)),
    lambda children: st.builds(
        lambda label, own_bytes, children: Tree(label, total(own_bytes, children), tuple(children)),
        st.text(),
        st.integers(0, 2**40),
        st.lists(children, max_size=4),
    ),
    max_leaves=20,
)


@given(_trees)
def test_lines_add_up_to_the_root(tree: Tree) -> None:
    amounts = [int(line.rpartition(" ")[2]) for line in lines_of(tree)]
    assert sum(amounts) == tree.size_bytes
    assert all(amount > 0 for amount in amounts)
