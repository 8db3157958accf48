from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from contract.workbench import Workbench, refused

from cudakit.errors import CudaError
from cudakit.gpu.api import LEGACY, Gpu
from cudakit.gpu.driver_errors import Status
from cudakit.gpu.open import open_gpu


def test_facts_include_device_name(gpu: Gpu) -> None:
    facts = gpu.facts()

    assert facts.index == 0
    assert str(facts.uuid).startswith(("GPU-", "MIG-"))
    assert facts.fields["name"]
    major, _, minor = str(facts.fields["compute_capability"]).partition(".")
    assert (int(major), int(minor)) >= (7, 5)
    assert facts.fields["warp_size"] == 32


def test_telemetry_has_time_and_free_memory(gpu: Gpu) -> None:
    first, second = gpu.telemetry(), gpu.telemetry()

    assert first.time_ns <= second.time_ns
    assert isinstance(first.fields["memory_free_bytes"], int)
    assert isinstance(first.fields["memory_used_bytes"], int)


def test_device_is_not_its_own_peer(gpu: Gpu) -> None:
    assert not gpu.can_access_peer(0)


def test_peer_index_beyond_last_device_is_rejected(gpu: Gpu) -> None:
    with refused(Status.INVALID_DEVICE):
        gpu.can_access_peer(999)


def test_device_can_be_used_from_every_thread(bench: Workbench) -> None:
    values = [bench.ints(0) for _ in range(8)]

    def work(index: int) -> None:
        stream = bench.gpu.stream()
        for _ in range(20):
            bench.add(values[index], 1, index, stream)
        bench.gpu.sync_stream(stream)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(8)))

    assert [bench.read(value)[0] for value in values] == [20 * index for index in range(8)]


USES: dict[str, Callable[[Gpu], object]] = {
    "malloc": lambda gpu: gpu.malloc(512),
    "memory_info": lambda gpu: gpu.memory_info(),
    "host_malloc": lambda gpu: gpu.host_malloc(512),
    "stream": lambda gpu: gpu.stream(),
    "event": lambda gpu: gpu.event(),
    "sync": lambda gpu: gpu.sync(),
    "reserve": lambda gpu: gpu.reserve(gpu.granularity()),
    "sync_stream": lambda gpu: gpu.sync_stream(LEGACY),
}


@pytest.mark.parametrize("call", USES.values(), ids=USES)
def test_closed_device_rejects_every_call(gpu: Gpu, call: Callable[[Gpu], object]) -> None:
    gpu.close()

    with refused(Status.CONTEXT_IS_DESTROYED):
        call(gpu)


def test_device_can_be_closed_twice(gpu: Gpu) -> None:
    gpu.close()
    gpu.close()


def test_ids_of_closed_device_are_invalid(bench: Workbench) -> None:
    stream, event, value = bench.gpu.stream(), bench.gpu.event(), bench.ints(1)
    bench.gpu.close()

    for call in (
        lambda: bench.gpu.query_stream(stream),
        lambda: bench.gpu.query_event(event),
        lambda: bench.gpu.free(value),
        lambda: bench.spin(LEGACY),
    ):
        with pytest.raises(CudaError):
            call()


def test_close_waits_for_running_work(bench: Workbench) -> None:
    stream = bench.gpu.stream()
    pinned = bench.gpu.host_malloc(4)
    value = bench.ints(3)
    bench.spin(stream)
    bench.gpu.copy(pinned, value, 4, stream)

    bench.gpu.close()


def test_unknown_device_index_is_rejected(bench: Workbench) -> None:
    name = "sim" if bench.gpu.simulated else "cuda"

    with refused(Status.INVALID_DEVICE) as caught:
        open_gpu(name, 999)
    assert "999" in caught.value.message


def test_closed_device_can_be_opened_again(bench: Workbench) -> None:
    bench.gpu.close()
    second_gpu = open_gpu("sim" if bench.gpu.simulated else "cuda")
    start_s = time.monotonic()
    second_gpu.free(second_gpu.malloc(64))
    second_gpu.close()

    assert time.monotonic() - start_s < 10
