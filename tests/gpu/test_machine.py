""""""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudakit.errors import NO_DRIVER as NO_DRIVER_REASON
from cudakit.errors import GpuUnavailable, InputError, UsageError
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
from cudakit.gpu.open import open_gpu
from cudakit.gpu.probe import start_probe
from cudakit.units import Unavailable

NO_DRIVER = [sys.executable, "-c", 'print(\'{"missing": "libcuda.so.1: no such file"}\')']


def without_driver() -> RealMachine:
    return RealMachine(start_probe(environment={}, command=NO_DRIVER))


def test_only_real_machine_is_not_simulated() -> None:
    machine = open_machine("auto")

    assert not machine.simulated
    machine.cuda()  # the child process has ended
    assert open_machine("sim").simulated


@pytest.mark.parametrize("choice", ["", "gpu", "cuda:0", "SIM", "sims"])
def test_unknown_gpu_choice_is_refused(choice: str) -> None:
    with pytest.raises(UsageError, match="unknown GPU choice"):
        open_machine(choice)


def test_unknown_model_is_refused_with_known_models() -> None:
    with pytest.raises(UsageError, match="'gtx9999'") as failure:
        open_machine("sim:gtx9999")

    assert all(model in failure.value.hint for model in models())
    assert "h200" in models()


@pytest.mark.parametrize("model", ["../h200", "h200.json", ""])
def test_model_path_is_refused(model: str) -> None:
    if model:
        with pytest.raises(UsageError):
            open_machine(f"sim:{model}")
    else:
        assert open_machine("sim:").simulated


def test_machine_without_driver_has_reasons() -> None:
    if os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/dxg"):
        pytest.skip("there is a driver")
    machine = without_driver()
    nvml, cuda = machine.nvml(), machine.cuda()

    assert isinstance(nvml, Unavailable)
    assert "libnvidia-ml.so.1 (NVML) cannot be loaded" in nvml.reason
    assert cuda == Unavailable(f"{NO_DRIVER_REASON}: libcuda.so.1: no such file")
    device = DeviceFacts(0, "GPU-1", "0000:01:00.0", {})
    assert (
        machine.telemetry(device) == machine.activity(device) == machine.processes(device) == nvml
    )


def test_driver_is_queried_once() -> None:
    machine = without_driver()

    assert machine.cuda() is machine.cuda()


def test_links_are_read_on_request_only() -> None:
    machine = open_machine("sim:h200x2")
    plain, linked = machine.nvml(), machine.nvml(links=True)

    assert isinstance(plain, NvmlView)
    assert isinstance(linked, NvmlView)
    assert (plain.links, [link.path for link in linked.links]) == ((), ["NV18"])


def test_machine_is_recorded() -> None:
    recorded = record(open_machine("sim:h200x2"))

    assert isinstance(recorded.cuda, CudaView)
    assert isinstance(recorded.nvml, NvmlView)
    assert len(recorded.nvml.links) == 1
    assert len(recorded.telemetry) == len(recorded.activity) == len(recorded.processes) == 2


@pytest.mark.gpu
def test_real_machine_has_same_gpus_in_cuda_and_nvml() -> None:
    machine = open_machine()
    nvml, cuda = machine.nvml(), machine.cuda()

    assert isinstance(nvml, NvmlView)
    assert isinstance(cuda, CudaView)
    nvml_names = {device.uuid: device.fields["name"] for device in nvml.devices}
    assert {
        device.uuid: device.fields["name"] for device in cuda.devices
    }.items() <= nvml_names.items()
    assert cuda.devices


@pytest.mark.gpu
def test_querying_real_machine_keeps_process_able_to_fork() -> None:
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
def test_record_survives_json(record: Record) -> None:
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
def test_invalid_record_is_refused_with_location(text: str, reason: str) -> None:
    with pytest.raises(InputError, match=f"box.json is not a recorded machine: .*{reason}"):
        loads(text, name="box.json")


@pytest.mark.parametrize("model", models())
def test_model_is_readable_and_has_origin(model: str) -> None:
    record = model_record(model)

    assert {"date", "driver", "machine"} <= record.about.keys()
    assert isinstance(record.nvml, NvmlView)
    assert len(record.telemetry) == len(record.nvml.devices)


@pytest.mark.parametrize("model", models())
def test_model_identifies_no_machine(model: str) -> None:
    record = model_record(model)

    assert isinstance(record.nvml, NvmlView)
    assert isinstance(record.cuda, CudaView)
    for device in (*record.nvml.devices, *record.cuda.devices):
        assert isinstance(device.uuid, Unavailable) or "-5eed-4c0d-a517-" in device.uuid
        assert device.fields.get("serial", "1650000000000") == "1650000000000" or isinstance(
            device.fields["serial"], Unavailable
        )


def test_recorded_machine_returns_its_record() -> None:
    devices = tuple(DeviceFacts(index, f"GPU-{index}", "", {}) for index in range(2))
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
    assert machine.activity(devices[0]) == Unavailable("not simulated")


without_gpu = pytest.mark.skipif(
    any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists(),
    reason="needs a machine without a CUDA device",
)


@pytest.mark.parametrize("name", ["", "gpu", "cuda:1", "auto:h200", "h200", "SIM"])
def test_unknown_gpu_error_lists_names(name: str) -> None:
    with pytest.raises(UsageError, match=repr(name)) as caught:
        open_gpu(name)
    assert all(word in caught.value.hint for word in ("auto", "cuda", "sim:MODEL"))


@without_gpu
@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_missing_driver_hints_at_installation_and_not_at_options(name: str) -> None:
    with pytest.raises(GpuUnavailable, match="no CUDA driver found: libcuda") as caught:
        open_gpu(name)
    assert "install the NVIDIA driver" in caught.value.hint
    assert "--gpu sim" not in caught.value.hint
    assert caught.value.exit_code == 3


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_real_device_is_opened_if_present(name: str) -> None:
    gpu = open_gpu(name)
    assert not gpu.simulated
    gpu.close()


@pytest.mark.parametrize("name", ["sim", "sim:h200"])
def test_simulated_device_is_opened_by_name(name: str) -> None:
    gpu = open_gpu(name)
    assert gpu.simulated
    gpu.close()
