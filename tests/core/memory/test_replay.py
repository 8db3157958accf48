"""The replay against a simulated allocator that knows the truth at every moment."""

from __future__ import annotations

import numpy as np
from core.memory import builders
from core.memory.history import History, Life
from core.memory.strategies import cuts, garbage, histories
from hypothesis import given, settings
from hypothesis import strategies as st

from cudakit.core.memory.lifetimes import BEFORE
from cudakit.core.memory.replay import Replay, replay


def replayed(history: History) -> Replay:
    snapshot = history.snapshot()
    return replay(snapshot, snapshot.devices[0])


@given(st.data())
def test_no_contradiction_is_found_in_what_an_allocator_wrote(data):
    history = data.draw(histories(pools=3))
    assert replayed(data.draw(cuts(history))).inconsistencies.total == 0


@given(st.data())
def test_x(data):
    history = data.draw(cuts(data.draw(histories(pools=3))))
    r = replayed(history)
    c = r.curves
    for name in ("requested", "reserved", "allocated", "active"):
        assert getattr(c, name).tolist() == [getattr(t, name) for t in history.truths], name
