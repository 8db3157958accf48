from __future__ import annotations

from cudakit.core.bench.method import Method


def test_what_was_measured_otherwise_is_unlike() -> None:
    mine = Method("isolated", "rotate")

    assert mine.unlike(Method("isolated", "hot")) == ("cache rotate and hot",)
    assert mine.unlike(Method("batch", "rotate", blocker=False)) == (
        "mode isolated and batch",
        "blocker True and False",
    )


def test_longer_warm_up_and_other_data_of_the_kind_are_alike() -> None:
    assert Method("isolated", "rotate").unlike(Method("isolated", "rotate", 3.0, seed=7)) == ()
