from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import pytest

from cudakit.gpu.api.facts import CudaView, DeviceFacts, NvmlView, Process, Telemetry
from cudakit.gpu.api.run_context import RunContext
from cudakit.gpu.machine import open_machine
from cudakit.gpu.run_context import gather, gather_all
from cudakit.gpu.run_context.files import Files
from cudakit.units import Unavailable

GPU = DeviceFacts(0, "GPU-1", "0000:01:00.0", {})


@dataclass
class Machine:
    """A machine whose CUDA query raises an error."""

    simulated: bool = False

    def nvml(self) -> NvmlView | Unavailable:
        return NvmlView("580.159.04", "13.580.159.04", (GPU,), ())

    def cuda(self) -> CudaView | Unavailable:
        raise ZeroDivisionError("unforeseen")

    def telemetry(
        self, device: DeviceFacts, names: Collection[str] = ()
    ) -> Telemetry | Unavailable:
        return Telemetry(1, {"asked_of": device.index, "names": len(names)})

    def activity(self, device: DeviceFacts) -> Telemetry | Unavailable:
        return Unavailable(f"not asked for of {device.index}")

    def processes(self, device: DeviceFacts) -> tuple[Process, ...] | Unavailable:
        return Unavailable(f"not asked for of {device.index}")


class Working(Machine):
    """A machine with one GPU in CUDA and NVML, which two processes use."""

    def cuda(self) -> CudaView | Unavailable:
        return CudaView((13, 0), (GPU,), (), (), (), None, "/lib/libcuda.so.1", None, None)

    def processes(self, device: DeviceFacts) -> tuple[Process, ...] | Unavailable:
        return (Process(device.index + 1, "compute", 0, "a", "b"),) * 2


# --- gather: what results record -------------------------------------------------------------------


def test_results_record_versions_device_processes_and_command() -> None:
    context = gather(Working(), variables={"A": "1"}, command=("cudakit", "bench"))

    assert {"driver": "580.159.04", "CUDA": "13.0"}.items() <= context.versions.items()
    assert {"cudakit", "python"} <= context.versions.keys()
    assert (context.nvml_device, context.other_processes) == (GPU, 2)
    assert (context.variables, context.command) == ({"A": "1"}, ("cudakit", "bench"))


def test_gather_for_results_omits_slow_facts() -> None:
    context, default = gather(Working(), variables={}), RunContext()

    assert (context.driver, context.software) == (default.driver, default.software)
    assert (context.processes, context.telemetry) == (default.processes, ())


def test_device_unknown_to_nvml_has_no_count_of_processes() -> None:
    context = gather(Machine(), variables={})

    assert context.nvml_device is None
    assert context.other_processes == Unavailable("NVML does not report the device")


# --- gather_all: what doctor checks ----------------------------------------------------------------


def test_failure_to_read_one_fact_keeps_the_other_facts(tmp_path: Path) -> None:
    context = gather_all(
        Machine(), variables={}, search_path=[str(tmp_path)], files=Files(tmp_path)
    )

    assert context.cuda == Unavailable("reading failed: ZeroDivisionError: unforeseen")
    assert isinstance(context.nvml, NvmlView)
    assert context.telemetry == (Telemetry(1, {"asked_of": 0, "names": 0}),)
    assert context.software.distributions == ()


def test_simulated_machine_has_no_fact_of_the_host() -> None:
    context = gather_all(
        Machine(simulated=True), variables={"NCCL_DEBUG": "INFO"}, search_path=sys.path
    )

    assert context.simulated
    assert context.variables == {}
    assert context.software.distributions == ()
    assert isinstance(context.limits, Unavailable)
    assert context.host.kernel == ""
    assert isinstance(context.driver.kernel_log, Unavailable)
    assert context.software.libraries == ()


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"])
def test_variables_of_process_do_not_select_simulated_gpus(name: str) -> None:
    context = gather(open_machine("sim"), variables={name: "1", "CUDA_LAUNCH_BLOCKING": "1"})

    assert context.variables == {"CUDA_LAUNCH_BLOCKING": "1"}


def test_device_of_an_ordinal_is_found_in_nvml() -> None:
    context = gather(open_machine("sim:h200x2"), variables={}, ordinal=1)

    assert context.nvml_device is not None
    assert context.nvml_device.uuid == context.cuda_devices[1].uuid
    assert gather(open_machine("sim:h200x2"), variables={}, ordinal=2).nvml_device is None
