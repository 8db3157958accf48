from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from gpu.kernels import ONE_THREAD, SimBench

from cudakit.errors import CudaError, UsageError
from cudakit.gpu.api import LEGACY, Ptr
from cudakit.gpu.driver_errors import Status, cuda_error
from cudakit.gpu.machine import models
from cudakit.gpu.open import open_gpu
from cudakit.gpu.sim import Launch, Sim, host_kernel

ILLEGAL = "CUDA_ERROR_ILLEGAL_ADDRESS"


@pytest.fixture
def bench() -> SimBench:
    return SimBench()


def test_simulated_device_reports_simulated() -> None:
    assert Sim().simulated
    assert open_gpu("sim").simulated


def test_simulator_imports_no_vendor_library() -> None:
    script = (
        "import sys, cudakit.gpu.sim\n"
        "cudakit.gpu.sim.Sim().malloc(8)\n"
        "print({name.partition('.')[0] for name in sys.modules})"
    )
    result = subprocess.run(
        [sys.executable, "-P", "-c", script], check=True, capture_output=True, text=True
    )

    assert not {"cuda", "pynvml", "nvtx", "torch"} & set(result.stdout.split("'"))


def test_device_has_facts_of_model() -> None:
    gpu = Sim("h200")

    assert gpu.facts().fields["name"] == "NVIDIA H200"
    assert gpu.memory_info().total_bytes == gpu.facts().fields["usable_memory_bytes"]


@pytest.mark.parametrize("model", models())
def test_every_recorded_machine_can_be_simulated(model: str) -> None:
    gpu = Sim(model)
    ptr = gpu.malloc(8)
    gpu.fill(ptr, 0, 8, LEGACY)
    gpu.sync()

    assert gpu.costs.memory_bytes_per_s > 10**10
    assert gpu.memory_info().total_bytes > 10**9


def test_peer_access_matches_recorded_machine() -> None:
    gpu = Sim("h200x2", ordinal=1)

    assert gpu.facts().index == 1
    assert gpu.can_access_peer(0)
    assert not gpu.can_access_peer(1)


def test_unknown_model_error_lists_models() -> None:
    with pytest.raises(UsageError, match="h201") as caught:
        Sim("h201")
    assert "h200" in caught.value.hint


# --- time


def test_clock_advances_with_calls_and_work_only(bench: SimBench) -> None:
    gpu = bench.gpu
    begin = gpu.clock.now_ns
    assert gpu.clock.now_ns == begin

    bench.spin(1_000_000)
    enqueued = gpu.clock.now_ns
    gpu.sync()

    assert begin < enqueued < begin + 10_000
    assert gpu.clock.now_ns >= enqueued + 1_000_000


def test_streams_overlap_and_each_stream_is_serial(bench: SimBench) -> None:
    gpu, streams = bench.gpu, [bench.gpu.stream() for _ in range(2)]

    def duration_ns(first: int, second: int) -> int:
        begin = gpu.clock.now_ns
        bench.spin(1_000_000, streams[first])
        bench.spin(1_000_000, streams[second])
        gpu.sync()
        return gpu.clock.now_ns - begin

    assert duration_ns(0, 1) < 1_100_000
    assert duration_ns(0, 0) > 2_000_000


def test_work_begins_after_earlier_work_of_stream(bench: SimBench) -> None:
    gpu = bench.gpu
    begin = gpu.clock.now_ns
    bench.spin(1_000_000)
    for _ in range(20):
        gpu.memory_info()
    bench.spin(1_000_000)
    gpu.sync()

    assert gpu.clock.now_ns - begin > 2_000_000


@pytest.mark.parametrize(
    "wait",
    [
        lambda gpu, _: gpu.sync(),
        lambda gpu, _: gpu.sync_stream(LEGACY),
        lambda gpu, ptr: gpu.free(ptr),
    ],
    ids=["sync", "sync_stream", "free"],
)
def test_sync_waits_for_running_work(bench: SimBench, wait: Callable[[Sim, Ptr], object]) -> None:
    gpu, ptr = bench.gpu, bench.ints()
    begin = gpu.clock.now_ns
    bench.spin(1_000_000)
    for _ in range(20):
        gpu.memory_info()

    wait(gpu, ptr)

    assert gpu.clock.now_ns - begin > 1_000_000


