from __future__ import annotations

import ctypes
import os
import re
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from gpu.fake_nvml import FakeNvml, gpu, refuse
from hypothesis import given
from hypothesis import strategies as st

import cudakit.gpu
from cudakit.gpu.api.facts import DeviceFacts, NvmlView, Process, Telemetry
from cudakit.gpu.nvml import METRICS, Nvml, open_nvml, processes
from cudakit.gpu.nvml.readings import (
    CLOCK_EVENT_REASONS,
    FACT_READINGS,
    INSTANCE_READINGS,
    STRUCTURES,
    TELEMETRY_READINGS,
    Call,
    FieldValue,
    clock_event_reasons,
    cpu_ranges,
)
from cudakit.units import Unavailable

PACKAGE = Path(str(cudakit.gpu.__file__)).parent
READINGS = {**FACT_READINGS, **INSTANCE_READINGS, **TELEMETRY_READINGS}


def opened(lib: FakeNvml, *, wsl: bool = False) -> Nvml:
    nvml = open_nvml(lib, is_wsl=wsl)
    assert isinstance(nvml, Nvml)
    return nvml


def device_facts(lib: FakeNvml, *, wsl: bool = False) -> DeviceFacts:
    (device,) = opened(lib, wsl=wsl).view().devices
    return device


def telemetry(lib: FakeNvml, *names: str) -> Telemetry | Unavailable:
    nvml = opened(lib)
    return nvml.telemetry(nvml.view().devices[0], names)


# --- only functions that read are used --------------------------------------------------------------


def test_no_function_that_changes_a_device_is_used() -> None:
    files = (path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".csv"))
    sources = [path.read_text(encoding="utf-8") for path in files]

    functions = {name for source in sources for name in re.findall(r"nvml[A-Z]\w*", source)}
    assert len(functions) > 50
    assert not [
        name for name in functions if re.search("Set[A-Z]|Reset|Clear|Create|Destroy", name)
    ]


@pytest.mark.parametrize("name", READINGS)
def test_functions_and_constants_of_readings_exist_in_nvidia_ml_py(name: str) -> None:
    call, _ = READINGS[name]

    if isinstance(call, FieldValue):
        assert type(getattr(pynvml, call.identifier)) is int
        return
    assert callable(getattr(pynvml, call.function))
    names = [name for name in call.arguments if isinstance(name, str)]
    assert all(type(getattr(pynvml, name)) is int for name in names)


@pytest.mark.parametrize("function", STRUCTURES)
def test_structures_exist_in_nvidia_ml_py(function: str) -> None:
    structure, version = STRUCTURES[function]

    assert function in {call.function for call, _ in READINGS.values() if isinstance(call, Call)}
    assert issubclass(getattr(pynvml, structure), ctypes.Structure)
    assert type(getattr(pynvml, version)) is int


@pytest.mark.parametrize("metric", [field.source for field in METRICS.values()])
def test_activity_metrics_exist_in_nvidia_ml_py(metric: str) -> None:
    assert type(getattr(pynvml, metric)) is int


# --- initialization --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "libnvidia-ml.so.1 (NVML) cannot be loaded"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "kernel driver is not loaded"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "no permission to open /dev/nvidia"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "have different versions"),
        (pynvml.NVML_ERROR_UNKNOWN, "cannot be initialized: Unknown Error"),
    ],
)
def test_failed_init_has_a_reason(code: int, reason: str) -> None:
    nvml = open_nvml(FakeNvml([], init=code))

    assert isinstance(nvml, Unavailable)
    assert reason in nvml.reason


def test_view_without_gpus_is_empty() -> None:
    view = opened(FakeNvml([])).view()

    assert view == NvmlView("580.159.04", "13.580.159.04", (), ())


# --- fields ----------------------------------------------------------------------------------------


def test_gpu_has_uuid_and_linux_pci_address() -> None:
    device = device_facts(FakeNvml([gpu()]))

    assert (device.index, device.parent) == (0, None)
    assert device.uuid == "GPU-11111111-2222-3333-4444-555555555555"
    assert device.pci_bus_id == "0000:65:00.0"
    assert device.fields["pci_device_id"] == "0x233510de"


