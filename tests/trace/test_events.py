from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from traces import FACTS, events

from cudakit.trace.events import (
    Access,
    Alloc,
    ContextSync,
    Copy,
    Event,
    Fact,
    Fill,
    Gap,
    Launch,
    StreamCreate,
)
from cudakit.trace.kinds import Kind, Mode
from cudakit.trace.layout import RECORD, RECORD_BYTES, find_invalid, layout, pack, unpack, view


class Table(list[str]):
    """A string table."""

    def __init__(self) -> None:
        super().__init__([""])

    def number(self, text: str) -> int:
        if text not in self:
            self.append(text)
        return self.index(text)


def test_each_kind_has_one_fact() -> None:
    assert sorted(fact.kind for fact in FACTS) == sorted(Kind)


@given(st.lists(events(), max_size=5))
def test_unpack_inverts_pack(trace: list[Event]) -> None:
    strings = Table()

    assert list(unpack(pack(trace, strings.number), strings)) == trace


@pytest.mark.parametrize("kind", Kind)
def test_record_layout_matches_c(kind: Kind) -> None:
    dtype = layout(kind)
    places = sorted((offset, form) for form, offset, *_ in dtype.fields.values())

    assert dtype.itemsize == RECORD.itemsize == RECORD_BYTES == 96
    assert all(offset % form.base.alignment == 0 for offset, form in places)
    assert all(
        offset + form.itemsize <= after
        for (offset, form), (after, _) in zip(places, [*places[1:], (96, None)], strict=True)
    )


# The C recorder writes these offsets: changing one breaks all existing files.
PLACES = {
    Kind.ALLOC: {"address": 40, "size_bytes": 48, "how": 56, "layer": 57, "pool": 60,
                 "requested_bytes": 64, "stream": 24},
    Kind.LAUNCH: {"name": 40, "grid": 44, "block": 56, "pending": 68},
    Kind.ACCESS: {"lo": 40, "hi": 48, "mode": 56, "known": 57, "stride_bytes": 64, "count": 72},
    Kind.COPY: {"destination": 40, "source": 48, "size_bytes": 56, "rows": 64, "direction": 88},
    Kind.STREAM_WAIT: {"event": 40, "stream": 24},
    Kind.GRAPH_NODE: {"graph": 40, "node": 44, "work": 48, "name": 52},
    Kind.GRAPH_LAUNCH: {"graph": 40, "executable": 44, "pending": 48},
    Kind.ACCESSED: {"node": 40, "exact": 44},
    Kind.ARENAS: {"size_bytes": 40},
}


@pytest.mark.parametrize(("kind", "places"), PLACES.items())
def test_field_offsets_are_fixed(kind: Kind, places: dict[str, int]) -> None:
    found = {name: offset for name, (_, offset, *_) in layout(kind).fields.items()}

    assert {name: found[name] for name in places} == places
    assert [found[name] for name in ("seq", "time_ns", "thread")] == [0, 8, 16]
    assert [found[name] for name in ("context", "site", "device", "kind")] == [28, 32, 36, 38]


def test_batch_is_read_by_column() -> None:
    trace = [
        Event(Fill(stream=3, address=512, size_bytes=8), seq=1),
        Event(ContextSync(), seq=2),
        Event(Copy(stream=4, destination=8, source=16, size_bytes=4), seq=3),
        Event(Fill(stream=5, address=1024, size_bytes=8), seq=4),
    ]
    batch = pack(trace, Table().number)

    fills = view(batch[batch["kind"] == Kind.FILL], Kind.FILL)

    assert batch["stream"].tolist() == [3, 0, 4, 5]
    assert batch["seq"].tolist() == [1, 2, 3, 4]
    assert fills["address"].tolist() == [512, 1024]
    assert fills["stream"].tolist() == [3, 5]


def test_launch_refers_to_its_kernel_by_string_number() -> None:
    strings = Table()
    batch = pack([Event(Launch(stream=1, name="saxpy", grid=(7, 1, 1)))], strings.number)

    launch = view(batch, Kind.LAUNCH)[0]

    assert strings[launch["name"]] == "saxpy"
    assert launch["grid"].tolist() == [7, 1, 1]


def test_access_modes_combine() -> None:
    fact = Access(lo=0, hi=4, mode=Mode.READ | Mode.ATOMIC)

    (again,) = unpack(pack([Event(fact)], Table().number), [""])

    assert again.fact == fact
    assert isinstance(again.fact, Access)
    assert Mode.ATOMIC in again.fact.mode
    assert Mode.WRITE not in again.fact.mode


def test_view_accepts_non_contiguous_records() -> None:
    trace = [Event(Fill(stream=1, address=index, size_bytes=1)) for index in range(6)]

    assert view(pack(trace, Table().number)[::2], Kind.FILL)["address"].tolist() == [0, 2, 4]


def test_records_have_no_overhead_in_memory() -> None:
    assert np.zeros(1000, RECORD).nbytes == 96_000


@pytest.mark.parametrize(
    ("event", "field", "value"),
    [
        (Alloc(1, 8), "how", 9),
        (Alloc(1, 8), "how", 0),
        (StreamCreate(3), "flag", 77),
        (Gap("x"), "what", 1 << 31),
        (Launch(3, "k"), "name", 2),
    ],
)
def test_record_with_an_invalid_value_is_found(event: Fact, field: str, value: int) -> None:
    records = pack([Event(event)], lambda text: 1 if text else 0)
    assert find_invalid(records, 2) == ""

    view(records, event.kind)[field] = value

    reason = find_invalid(records, 2)
    assert reason == f"invalid {field} in a record of kind {event.kind.name}"