def test_copies_in_same_direction_serialize_and_opposite_overlap(bench: SimBench) -> None:
    gpu, size = bench.gpu, 8 << 20
    streams = [gpu.stream(blocking=False) for _ in range(2)]
    pinned = [gpu.host_malloc(size) for _ in range(2)]
    device = [gpu.malloc(size) for _ in range(2)]

    def duration_ns(*pairs: tuple[Ptr, Ptr]) -> int:
        begin = gpu.clock.now_ns
        for stream, (dst, src) in zip(streams, pairs, strict=False):
            gpu.copy(dst, src, size, stream)
        gpu.sync()
        return gpu.clock.now_ns - begin

    single_copy_ns = duration_ns((device[0], pinned[0]))
    same_stream_ns = duration_ns((device[0], pinned[0]), (device[1], pinned[1]))
    opposite = duration_ns((device[0], pinned[0]), (pinned[1], device[1]))

    assert same_stream_ns > 1.8 * single_copy_ns
    assert opposite < 1.2 * single_copy_ns


def test_higher_priority_begins_first(bench: SimBench) -> None:
    gpu, value = bench.gpu, bench.ints()
    blocked_stream = bench.gpu.stream(blocking=False)
    low, high = gpu.stream(blocking=False), gpu.stream(blocking=False, priority=-5)
    bench.spin(100_000, blocked_stream)
    event = gpu.event()
    gpu.record(event, blocked_stream)
    for stream, number in ((low, 1), (high, 2)):
        gpu.wait(stream, event)
        bench.store(value, number, stream)

    assert bench.read(value) == [1]


def test_repeated_query_ends_with_true() -> None:
    for seed in (None, 0, 1, 2, 3):
        bench = SimBench(seed=seed)
        bench.spin(100_000)
        event = bench.gpu.event()
        bench.gpu.record(event, LEGACY)
        queries = 0
        while not bench.gpu.query_event(event):
            queries += 1

        assert 0 < queries < 10_000


def test_elapsed_time_is_exact_device_time(bench: SimBench) -> None:
    gpu, stream = bench.gpu, bench.gpu.stream()
    begin, end = gpu.event(), gpu.event()
    gpu.record(begin, stream)
    bench.spin(123_456, stream)
    gpu.record(end, stream)
    gpu.sync()

    assert gpu.elapsed(begin, end) == pytest.approx(123_456e-9, abs=10e-6)


# --- host kernels


def test_missing_host_kernel_error_has_hint(bench: SimBench) -> None:
    with pytest.raises(UsageError, match="orphan") as caught:
        bench.launch("orphan")
    assert '@host_kernel("orphan")' in caught.value.hint


def test_host_kernel_gets_launch_shape_and_arguments() -> None:
    seen_arguments: list[tuple[object, ...]] = []

    def check_launch(launch: Launch, *args: object) -> None:
        seen_arguments.append(
            (launch.grid, launch.block, launch.shared_bytes, launch.threads, args)
        )

    gpu = Sim(host_kernels={"look": check_launch})
    kernel = gpu.kernel(
        gpu.load(gpu.compile('extern "C" __global__ void look(float x) {}')), "look"
    )
    gpu.launch(kernel, (2, 3, 1), (32, 1, 1), (np.float32(1.5),), LEGACY, shared_bytes=64)
    gpu.sync()

    assert seen_arguments == [((2, 3, 1), (32, 1, 1), 64, 192, (np.float32(1.5),))]


@host_kernel("tests.gpu.registered")
def registered(launch: Launch, address: Ptr) -> None:
    launch.write(address, np.uint8)[:] = 7


def test_registered_host_kernel_runs_on_every_device() -> None:
    gpu = Sim()
    image = gpu.compile('extern "C" __global__ void registered(char* where) {}')
    image = image.replace(b"registered", b"tests.gpu.registered")
    kernel = gpu.kernel(gpu.load(image), "tests.gpu.registered")
    pinned = gpu.host_malloc(1)

    gpu.launch(kernel, ONE_THREAD, ONE_THREAD, (pinned,), LEGACY)
    gpu.sync()

    assert gpu.host_view(pinned, 1)[0] == 7