def test_long_pci_domain_is_kept() -> None:
    info = SimpleNamespace(busId=b"00010000:65:00.0", pciDeviceId=1, pciSubSystemId=1)

    assert device_facts(FakeNvml([gpu(nvmlDeviceGetPciInfo=info)])).pci_bus_id == "10000:65:00.0"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (pynvml.NVML_ERROR_NOT_SUPPORTED, "not supported by this device"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "no permission"),
        (pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, "this driver's NVML lacks the function"),
        (pynvml.NVML_ERROR_UNKNOWN, "NVML returns Unknown Error"),
        (pynvml.NVML_ERROR_GPU_IS_LOST, "the GPU has fallen off the bus"),
        (pynvml.NVML_ERROR_TIMEOUT, "NVML returns Timeout"),
        (777, "NVML returns NVML Error with code 777"),
    ],
)
def test_failed_call_affects_only_its_field(code: int, reason: str) -> None:
    device = device_facts(FakeNvml([gpu(nvmlDeviceGetSerial=refuse(code))]))

    assert device.fields["serial"] == Unavailable(reason)
    assert device.fields["name"] == "NVIDIA H200"


def test_unknown_error_in_wsl_names_wsl() -> None:
    lib = FakeNvml([gpu(nvmlDeviceGetSerial=refuse(pynvml.NVML_ERROR_UNKNOWN))])

    assert "WSL" in str(device_facts(lib, wsl=True).fields["serial"])


def test_function_missing_in_nvidia_ml_py_is_unavailable() -> None:
    def missing_function(*_: object) -> Any:
        raise AttributeError("nvmlDeviceGetSerial")

    device = device_facts(FakeNvml([gpu(nvmlDeviceGetSerial=missing_function)]))

    assert device.fields["serial"] == Unavailable("this nvidia-ml-py lacks the function")


def test_nvml_call_that_fills_several_fields_is_made_once() -> None:
    lib = FakeNvml([gpu(nvmlDeviceGetEccMode=[1, 0])])

    fields = device_facts(lib).fields
    assert (fields["ecc_mode"], fields["ecc_mode_pending"]) == (True, False)
    assert lib.calls.count("nvmlDeviceGetEccMode") == 1


def test_not_available_value_of_nvml_is_unavailable() -> None:
    facts = gpu(nvmlDeviceGetBoardId=2**64 - 1, nvmlDeviceGetNumGpuCores=2**32 - 1)
    fields = device_facts(FakeNvml([{**facts, "nvmlDeviceGetNumFans": 0}])).fields

    assert fields["board_id"] == fields["cuda_cores"] == Unavailable("NVML reports no value")
    assert fields["fans"] == 0


def test_milliwatts_become_exact_watts() -> None:
    reading = telemetry(FakeNvml([gpu(nvmlDeviceGetPowerUsage=692454)]), "power_draw_w")

    assert isinstance(reading, Telemetry)
    assert reading.fields == {"power_draw_w": 692.454}


def test_unexpected_answer_is_unavailable() -> None:
    device = device_facts(FakeNvml([gpu(nvmlDeviceGetCudaComputeCapability=[9])]))

    assert "cannot be converted" in str(device.fields["compute_capability"])


def test_field_values_are_read_in_one_batch_and_fail_separately() -> None:
    lib = FakeNvml([gpu()], values={"MEMORY_TEMP": 41})

    reading = telemetry(lib, "temperature_memory_c", "power_instant_w")
    assert isinstance(reading, Telemetry)
    assert reading.fields["temperature_memory_c"] == 41
    assert reading.fields["power_instant_w"] == Unavailable("not supported by this device")
    assert lib.calls[-1] == "nvmlDeviceGetFieldValues(2)"


def test_values_omitted_from_batches_are_read_alone() -> None:
    lib = FakeNvml([gpu()], values={"TEMPERATURE_SHUTDOWN_TLIMIT": 8})

    assert device_facts(lib).fields["temperature_shutdown_margin_c"] == 8
    assert lib.calls.count("nvmlDeviceGetFieldValues(1)") == 4


def test_names_select_nvml_calls() -> None:
    lib = FakeNvml([gpu()])
    nvml = opened(lib)
    device = nvml.view().devices[0]
    lib.calls.clear()

    nvml.telemetry(device, ["memory_used_bytes"])
    assert lib.calls == ["nvmlDeviceGetMemoryInfo"]


def test_old_driver_reports_memory_by_old_function() -> None:
    def old_function(_: object, version: int | None = None) -> Any:
        if version:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return SimpleNamespace(total=1000, used=400, free=600)

    reading = telemetry(FakeNvml([gpu(nvmlDeviceGetMemoryInfo=old_function)]))
    assert isinstance(reading, Telemetry)
    assert (reading.fields["memory_used_bytes"], reading.fields["memory_free_bytes"]) == (400, 600)
    assert isinstance(reading.fields["memory_reserved_bytes"], Unavailable)


# --- conversion of values
# -----------------------------------------------------------------------------------------


