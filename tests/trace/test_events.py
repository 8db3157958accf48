from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from traces import BODIES, events

from cudakit.trace.events import (
    Access,
    Alloc,
    ContextSync,
    Copy,
    Event,
    EventBody,
    Fill,
    Gap,
    Launch,
    StreamCreate,
)
from cudakit.trace.kinds import AccessMode, EventKind
from cudakit.trace.trace_file import (
    ADDRESS_END,
    RECORD,
    RECORD_BYTES,
    concatenate_records,
    find_invalid,
    layout,
    pack,
    take_records,
    unpack,
    view,
)


class StringTable(list[str]):
    """A string table."""

    def __init__(self) -> None:
        super().__init__([""])

    def index_of(self, text: str) -> int:
        if text not in self:
            self.append(text)
        return self.index(text)


def test_each_kind_has_one_body() -> None:
    assert sorted(body.kind for body in BODIES) == sorted(EventKind)


@given(st.lists(events(), max_size=5))
def test_unpack_inverts_pack(trace: list[Event]) -> None:
    strings = StringTable()

    assert list(unpack(pack(trace, strings.index_of), strings)) == trace


@pytest.mark.parametrize("kind", EventKind)
def test_record_layout_matches_c(kind: EventKind) -> None:
    dtype = layout(kind)
    field_offsets = sorted((offset, field_type) for field_type, offset, *_ in dtype.fields.values())

    assert dtype.itemsize == RECORD.itemsize == RECORD_BYTES == 96
    assert all(offset % field_type.base.alignment == 0 for offset, field_type in field_offsets)
    assert all(
        offset + field_type.itemsize <= next_offset
        for (offset, field_type), (next_offset, _) in zip(
            field_offsets, [*field_offsets[1:], (96, None)], strict=True
        )
    )


# The native recorder writes these offsets; a change breaks all existing trace files.
OFFSETS = {
    EventKind.ALLOC: {
        "address": 40,
        "size_bytes": 48,
        "allocation_kind": 56,
        "layer": 57,
        "pool": 60,
        "requested_bytes": 64,
        "stream": 24,
    },
    EventKind.LAUNCH: {"name": 40, "grid": 44, "block": 56, "pending": 68},
    EventKind.ACCESS: {
        "lo": 40,
        "hi": 48,
        "mode": 56,
        "precision": 57,
        "stride_bytes": 64,
        "count": 72,
    },
    EventKind.COPY: {
        "destination": 40,
        "source": 48,
        "size_bytes": 56,
        "rows": 64,
        "direction": 88,
    },
    EventKind.STREAM_WAIT: {"event": 40, "stream": 24},
    EventKind.GRAPH_NODE: {"graph": 40, "node": 44, "node_type": 48, "name": 52},
    EventKind.GRAPH_LAUNCH: {"graph": 40, "executable": 44, "pending": 48},
    EventKind.ACCESSED: {"node": 40, "exact": 44},
    EventKind.ARENAS: {"size_bytes": 40},
    EventKind.API_CALL: {
        "function": 40,
        "correlation": 44,
        "start_ns": 48,
        "end_ns": 56,
        "size_bytes": 64,
    },
    EventKind.KERNEL_RUN: {
        "name": 40,
        "correlation": 44,
        "start_ns": 48,
        "end_ns": 56,
        "graph_node": 64,
        "grid": 72,
        "block": 84,
        "registers": 90,
        "shared_bytes": 92,
    },
    EventKind.COPY_RUN: {
        "start_ns": 40,
        "end_ns": 48,
        "size_bytes": 56,
        "correlation": 64,
        "peer_device": 68,
        "direction": 70,
        "source_memory": 71,
        "destination_memory": 72,
        "graph_node": 80,
    },
    EventKind.FILL_RUN: {
        "start_ns": 40,
        "end_ns": 48,
        "size_bytes": 56,
        "correlation": 64,
        "graph_node": 72,
    },
    EventKind.GRAPH_NODE_SITE: {"graph_node": 40},
    EventKind.PROFILE_WINDOW: {"is_open": 40},
    EventKind.DEVICE_INFO: {
        "name": 40,
        "multiprocessors": 44,
        "memory_bytes": 48,
        "threads_per_multiprocessor": 56,
        "blocks_per_multiprocessor": 60,
        "registers_per_multiprocessor": 64,
        "shared_bytes_per_multiprocessor": 68,
        "reserved_shared_bytes_per_block": 72,
    },
}


