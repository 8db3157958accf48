"""Trees on the terminal."""

from __future__ import annotations

from cudakit.document import Bytes, Text, Tree
from cudakit.render.console.tree import tree_lines


def drawn(tree: Tree, width: int = 80) -> list[str]:
    return [line.plain for line in tree_lines(tree, width)]


def leaf(name: str, size: int) -> Tree:
    return Tree(name, Bytes(size))


def test_children_stand_under_their_parent_largest_first() -> None:
    tree = Tree(
        "all",
        Bytes(1000),
        (leaf("small", 100), Tree("large", Bytes(900), (leaf("a", 600), leaf("b", 300)))),
    )
    assert drawn(tree) == [
        "1000 B   100%  all",
        " 900 B  90.0%  ├─ large",
        " 600 B  60.0%  │  ├─ a",
        " 300 B  30.0%  │  └─ b",
        " 100 B  10.0%  └─ small",
    ]


def test_a_chain_of_only_children_costs_little_indentation() -> None:
    chain = Tree("main", Bytes(8), (Tree("step", Bytes(8), (leaf("forward", 8),)),))
    assert [line.split("  ", 2)[2] for line in drawn(chain)] == ["main", "╰ step", "  ╰ forward"]


def test_a_long_chain_is_drawn_to_its_end() -> None:
    chain = leaf("end", 8)
    for _ in range(20):
        chain = Tree("n", Bytes(8), (chain,))
    assert drawn(chain)[-1].endswith("╰ end")


def test_a_tree_with_many_levels_stops_and_says_so() -> None:
    tree = leaf("end", 1)
    for size in range(2, 40):
        tree = Tree("n", Bytes(size), (tree, leaf("side", 1)))
    lines = drawn(tree)
    assert len(lines) <= 24
    assert any(line.endswith("n  … 2 below") for line in lines)


def test_children_beyond_the_sixth_are_counted_and_added_up() -> None:
    tree = Tree("all", Bytes(100), tuple(leaf(f"n{size}", size) for size in range(1, 11)))
    lines = drawn(tree)
    assert len(lines) == 8
    assert lines[-1] == " 10 B  10.0%  └─ … 4 more"


def test_a_node_none_of_whose_children_are_drawn_says_how_many_are_below() -> None:
    groups = tuple(
        Tree(f"group {i}", Bytes(100 - i), tuple(leaf(f"part {j}", 5) for j in range(5)))
        for i in range(6)
    )
    lines = drawn(Tree("all", Bytes(600), groups))
    assert lines[-1].endswith("└─ group 5  … 5 below")
    assert lines[-3].endswith("│  └─ … 3 more")


def test_no_tree_takes_more_than_two_screens() -> None:
    def grown(depth: int, size: int) -> Tree:
        parts = [size // 3 - i for i in range(3)] if depth else []
        return Tree("n", Bytes(size), tuple(grown(depth - 1, part) for part in parts))

    assert len(drawn(grown(7, 10**7), width=400)) < 50


def test_a_tree_of_any_depth_or_breadth_is_drawn() -> None:
    deep = leaf("end", 1)
    for _ in range(50_000):
        deep = Tree("n", Bytes(1), (deep,))
    assert drawn(deep)[-1].endswith("… 1 below")
    broad = Tree("all", Bytes(10**6), tuple(leaf("n", 1) for _ in range(100_000)))
    assert drawn(broad)[-1].endswith("… 99,994 more")


def test_a_tree_without_amounts_keeps_its_order() -> None:
    tree = Tree("all", Text("3 parts"), tuple(Tree(name, Text("")) for name in "bac"))
    assert drawn(tree) == ["3 parts  all", "         ├─ b", "         ├─ a", "         └─ c"]


def test_one_tree_used_twice_is_counted_twice() -> None:
    same = leaf("n", 10)
    tree = Tree("all", Bytes(100), (same,) * 8)
    assert drawn(tree)[-1].endswith("└─ … 2 more")