def test_clock_event_reasons_are_named_by_bit() -> None:
    assert clock_event_reasons(0) == ()
    assert clock_event_reasons(0x4 | 0x40) == ("software power cap", "hardware thermal slowdown")
    assert clock_event_reasons(0x1 | 0x8000) == ("idle", "unknown (0x8000)")


def test_every_clock_event_reason_of_nvidia_ml_py_has_a_name() -> None:
    assert clock_event_reasons(pynvml.nvmlClocksEventReasonAll) == tuple(
        CLOCK_EVENT_REASONS.values()
    )


def test_unknown_enumerator_is_named_unknown() -> None:
    assert (
        device_facts(FakeNvml([gpu(nvmlDeviceGetArchitecture=99)])).fields["architecture"]
        == "unknown (99)"
    )


@given(st.sets(st.integers(0, 200)))
def test_cpu_ranges_contain_the_same_cpus(cpus: set[int]) -> None:
    words = [sum(1 << cpu % 64 for cpu in cpus if cpu // 64 == index) for index in range(4)]

    named_cpus: set[int] = set()
    for part in filter(None, cpu_ranges(words).split(",")):
        first, _, end = part.partition("-")
        named_cpus |= set(range(int(first), int(end or first) + 1))
    assert named_cpus == cpus


# --- lost GPUs and MIG instances
# -----------------------------------------------------------------------------


def test_lost_gpu_has_no_telemetry() -> None:
    lost = refuse(pynvml.NVML_ERROR_GPU_IS_LOST)

    reading = telemetry(FakeNvml([gpu(nvmlDeviceGetTemperature=lost)]))
    assert reading == Unavailable("the GPU has fallen off the bus")


def test_gpu_lost_before_start_is_listed() -> None:
    lib = FakeNvml([{"handle": pynvml.NVML_ERROR_GPU_IS_LOST}, gpu()])
    nvml = opened(lib)

    first, second = nvml.view().devices
    assert first.uuid == Unavailable("the GPU has fallen off the bus")
    assert second.fields["name"] == "NVIDIA H200"
    assert nvml.telemetry(first) == first.uuid


def test_mig_instances_follow_their_gpu_with_reasons_for_its_fields() -> None:
    def count(_: object) -> int:
        return 7

    lib = FakeNvml(
        [gpu(nvmlDeviceGetMigMode=[1, 1], nvmlDeviceGetMaxMigDeviceCount=count)],
        instances={
            (0, 2): gpu(nvmlDeviceGetUUID="MIG-1", nvmlDeviceGetGpuInstanceId=5),
            (0, 5): gpu(nvmlDeviceGetUUID="MIG-2", nvmlDeviceGetGpuInstanceId=6),
        },
    )
    gpu_facts, first, second = opened(lib).view().devices

    assert (gpu_facts.parent, first.parent, second.parent) == (None, 0, 0)
    assert (first.uuid, first.index, first.fields["gpu_instance_id"]) == ("MIG-1", 2, 5)
    assert first.pci_bus_id == gpu_facts.pci_bus_id
    assert first.fields["serial"] == Unavailable("not reported for a MIG instance: see its GPU")
    assert gpu_facts.fields["serial"] == Unavailable("not supported by this device")


def test_mig_instance_refers_to_its_gpu_only_for_values_that_the_gpu_has() -> None:
    def one_instance(_: object) -> int:
        return 1

    lib = FakeNvml(
        [gpu(nvmlDeviceGetMigMode=[1, 1], nvmlDeviceGetMaxMigDeviceCount=one_instance)],
        instances={(0, 0): gpu(nvmlDeviceGetUUID="MIG-1")},
    )
    nvml = opened(lib)
    reading = nvml.telemetry(nvml.view().devices[1])

    assert isinstance(reading, Telemetry)
    assert reading.fields["utilization_gpu_percent"] == Unavailable(
        "utilization is not counted where MIG is on"
    )
    assert reading.fields["power_draw_w"] == Unavailable(
        "not reported for a MIG instance: see its GPU"
    )


# --- activity --------------------------------------------------------------------------------------


def counting(**answers: Any) -> dict[str, Any]:
    def metrics(request: Any) -> None:
        for index in range(request.numMetrics):
            request.metrics[index].value = 12.5

    return gpu(
        nvmlGpmQueryDeviceSupport=SimpleNamespace(isSupportedDevice=1),
        nvmlGpmSampleGet=lambda _, sample: sample,
        **{"metrics": metrics, **answers},
    )


class CountingNvml(FakeNvml):
    """A fake NVML with GPM, whose functions take no handle."""

    def nvmlGpmSampleAlloc(self) -> Any:  # noqa: N802
        return pynvml.c_nvmlGpmSample_t()

    def nvmlGpmSampleFree(self, _: Any) -> None:  # noqa: N802
        self.calls.append("nvmlGpmSampleFree")

    def nvmlGpmMetricsGet(self, request: Any) -> None:  # noqa: N802
        self.gpus[0]["metrics"](request)


def test_activity_is_measured_between_two_samples() -> None:
    lib = CountingNvml([counting()])
    nvml = opened(lib)
    device = nvml.view().devices[0]

    first, second = nvml.activity(device), nvml.activity(device)
    assert isinstance(first, Telemetry)
    assert isinstance(second, Telemetry)
    assert set(first.fields.values()) == {Unavailable("needs a second sample")}
    assert second.fields["sm_activity_percent"] == 12.5
    assert second.fields["pcie_sent_bytes_per_s"] == 12.5 * 2**20
    assert lib.calls.count("nvmlGpmSampleFree") == 1


def test_names_select_activity_metrics() -> None:
    nvml = opened(CountingNvml([counting()]))
    device = nvml.view().devices[0]
    nvml.activity(device)

    activity = nvml.activity(device, ["sm_activity_percent"])
    assert isinstance(activity, Telemetry)
    assert set(activity.fields) == {"sm_activity_percent"}


def test_gpu_without_gpm_has_a_reason() -> None:
    unsupported = SimpleNamespace(isSupportedDevice=0)
    nvml = opened(FakeNvml([gpu(nvmlGpmQueryDeviceSupport=unsupported)]))

    activity = nvml.activity(nvml.view().devices[0])
    assert isinstance(activity, Unavailable)
    assert "Hopper" in activity.reason


# --- links -----------------------------------------------------------------------------------------


def linked(number: int, remote_ends: list[Any], **answers: Any) -> dict[str, Any]:
    def state(_: object, link: int) -> int:
        return 1 if link < len(remote_ends) else refuse(pynvml.NVML_ERROR_INVALID_ARGUMENT)()

    def kind(_: object, link: int) -> int:
        return 2 if remote_ends[link] == "switch" else 0

    return gpu(
        nvmlDeviceGetPciInfo=SimpleNamespace(
            busId=f"00000000:0{number}:00.0", pciDeviceId=1, pciSubSystemId=1
        ),
        nvmlDeviceGetNvLinkState=state,
        nvmlDeviceGetNvLinkRemoteDeviceType=kind,
        nvmlDeviceGetNvLinkRemotePciInfo=lambda _, link: SimpleNamespace(
            busId=f"00000000:0{remote_ends[link]}:00.0"
        ),
        **{
            "nvmlDeviceGetTopologyCommonAncestor": 50,
            "nvmlDeviceGetP2PStatus": lambda *_: 0,
            **answers,
        },
    )


def paths(*gpus: dict[str, Any]) -> list[str | Unavailable]:
    nvml = opened(FakeNvml(list(gpus)))
    return [link.path for link in nvml.links(nvml.view())]


def test_gpus_behind_a_switch_share_the_smaller_number_of_links() -> None:
    assert paths(linked(1, ["switch"] * 18), linked(2, ["switch"] * 17)) == ["NV17"]


def test_directly_connected_gpus_count_only_their_links() -> None:
    assert paths(linked(1, [2, 2, 3]), linked(2, [1, 1]), linked(3, [1])) == ["NV2", "NV1", "SYS"]


def test_path_without_nvlink_has_name_of_nvidia_smi() -> None:
    assert paths(linked(1, []), linked(2, [])) == ["SYS"]


def test_inactive_links_do_not_count() -> None:
    def status(_: object, __: object, capability: int) -> int:
        return 4 if capability == 2 else 0

    inactive = {"nvmlDeviceGetP2PStatus": status}
    assert paths(linked(1, [2], **inactive), linked(2, [1], **inactive)) == ["SYS"]


def test_missing_peer_access_has_a_reason() -> None:
    refused = {"nvmlDeviceGetP2PStatus": lambda *_: 1}
    nvml = opened(FakeNvml([linked(1, [], **refused), linked(2, [], **refused)]))

    (link,) = nvml.links(nvml.view())
    assert link.p2p_read == "the chipset does not support it"
    assert link.nvlinks == 0


def test_every_pair_is_listed_once() -> None:
    nvml = opened(FakeNvml([linked(number, []) for number in range(4)]))

    pairs = {(link.first, link.second) for link in nvml.links(nvml.view())}
    assert pairs == {
        (first, second) for first, second in permutations(range(4), 2) if first < second
    }


# --- processes -------------------------------------------------------------------------------------


def test_process_has_command_owner_and_memory(tmp_path: Path) -> None:
    (tmp_path / "41").mkdir()
    (tmp_path / "41" / "cmdline").write_bytes(b"python\0train.py\0")
    running = [SimpleNamespace(pid=41, usedGpuMemory=1000)]
    nvml = opened(FakeNvml([gpu(nvmlDeviceGetComputeRunningProcesses_v3=running)]))
    nvml.view()

    reader = nvml._reader(nvml.view().devices[0])
    assert not isinstance(reader, Unavailable)
    process_list = processes(reader, proc_directory=tmp_path)
    assert isinstance(process_list, tuple)
    assert [
        (process.pid, process.kind, process.used_bytes, process.name) for process in process_list
    ] == [(41, "compute", 1000, "python train.py")]
    assert isinstance(process_list[0].user, str)


def test_process_of_other_namespace_is_listed_without_command(tmp_path: Path) -> None:
    running = [SimpleNamespace(pid=7, usedGpuMemory=None)]
    nvml = opened(FakeNvml([gpu(nvmlDeviceGetGraphicsRunningProcesses_v3=running)]))
    reader = nvml._reader(nvml.view().devices[0])
    assert not isinstance(reader, Unavailable)

    (process,) = processes(reader, proc_directory=tmp_path) or ()
    assert process.kind == "graphics"
    assert "another container" in str(process.name)
    assert "does not report memory" in str(process.used_bytes)


def listed_with(utilization: object, proc: Path) -> tuple[Process, ...]:
    (proc / "41").mkdir()
    after_command = f"S {'0 ' * 18}{100 * os.sysconf('SC_CLK_TCK')} 0 0"
    (proc / "41" / "stat").write_text(f"41 (a) b) {after_command}")
    (proc / "uptime").write_text("160.50 900.00\n")
    running = [SimpleNamespace(pid=41, usedGpuMemory=1000)]
    device = gpu(
        nvmlDeviceGetComputeRunningProcesses_v3=running, nvmlDeviceGetProcessUtilization=utilization
    )
    nvml = opened(FakeNvml([device]))
    reader = nvml._reader(nvml.view().devices[0])
    assert not isinstance(reader, Unavailable)
    listed_processes = processes(reader, proc_directory=proc)
    assert isinstance(listed_processes, tuple)
    return listed_processes


def test_process_has_newest_sm_utilization_and_runtime(tmp_path: Path) -> None:
    samples = [
        SimpleNamespace(pid=41, timeStamp=2, smUtil=93),
        SimpleNamespace(pid=41, timeStamp=1, smUtil=10),
        SimpleNamespace(pid=42, timeStamp=3, smUtil=5),
    ]

    (process,) = listed_with(samples, tmp_path)

    assert (process.sm_percent, process.runtime_s) == (93, 60.5)


@pytest.mark.parametrize(
    "utilization",
    [
        refuse(pynvml.NVML_ERROR_NOT_FOUND),
        refuse(pynvml.NVML_SUCCESS),  # the error that nvidia-ml-py raises if there are no samples
        [SimpleNamespace(pid=41, timeStamp=1, smUtil=2**32 - 1)],
    ],
)
def test_process_without_sample_has_not_used_the_sms(tmp_path: Path, utilization: object) -> None:
    (process,) = listed_with(utilization, tmp_path)

    assert process.sm_percent == 0


def test_refused_utilization_by_process_has_a_reason(tmp_path: Path) -> None:
    (process,) = listed_with(refuse(pynvml.NVML_ERROR_NOT_SUPPORTED), tmp_path)

    assert process.sm_percent == Unavailable("not supported by this device")


def test_old_driver_lists_processes_by_old_function() -> None:
    refusal = refuse(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    old_entries = [SimpleNamespace(pid=1, usedGpuMemory=5)]
    nvml = opened(
        FakeNvml(
            [
                gpu(
                    nvmlDeviceGetComputeRunningProcesses_v3=refusal,
                    nvmlDeviceGetComputeRunningProcesses_v2=old_entries,
                )
            ]
        )
    )

    listed_processes = nvml.processes(nvml.view().devices[0])
    assert isinstance(listed_processes, tuple)
    assert [process.pid for process in listed_processes] == [1]


def test_processes_are_unavailable_if_nvml_refuses_every_kind() -> None:
    nvml = opened(FakeNvml([gpu()]))

    processes = nvml.processes(nvml.view().devices[0])
    assert processes == Unavailable("not supported by this device")


def test_calls_are_equal_by_function_and_arguments() -> None:
    assert Call("f", ("A",)) == Call("f", ("A",)) != Call("f", ("B",))
