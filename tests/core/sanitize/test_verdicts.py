"""What is told of a race: who did what, and what synchronised last."""

from __future__ import annotations

from core.sanitize.scene import (
    BLOCKING,
    LEGACY,
    NON_BLOCKING,
    Scene,
    place,
)

from cudakit.core.sanitize.races import SyncKind


def test_the_last_synchronisation_says_what_was_waited_for_and_when() -> None:
    s = Scene()
    s.record(1, 1)
    recorded = s.seq
    s.W(1, "x")
    s.wait(2, 1)
    (race,) = s.R(2, "x")
    sync = race.last_sync
    assert sync is not None
    assert (sync.kind, sync.recorded_seq, sync.waited_seq) == (
        SyncKind.EVENT,
        recorded,
        recorded + 2,
    )
    assert sync.recorded_seq < race.previous.seq


def test_the_last_synchronisation_may_be_the_hosts_or_the_default_streams() -> None:
    s = Scene(LEGACY, BLOCKING, NON_BLOCKING, NON_BLOCKING)
    s.W(3, "y")
    s.sync(3)
    waited = s.seq
    s.W(3, "x")
    (race,) = s.R(4, "x")
    assert race.last_sync is not None
    assert (race.last_sync.kind, race.last_sync.waited_seq) == (SyncKind.HOST, waited)
    s.W(2, "z")
    s.W(1, "z")
    s.W(1, "w")
    s.record(1, 1)
    s.wait(3, 1)
    s.W(2, "v")
    (race,) = s.R(3, "v")
    assert race.last_sync is not None
    assert race.last_sync.kind is SyncKind.EVENT


def test_streams_that_never_synchronised_have_no_last_synchronisation() -> None:
    s = Scene()
    s.W(1, "x")
    (race,) = s.W(2, "x")
    assert race.last_sync is None


def test_a_race_says_who_did_what() -> None:
    s = Scene()
    s.touch(1, ["x"], 2, 64, thread=5)
    (race,) = s.copy(2, "y", "x", thread=6)
    assert (race.previous.name, race.previous.thread, race.previous.site) == ("k", 5, 11)
    assert (race.current.name, race.current.kind.name, race.current.thread) == ("", "COPY", 6)
    assert (race.previous.lo, race.previous.hi) == (place("x"), place("x") + 64)
