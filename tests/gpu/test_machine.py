from __future__ import annotations

import os
import sys

import pytest

from cudakit.errors import UsageError
from cudakit.gpu.api.facts import CudaView, DeviceFacts, NvmlView
from cudakit.gpu.machine import RealMachine, models, open_machine, record
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
