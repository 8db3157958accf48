from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudakit.errors import InputError
from cudakit.gpu.api.facts import CudaView, DeviceFacts, Link, NvmlView, Process, Telemetry
from cudakit.gpu.machine import model_record, models
from cudakit.gpu.record import Record, RecordedMachine, dumps, loads
from cudakit.units import Unavailable

REASONS = st.builds(Unavailable, st.text())
SCALARS = st.one_of(
    st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(), st.booleans()
)
FIELDS = st.dictionaries(
    st.text(), st.one_of(SCALARS, st.lists(SCALARS).map(tuple), REASONS), max_size=4
)
WORDS = st.one_of(st.text(), REASONS)
INDICES = st.integers(-1, 9)
DEVICES = st.lists(
    st.builds(DeviceFacts, INDICES, WORDS, WORDS, FIELDS, st.none() | INDICES), max_size=3
).map(tuple)
PAIRS = st.lists(st.tuples(INDICES, INDICES), max_size=3).map(tuple)
LINKS = st.builds(Link, INDICES, INDICES, WORDS, st.one_of(INDICES, REASONS), WORDS, WORDS, WORDS)
NVML = st.builds(NvmlView, WORDS, WORDS, DEVICES, st.lists(LINKS, max_size=2).map(tuple))
CUDA = st.builds(
    CudaView,
    driver_version=st.one_of(st.tuples(INDICES, INDICES), REASONS),
    devices=DEVICES,
    hidden=DEVICES,
    peer_access=PAIRS,
    peer_atomics=PAIRS,
    error=st.none() | st.tuples(INDICES, st.text(), st.text()),
    libcuda=WORDS,
    visible_devices=st.none() | st.text(),
    device_order=st.none() | st.text(),
    order=st.lists(st.text(), max_size=3).map(tuple),
)
TELEMETRY = st.lists(
    st.one_of(st.builds(Telemetry, st.integers(), FIELDS), REASONS), max_size=3
).map(tuple)
PROCESSES = st.lists(
    st.one_of(
        st.lists(
            st.builds(Process, INDICES, st.text(), st.one_of(INDICES, REASONS), WORDS, WORDS),
            max_size=2,
        ).map(tuple),
        REASONS,
    ),
    max_size=2,
).map(tuple)
RECORDS = st.builds(
    Record,
    st.one_of(NVML, REASONS),
    st.one_of(CUDA, REASONS),
    TELEMETRY,
    TELEMETRY,
    PROCESSES,
    st.dictionaries(st.text(), st.text(), max_size=2),
)


@given(RECORDS)
def test_what_is_written_down_is_read_again(record: Record) -> None:
    assert loads(dumps(record)) == record


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ("[]", "the file should be an object"),
        ("{}", "nvml is missing"),
        ('{"nvml": 3, "cuda": {"unavailable": "x"}}', "nvml should be an object, not 3"),
        ('{"nvml": {"unavailable": "x"}, "cuda": {"devices": []}}', "missing"),
        ('{"nvml": {"unavailable": "x"}, "cuda": {"unavailable": "x"}, "odd": 1}', "key 'odd'"),
        ('{"nvml": {"unavailable": 3}, "cuda": {"unavailable": "x"}}', "nvml should be a text"),
        (
            '{"nvml": {"unavailable": "x"}, "cuda": {"unavailable": "x"}, "telemetry": [7]}',
            r"telemetry\[0\] should be an object, not 7",
        ),
    ],
)
def test_what_is_no_record_is_refused_with_the_place_that_is_wrong(text: str, reason: str) -> None:
    with pytest.raises(InputError, match=f"box.json is not a recorded machine: .*{reason}"):
        loads(text, name="box.json")


@pytest.mark.parametrize("model", models())
def test_every_model_can_be_read_and_says_where_it_is_from(model: str) -> None:
    record = model_record(model)

    assert {"date", "driver", "machine"} <= record.about.keys()
    assert isinstance(record.nvml, NvmlView)
    assert len(record.telemetry) == len(record.nvml.devices)


@pytest.mark.parametrize("model", models())
def test_no_model_says_whose_machine_it_was(model: str) -> None:
    record = model_record(model)

    assert isinstance(record.nvml, NvmlView)
    assert isinstance(record.cuda, CudaView)
    for device in (*record.nvml.devices, *record.cuda.devices):
        assert isinstance(device.uuid, Unavailable) or "-5eed-4c0d-a517-" in device.uuid
        assert device.fields.get("serial", "1650000000000") == "1650000000000" or isinstance(
            device.fields["serial"], Unavailable
        )


def test_a_recorded_machine_says_of_each_device_what_was_recorded_of_it() -> None:
    devices = tuple(DeviceFacts(at, f"GPU-{at}", "", {}) for at in range(2))
    machine = RecordedMachine(
        Record(
            NvmlView("1", "1", devices, ()),
            Unavailable("no driver"),
            telemetry=(Telemetry(1, {"a": 1, "b": 2}), Unavailable("lost")),
        )
    )

    assert machine.simulated
    assert machine.telemetry(devices[0]) == Telemetry(1, {"a": 1, "b": 2})
    assert machine.telemetry(devices[0], ["b"]) == Telemetry(1, {"b": 2})
    assert machine.telemetry(devices[1]) == Unavailable("lost")
    assert machine.activity(devices[0]) == Unavailable("was not recorded")
