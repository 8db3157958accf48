from __future__ import annotations

from cudakit.core.bench.method import Method


def test_different_mode_or_cache_differs() -> None:
    mine = Method("isolated", "rotate")

    assert mine.differences_from(Method("isolated", "hot")) == ("cache: rotate before, hot after",)
    assert mine.differences_from(Method("batch", "rotate", blocker=False)) == (
        "mode: isolated before, batch after",
        "blocker: True before, False after",
    )


def test_other_warm_up_and_seed_are_alike() -> None:
    assert (
        Method("isolated", "rotate").differences_from(Method("isolated", "rotate", 3.0, seed=7))
        == ()
    )