def test_host_kernel_read_view_is_read_only() -> None:
    def sly(launch: Launch, address: Ptr) -> None:
        launch.read(address, np.int32)[:] = 1

    gpu = Sim(host_kernels={"sly": sly})
    kernel = gpu.kernel(gpu.load(gpu.compile('extern "C" __global__ void sly(int* w) {}')), "sly")
    gpu.launch(kernel, ONE_THREAD, ONE_THREAD, (gpu.malloc(4),), LEGACY)

    with pytest.raises(CudaError, match="read-only"):
        gpu.sync()


def test_exception_in_host_kernel_fails_launch(bench: SimBench) -> None:
    bench.launch("fail")

    with pytest.raises(CudaError) as caught:
        bench.gpu.sync()
    assert caught.value.name == "CUDA_ERROR_LAUNCH_FAILED"
    assert "ZeroDivisionError" in caught.value.message
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_strided_write_changes_single_column(bench: SimBench) -> None:
    table = bench.ints(6)
    args = (np.int32(3), np.int32(2), np.int32(9))

    bench.launch("column", Ptr(table + 4), *args)

    assert bench.read(table, 6) == [0, 9, 0, 9, 0, 9]


# --- errors


def invalid_calls() -> dict[str, Callable[[SimBench], object]]:
    def freed(bench: SimBench) -> None:
        value = bench.ints()
        bench.gpu.free(value)
        bench.store(value, 1)

    def beyond_end(bench: SimBench) -> None:
        bench.store(Ptr(bench.ints(4) + 16), 1)

    def straddling(bench: SimBench) -> None:
        bench.launch("column", bench.ints(4), np.int32(3), np.int32(2), np.int32(1))

    def null(bench: SimBench) -> None:
        bench.store(Ptr(0), 1)

    def unmapped(bench: SimBench) -> None:
        bench.store(bench.gpu.reserve(bench.gpu.granularity()), 1)

    def freed_in_its_stream(bench: SimBench) -> None:
        stream = bench.gpu.stream()
        value = bench.gpu.malloc(4, stream)
        bench.gpu.free(value, stream)
        bench.store(value, 1, stream)

    def before_allocation(bench: SimBench) -> None:
        stream, other_stream = bench.gpu.stream(), bench.gpu.stream()
        bench.spin(1_000_000, stream)
        bench.store(bench.gpu.malloc(4, stream), 1, other_stream)

    return {operation.__name__.replace("_", " "): operation for operation in (
        freed, beyond_end, straddling, null, unmapped, freed_in_its_stream, before_allocation
    )}  # fmt: skip


@pytest.mark.parametrize("operation", invalid_calls().values(), ids=invalid_calls())
def test_kernel_access_to_unallocated_memory_fails(
    bench: SimBench, operation: Callable[[SimBench], object]
) -> None:
    operation(bench)

    with pytest.raises(CudaError) as caught:
        bench.gpu.sync()
    assert caught.value.name == ILLEGAL
    assert "0x" in caught.value.message


def test_misaligned_address_fails(bench: SimBench) -> None:
    bench.store(Ptr(bench.ints(2) + 1), 1)

    with pytest.raises(CudaError, match="CUDA_ERROR_MISALIGNED_ADDRESS"):
        bench.gpu.sync()


def test_every_call_but_close_fails_after_illegal_address(bench: SimBench) -> None:
    bench.store(Ptr(0), 1)
    operations: list[Callable[[], object]] = [
        bench.gpu.sync,
        bench.gpu.sync,
        lambda: bench.gpu.malloc(4),
        lambda: bench.gpu.query_stream(LEGACY),
        lambda: bench.gpu.memory_info(),
    ]

    for operation in operations:
        with pytest.raises(CudaError, match=ILLEGAL) as caught:
            operation()
        assert "context is lost" in caught.value.hint
    bench.gpu.close()


def test_kernel_failure_is_raised_by_next_call(bench: SimBench) -> None:
    bench.store(Ptr(0), 1)
    calls = 0
    with pytest.raises(CudaError, match=ILLEGAL):
        while True:
            bench.gpu.memory_info()
            calls += 1

    assert 0 < calls < 100


