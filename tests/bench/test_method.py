from __future__ import annotations

from cudakit.bench.method import Method


def test_methods_with_other_mode_cache_or_blocker_differ() -> None:
    method = Method("isolated", "rotate")

    assert method.differences_from(Method("isolated", "hot")) == (
        "cache: rotate before, hot after",
    )
    assert method.differences_from(Method("batch", "rotate", blocker=False)) == (
        "mode: isolated before, batch after",
        "blocker: on before, off after",
    )


def test_methods_with_other_warm_up_and_seed_do_not_differ() -> None:
    assert (
        Method("isolated", "rotate").differences_from(Method("isolated", "rotate", 3.0, seed=7))
        == ()
    )
