from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudakit.errors import UsageError
from cudakit.report.document import Document, Section, Tree
from cudakit.report.speedscope import render


def content_of(*trees: Tree) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(render(Document("Memory", trees)))
    return content


def test_file_names_its_format_its_document_and_its_first_profile() -> None:
    content = content_of(Tree("all", 1))
    assert content["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    assert (content["name"], content["activeProfileIndex"]) == ("Memory", 0)


def test_samples_are_paths_weighted_by_own_bytes() -> None:
    tree = Tree("all", 10, (Tree("f", 7, (Tree("all", 7),)),))
    content = content_of(tree)
    assert content["shared"] == {"frames": [{"name": "all"}, {"name": "f"}]}
    assert content["profiles"] == [
        {
            "type": "sampled",
            "name": "all",
            "unit": "bytes",
            "startValue": 0,
            "endValue": 10,
            "samples": [[0], [0, 1, 0]],
            "weights": [3, 7],
        }
    ]


def test_every_tree_is_a_profile_and_frames_are_shared() -> None:
    first, second = Tree("at peak", 2, (Tree("f", 2),)), Tree("f", 3)
    document = Document("Two", (first, Section("s", (second,))))
    content = json.loads(render(document))
    assert [profile["name"] for profile in content["profiles"]] == ["at peak", "f"]
    assert [profile["samples"] for profile in content["profiles"]] == [[[0, 1]], [[1]]]


def test_tree_far_deeper_than_the_recursion_limit_is_written() -> None:
    tree = Tree("leaf", 1)
    for _ in range(20_000):
        tree = Tree("f", 1, (tree,))
    (profile,) = content_of(tree)["profiles"]
    assert [len(sample) for sample in profile["samples"]] == [20_001]


def test_document_without_a_tree_is_rejected() -> None:
    with pytest.raises(UsageError, match="'Empty' has no tree"):
        render(Document("Empty", ()))


@given(st.text(st.characters(exclude_categories=())), st.integers(0, 2**50), st.integers(0, 2**50))
def test_any_label_is_valid_utf8_and_weights_add_up(
    label: str, own_bytes: int, child_bytes: int
) -> None:
    tree = Tree(label, own_bytes + child_bytes, (Tree(label, child_bytes),))
    content = json.loads(render(Document(label, (tree,))).encode())
    (profile,) = content["profiles"]
    assert sum(profile["weights"]) == profile["endValue"] == own_bytes + child_bytes
    assert len(profile["samples"]) == len(profile["weights"])
    assert all(0 <= f < len(content["shared"]["frames"]) for s in profile["samples"] for f in s)