@pytest.mark.parametrize("size_bytes", [17, 1 << 40])
def test_copy_beyond_end_is_refused_without_effect(bench: SimBench, size_bytes: int) -> None:
    device_memory, peer_memory = bench.ints(4), bench.ints(4)

    for dst, src in ((device_memory, peer_memory), (peer_memory, device_memory)):
        with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
            bench.gpu.copy(dst, src, size_bytes, LEGACY)
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
        bench.gpu.fill(device_memory, 0, size_bytes, LEGACY)
    assert bench.read(device_memory, 4) == [0] * 4


def test_injected_failures_are_raised_once_and_in_order(bench: SimBench) -> None:
    bench.gpu.fail_next("malloc", cuda_error(Status.OUT_OF_MEMORY, detail="on request"))
    bench.gpu.fail_next("malloc", cuda_error(Status.NOT_PERMITTED))

    bench.gpu.memory_info()
    for name in ("OUT_OF_MEMORY: .*on request", "NOT_PERMITTED"):
        with pytest.raises(CudaError, match=name):
            bench.gpu.malloc(4)
    bench.gpu.malloc(4)


def test_injected_sticky_failure_fails_later_calls(bench: SimBench) -> None:
    bench.gpu.fail_next("launch", cuda_error(Status.ECC_UNCORRECTABLE))

    for operation in (lambda: bench.spin(1), bench.gpu.sync):
        with pytest.raises(CudaError, match="ECC_UNCORRECTABLE"):
            operation()


def test_injected_failure_of_unknown_call_is_refused(bench: SimBench) -> None:
    for call in ("mallok", "lane", "clock", "close"):
        with pytest.raises(UsageError, match=call):
            bench.gpu.fail_next(call, cuda_error(Status.UNKNOWN))


# --- the compiler


def test_non_cuda_source_does_not_compile() -> None:
    for source in ("this is no CUDA", 'extern "C" __global__ void k() {'):
        with pytest.raises(CudaError, match="NVRTC_ERROR_COMPILATION"):
            Sim().compile(source)


def test_real_image_cannot_be_loaded() -> None:
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_IMAGE"):
        Sim().load(b"\x7fELF")


def test_mangled_kernel_name_is_not_found() -> None:
    gpu = Sim()
    module = gpu.load(gpu.compile("__global__ void mangled(int x) {}"))

    with pytest.raises(CudaError, match="CUDA_ERROR_NOT_FOUND"):
        gpu.kernel(module, "mangled")


@pytest.mark.parametrize(
    ("parameter", "size_bytes"),
    [
        ("const float* __restrict__ x", 8),
        ("unsigned n", 4),
        ("unsigned long long n", 8),
        ("signed char c", 1),
        ("short int s", 2),
        ("const size_t n", 8),
        ("word w", 4),
        ("words w", 8),
        ("bool", 1),
    ],
)
def test_parameter_sizes_are_checked(parameter: str, size_bytes: int) -> None:
    gpu = Sim(host_kernels={"k": lambda *_: None})
    types = "typedef unsigned int word; typedef word *words;"
    image = gpu.compile(f'{types} /* k( */ extern "C" __global__ void k({parameter}) {{}}')
    kernel = gpu.kernel(gpu.load(image), "k")
    widths = {1: np.int8(0), 2: np.int16(0), 4: np.int32(0), 8: np.int64(0)}

    gpu.launch(kernel, ONE_THREAD, ONE_THREAD, (widths[size_bytes],), LEGACY)
    for wrong_size in {*widths} - {size_bytes}:
        with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
            gpu.launch(kernel, ONE_THREAD, ONE_THREAD, (widths[wrong_size],), LEGACY)


def test_parameters_of_unknown_types_are_not_checked() -> None:
    gpu = Sim(host_kernels={"k": lambda *_: None})
    image = gpu.compile('struct S { int a; }; extern "C" __global__ void k(S s, int n) {}')

    gpu.launch(gpu.kernel(gpu.load(image), "k"), ONE_THREAD, ONE_THREAD, (), LEGACY)
