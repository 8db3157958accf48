from __future__ import annotations

import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudakit.errors import InputError, UsageError
from cudakit.gpu.api.facts import CudaView, DeviceFacts, Link, NvmlView, Process, Telemetry
from cudakit.gpu.machine import (
    RealMachine,
    Record,
    RecordedMachine,
    dumps,
    loads,
    model_record,
    models,
    open_machine,
    record,
)
from cudakit.gpu.probe import ask
from cudakit.units import Unavailable

NO_DRIVER = [sys.executable, "-c", 'print(\'{"missing": "libcuda.so.1: no such file"}\')']


def without_driver() -> RealMachine:
    return RealMachine(ask(environment={}, command=NO_DRIVER))


def test_the_real_machine_is_not_simulated_and_the_others_are() -> None:
    machine = open_machine("auto")

    assert not machine.simulated
    machine.cuda()  # the child has ended
    assert open_machine("sim").simulated


@pytest.mark.parametrize("choice", ["", "gpu", "cuda:0", "SIM", "sims"])
def test_a_gpu_that_there_is_no_word_for_is_refused(choice: str) -> None:
    with pytest.raises(UsageError, match="no such GPU"):
        open_machine(choice)


def test_a_model_that_does_not_exist_names_those_that_do() -> None:
    with pytest.raises(UsageError, match="'gtx9999'") as failure:
        open_machine("sim:gtx9999")

    assert all(model in failure.value.hint for model in models())
    assert "h200" in models()


@pytest.mark.parametrize("model", ["../h200", "h200.json", ""])
def test_a_model_is_a_name_and_no_path(model: str) -> None:
    if model:
        with pytest.raises(UsageError):
            open_machine(f"sim:{model}")
    else:
        assert open_machine("sim:").simulated


def test_a_machine_without_a_driver_says_what_is_missing() -> None:
    if os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/dxg"):
        pytest.skip("there is a driver")
    machine = without_driver()
    nvml, cuda = machine.nvml(), machine.cuda()

    assert isinstance(nvml, Unavailable)
    assert "libnvidia-ml.so.1 is not found" in nvml.reason
    assert cuda == Unavailable(
        "the CUDA driver's library cannot be loaded: libcuda.so.1: no such file"
    )
    device = DeviceFacts(0, "GPU-1", "0000:01:00.0", {})
    assert (
        machine.telemetry(device) == machine.activity(device) == machine.processes(device) == nvml
    )


def test_the_driver_is_asked_once() -> None:
    machine = without_driver()

    assert machine.cuda() is machine.cuda()


def test_links_are_there_only_where_they_are_asked_for() -> None:
    machine = open_machine("sim:h200x2")
    plain, linked = machine.nvml(), machine.nvml(links=True)

    assert isinstance(plain, NvmlView)
    assert isinstance(linked, NvmlView)
    assert (plain.links, [link.path for link in linked.links]) == ((), ["NV18"])


def test_a_machine_can_be_written_down() -> None:
    made = record(open_machine("sim:h200x2"))

    assert isinstance(made.cuda, CudaView)
    assert isinstance(made.nvml, NvmlView)
    assert len(made.nvml.links) == 1
    assert len(made.telemetry) == len(made.activity) == len(made.processes) == 2


@pytest.mark.gpu
def test_a_real_machine_knows_its_gpus_twice_and_by_the_same_name() -> None:
    machine = open_machine()
    nvml, cuda = machine.nvml(), machine.cuda()

    assert isinstance(nvml, NvmlView)
    assert isinstance(cuda, CudaView)
    ours = {device.uuid: device.fields["name"] for device in nvml.devices}
    assert {device.uuid: device.fields["name"] for device in cuda.devices}.items() <= ours.items()
    assert cuda.devices


@pytest.mark.gpu
def test_looking_at_a_real_machine_leaves_this_process_able_to_fork() -> None:
    machine = open_machine()
    machine.nvml(), machine.cuda()

    child = os.fork()
    if child == 0:
        os._exit(0 if isinstance(open_machine().cuda(), CudaView) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# --- recorded machines -----------------------------------------------------------------------------


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