@pytest.mark.parametrize(("kind", "expected"), OFFSETS.items())
def test_field_offsets_are_fixed(kind: EventKind, expected: dict[str, int]) -> None:
    offsets = {name: offset for name, (_, offset, *_) in layout(kind).fields.items()}

    assert {name: offsets[name] for name in expected} == expected
    assert [offsets[name] for name in ("seq", "time_ns", "thread")] == [0, 8, 16]
    assert [offsets[name] for name in ("context", "site", "device", "kind")] == [28, 32, 36, 38]


def test_batch_is_read_by_column() -> None:
    trace = [
        Event(Fill(stream=3, address=512, size_bytes=8), seq=1),
        Event(ContextSync(), seq=2),
        Event(Copy(stream=4, destination=8, source=16, size_bytes=4), seq=3),
        Event(Fill(stream=5, address=1024, size_bytes=8), seq=4),
    ]
    batch = pack(trace, StringTable().index_of)

    fills = view(batch[batch["kind"] == EventKind.FILL], EventKind.FILL)

    assert batch["stream"].tolist() == [3, 0, 4, 5]
    assert batch["seq"].tolist() == [1, 2, 3, 4]
    assert fills["address"].tolist() == [512, 1024]
    assert fills["stream"].tolist() == [3, 5]


def test_launch_refers_to_its_kernel_by_string_index() -> None:
    strings = StringTable()
    batch = pack([Event(Launch(stream=1, name="saxpy", grid=(7, 1, 1)))], strings.index_of)

    launch = view(batch, EventKind.LAUNCH)[0]

    assert strings[launch["name"]] == "saxpy"
    assert launch["grid"].tolist() == [7, 1, 1]


def test_access_modes_combine() -> None:
    body = Access(lo=0, hi=4, mode=AccessMode.READ | AccessMode.ATOMIC)

    (unpacked,) = unpack(pack([Event(body)], StringTable().index_of), [""])

    assert unpacked.body == body
    assert isinstance(unpacked.body, Access)
    assert AccessMode.ATOMIC in unpacked.body.mode
    assert AccessMode.WRITE not in unpacked.body.mode


def test_view_accepts_non_contiguous_records() -> None:
    trace = [Event(Fill(stream=1, address=index, size_bytes=1)) for index in range(6)]

    assert view(pack(trace, StringTable().index_of)[::2], EventKind.FILL)["address"].tolist() == [
        0,
        2,
        4,
    ]


def test_records_have_no_overhead_in_memory() -> None:
    assert np.zeros(1000, RECORD).nbytes == 96_000


@pytest.mark.parametrize(
    ("event", "field", "value"),
    [
        (Alloc(1, 8), "allocation_kind", 9),
        (Alloc(1, 8), "allocation_kind", 0),
        (StreamCreate(3), "flag", 77),
        (Gap("x"), "reason", 1 << 31),
        (Launch(3, "k"), "name", 2),
    ],
)
def test_record_with_an_invalid_value_is_found(event: EventBody, field: str, value: int) -> None:
    records = pack([Event(event)], lambda text: 1 if text else 0)
    assert find_invalid(records, 2) == ""

    view(records, event.kind)[field] = value

    reason = find_invalid(records, 2)
    assert reason == f"invalid {field} in a record of kind {event.kind.name}"


@pytest.mark.parametrize("field", ["lo", "hi"])
def test_access_beyond_all_addresses_is_found(field: str) -> None:
    records = pack([Event(Access(0, ADDRESS_END, AccessMode.READ))], lambda _: 0)
    assert find_invalid(records, 1) == ""

    view(records, EventKind.ACCESS)[field] = ADDRESS_END + 1

    assert find_invalid(records, 1) == "invalid address in a record of kind ACCESS"


def test_selected_and_joined_records_keep_all_bytes() -> None:
    events = [Event(Fill(1, address, 8), seq=address) for address in range(6)]
    records = pack(events, lambda _: 0)
    is_even = records["seq"] % 2 == 0

    assert take_records(records, is_even).tobytes() == records[::2].tobytes()
    assert take_records(records, np.array([3, 1]))["seq"].tolist() == [3, 1]
    joined = concatenate_records([records[:2], records[4:], records[2:4]])
    assert joined["seq"].tolist() == [0, 1, 4, 5, 2, 3]
