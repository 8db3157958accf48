from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest

import cudakit
from cudakit.errors import CudaError
from cudakit.gpu.api import LEGACY, Ptr
from cudakit.gpu.cuda.device import Cuda
from cudakit.gpu.cuda.driver import check, cu
from cudakit.gpu.device import Handles


def child(script: str) -> str:
    """Run a script in a child process; return its output."""
    command = [sys.executable, "-P", "-W", "error", "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_handle_is_found_by_id_until_removed() -> None:
    handles = Handles("stream", first=3)
    first, second = handles.add("a"), handles.add("b")

    assert (first, second, handles[first], handles.remove(second)) == (3, 4, "a", "b")
    assert handles.add("c") == 5
    with pytest.raises(CudaError, match="stream 4"):
        handles[second]
    with pytest.raises(CudaError, match="stream 4"):
        handles.remove(second)


def test_handles_are_cleared_newest_first() -> None:
    handles = Handles("event")
    for name in "abcd":
        handles.add(name)
    handles.discard(lambda name: name == "b")

    assert handles.clear() == ["d", "c", "a"]
    assert handles.clear() == []


def test_importing_gpu_modules_loads_no_driver() -> None:
    script = """
import cudakit, cudakit.gpu.cuda.current, cudakit.gpu.cuda.device, cudakit.gpu.machine, cudakit.gpu.compile
print("libcuda" in open("/proc/self/maps").read())
"""
    assert child(script) == "False"


@pytest.fixture
def gpu() -> Iterator[Cuda]:
    with closing(Cuda(0)) as gpu:
        yield gpu


def current() -> int:
    return int(check(cu.cuCtxGetCurrent()))


@pytest.mark.gpu
def test_call_leaves_thread_without_context(gpu: Cuda) -> None:
    def contexts() -> tuple[int, int]:
        context_before = current()
        gpu.free(gpu.malloc(64))
        return context_before, current()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(contexts).result() == (0, 0)


@pytest.mark.gpu
def test_call_restores_current_context_even_on_error(gpu: Cuda) -> None:
    device = check(cu.cuDeviceGet(0))
    # Another primary context, because cuCtxCreate has different arguments in CUDA 12 and 13.
    other_context = check(cu.cuDevicePrimaryCtxRetain(device))
    check(cu.cuCtxPushCurrent(other_context))
    try:
        gpu.sync()
        with pytest.raises(CudaError):
            gpu.malloc(1 << 60)
        assert current() == int(other_context)
    finally:
        check(cu.cuCtxPopCurrent())
        check(cu.cuDevicePrimaryCtxRelease(device))


@pytest.mark.gpu
def test_close_frees_remaining_allocations(gpu: Cuda) -> None:
    free_bytes_before = gpu.memory_info().free_bytes
    other_device = Cuda(0)
    page = other_device.granularity()
    for _ in range(3):
        other_device.malloc(64 << 20)
        ptr, backing = other_device.reserve(32 * page), other_device.create(32 * page)
        other_device.map(ptr, backing, 32 * page)
    free_bytes = gpu.memory_info().free_bytes
    other_device.close()

    assert free_bytes_before - free_bytes >= 3 * (64 << 20) + 3 * 32 * page
    assert gpu.memory_info().free_bytes == free_bytes_before


@pytest.mark.gpu
def test_torch_memory_is_shared(gpu: Cuda) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(8, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    pinned = gpu.host_malloc(32)

    gpu.copy(pinned, Ptr(tensor.data_ptr()), 32, LEGACY)
    gpu.sync()

    assert np.frombuffer(gpu.host_view(pinned, 32), np.int32).tolist() == list(range(8))


@pytest.mark.gpu
def test_device_facts_agree_with_torch(gpu: Cuda) -> None:
    torch = pytest.importorskip("torch")
    facts, properties = gpu.facts(), torch.cuda.get_device_properties(0)

    assert facts.fields["name"] == properties.name
    assert facts.fields["multiprocessor_count"] == properties.multi_processor_count
    assert facts.fields["compute_capability"] == f"{properties.major}.{properties.minor}"
    assert str(facts.uuid).removeprefix("GPU-") == str(properties.uuid)


@pytest.mark.gpu
def test_telemetry_comes_from_nvml(gpu: Cuda) -> None:
    fields = gpu.telemetry().fields

    assert {"memory_free_bytes", "utilization_memory_percent"} <= fields.keys()


@pytest.mark.gpu
def test_argument_without_size_is_type_error(gpu: Cuda) -> None:
    source = 'extern "C" __global__ void scale(float factor) {}'
    kernel = gpu.kernel(gpu.load(gpu.compile(source)), "scale")

    with pytest.raises(TypeError, match=r"0\.5 has no fixed size"):
        gpu.launch(kernel, (1, 1, 1), (1, 1, 1), [0.5], LEGACY)  # type: ignore[list-item]
    with pytest.raises(CudaError, match=r"\(4,\) bytes, got \(8,\)"):
        gpu.launch(kernel, (1, 1, 1), (1, 1, 1), [np.float64(0.5)], LEGACY)
    with pytest.raises(CudaError, match=r"\(4,\) bytes, got \(8,\)"):
        gpu.launch(kernel, (1, 1, 1), (1, 1, 1), [Ptr(3)], LEGACY)


@pytest.mark.gpu
def test_kernel_takes_structure_by_value(gpu: Cuda) -> None:
    source = """
    struct Pair { double first; int second; char rest[40]; };
    extern "C" __global__ void unpack(double* out, Pair pair, int more) {
        out[0] = pair.first; out[1] = pair.second; out[2] = pair.rest[39]; out[3] = more;
    }
    """
    structure = np.zeros(
        (), dtype=[("first", "f8"), ("second", "i4"), ("rest", "i1", 40), ("_", "i4")]
    )
    structure["first"], structure["second"], structure["rest"][39] = 1.5, -2, 3
    kernel = gpu.kernel(gpu.load(gpu.compile(source)), "unpack")
    out, pinned = gpu.malloc(32), gpu.host_malloc(32)

    gpu.launch(kernel, (1, 1, 1), (1, 1, 1), [out, structure[()], np.int32(4)], LEGACY)
    gpu.copy(pinned, out, 32, LEGACY)
    gpu.sync()

    assert np.frombuffer(gpu.host_view(pinned, 32), np.float64).tolist() == [1.5, -2.0, 3.0, 4.0]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("image", "status"), [(b"not an image", "INVALID_IMAGE"), (b".version 9.0 what", "INVALID_PTX")]
)
def test_unreadable_image_is_refused(gpu: Cuda, image: bytes, status: str) -> None:
    with pytest.raises(CudaError) as caught:
        gpu.load(image)
    assert caught.value.name == f"CUDA_ERROR_{status}"


LOST = """
import json
import numpy as np
import cudakit
from cudakit.errors import CudaError
from cudakit.gpu.api import LEGACY, Ptr
from cudakit.gpu.cuda.device import Cuda

gpu = Cuda(0)
source = 'extern "C" __global__ void store(int* where, int value) { *where = value; }'
kernel = gpu.kernel(gpu.load(gpu.compile(source)), "store")
gpu.malloc(64)
gpu.launch(kernel, (1, 1, 1), (1, 1, 1), [Ptr(8), np.int32(1)], LEGACY)
said = []
for use in (gpu.sync, lambda: gpu.malloc(64), gpu.memory_info):
    try:
        use()
    except CudaError as error:
        said.append([error.name, error.hint])
gpu.close()
print(json.dumps(said))
"""


@pytest.mark.gpu
def test_illegal_address_error_says_process_must_end() -> None:
    child_report = json.loads(child(LOST))

    assert len(child_report) == 3
    for name, hint in child_report:
        assert name == "CUDA_ERROR_ILLEGAL_ADDRESS"
        assert "restart the process" in hint


FORKED = """
import os, sys
import cudakit
from cudakit.errors import CudaError
from cudakit.gpu.cuda.device import Cuda

Cuda(0)
if os.fork() == 0:
    try:
        Cuda(0)
    except CudaError as error:
        print(error.name, "|", error.hint, flush=True)
    os._exit(0)
os.wait()
"""


@pytest.mark.gpu
def test_forked_child_error_suggests_spawn() -> None:
    name, _, hint = child(FORKED).partition(" | ")

    assert name == "CUDA_ERROR_NOT_INITIALIZED"
    assert "spawn" in hint


@pytest.fixture
def two_devices(gpu: Cuda) -> Iterator[tuple[Cuda, Cuda]]:
    if check(cu.cuDeviceGetCount()) < 2:
        pytest.skip("needs two CUDA devices")
    with closing(Cuda(1)) as second:
        yield gpu, second


@pytest.mark.gpu
def test_two_devices_work_regardless_of_current_device(two_devices: tuple[Cuda, Cuda]) -> None:
    read = []
    for current_one in (0, 1):
        with cudakit.device(current_one):
            for number, gpu in enumerate(two_devices):
                ptr, pinned, stream = gpu.malloc(4), gpu.host_malloc(4), gpu.stream()
                gpu.fill(ptr, number + 1, 4, stream)
                gpu.copy(pinned, ptr, 4, stream)
                gpu.sync_stream(stream)
                read.append(bytes(gpu.host_view(pinned, 4)))
            assert cudakit.current_device() == current_one

    assert read == [b"\1" * 4, b"\2" * 4] * 2


@pytest.mark.gpu
def test_peer_access_agrees_with_torch(two_devices: tuple[Cuda, Cuda]) -> None:
    torch = pytest.importorskip("torch")
    first, second = two_devices

    assert first.can_access_peer(1) == torch.cuda.can_device_access_peer(0, 1)
    assert second.can_access_peer(0) == torch.cuda.can_device_access_peer(1, 0)
    assert cudakit.can_access_peer(0, 1) == first.can_access_peer(1)


@pytest.mark.gpu
def test_facts_and_telemetry_describe_device(two_devices: tuple[Cuda, Cuda]) -> None:
    facts = [gpu.facts() for gpu in two_devices]

    assert [device.index for device in facts] == [0, 1]
    assert facts[0].uuid != facts[1].uuid
    assert all("memory_free_bytes" in gpu.telemetry().fields for gpu in two_devices)
