from __future__ import annotations

from cudakit.core.bench.method import Method


def test_different_mode_or_cache_is_unlike() -> None:
    mine = Method("isolated", "rotate")

    assert mine.differences_from(Method("isolated", "hot")) == ("cache: rotate and hot",)
    assert mine.differences_from(Method("batch", "rotate", blocker=False)) == (
        "mode: isolated and batch",
        "blocker: True and False",
    )


def test_other_warm_up_and_seed_are_alike() -> None:
    assert (
        Method("isolated", "rotate").differences_from(Method("isolated", "rotate", 3.0, seed=7))
        == ()
    )
