"""The simulated NCCL moves real values, and estimates times by its documented model."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager

import numpy as np
import numpy.typing as npt
import pytest

from cudakit.errors import CollectiveError, CudaError, Unsupported
from cudakit.gpu.api import LEGACY
from cudakit.gpu.api.arrays import BF16, FP32, decode, encode
from cudakit.gpu.api.collectives import OPERATIONS, Collective, Communicator, bus_factor
from cudakit.gpu.sim import Sim

COUNT = 6
Array = npt.NDArray[np.float64]


@contextmanager
def ranks_of(count: int) -> Iterator[list[tuple[Sim, Communicator]]]:
    with ExitStack() as stack, ThreadPoolExecutor(count) as pool:
        devices = [
            stack.enter_context(closing(Sim("h200x2", ordinal=rank % 2))) for rank in range(count)
        ]
        unique_id = (first := devices[0].collectives()).unique_id("127.0.0.1")
        joining = [
            pool.submit(
                (first if rank == 0 else device.collectives()).connect, unique_id, rank, count
            )
            for rank, device in enumerate(devices)
        ]
        communicators = [future.result() for future in joining]
        yield list(zip(devices, communicators, strict=True))
        for communicator in communicators:
            communicator.close()


def perform(
    gpu: Sim, communicator: Communicator, collective: Collective, values: list[float], ranks: int
) -> list[float]:
    element = collective.element
    send_bytes = collective.send_chunks(ranks) * collective.chunk_bytes
    receive_bytes = collective.receive_chunks(ranks) * collective.chunk_bytes
    host = gpu.host_malloc(max(send_bytes, receive_bytes))
    send, receive = gpu.malloc(send_bytes), gpu.malloc(receive_bytes)
    np.frombuffer(gpu.host_view(host, send_bytes), element.storage_dtype)[:] = encode(
        values, element
    )
    gpu.copy(send, host, send_bytes, LEGACY)
    gpu.fill(receive, 0, receive_bytes, LEGACY)
    communicator.enqueue(collective, send, receive, LEGACY)
    gpu.copy(host, receive, receive_bytes, LEGACY)
    communicator.synchronize(LEGACY)
    bits = np.frombuffer(bytes(gpu.host_view(host, receive_bytes)), element.storage_dtype)
    return list(map(float, decode(bits, element)))


def expected_output(operation: str, data: Array, rank: int, ranks: int) -> Array:
    """Return the output of a rank; a row of ``data`` has the input of a rank."""
    chunk = slice(rank * COUNT, (rank + 1) * COUNT)
    match operation:
        case "all-reduce":
            return data[:, :COUNT].sum(0)
        case "all-gather":
            return data[:, :COUNT].ravel()
        case "reduce-scatter":
            return data.sum(0)[chunk]
        case "broadcast":
            return data[0, :COUNT]
        case "reduce":
            return data[:, :COUNT].sum(0) if rank == 0 else np.zeros(COUNT)
        case "all-to-all":
            return data[:, chunk].ravel()
    return data[(rank - 1) % ranks, :COUNT]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("element", [FP32, BF16], ids=lambda element: element.name)
def test_values_follow_the_definition(operation: str, ranks: int, element: object) -> None:
    collective = Collective(operation, element, COUNT)  # type: ignore[arg-type]
    data = np.arange(ranks * ranks * COUNT, dtype=np.float64).reshape(ranks, -1) % 29
    sizes = collective.send_chunks(ranks) * COUNT
    with ranks_of(ranks) as group, ThreadPoolExecutor(ranks) as pool:
        outputs = [
            pool.submit(perform, gpu, communicator, collective, list(data[rank, :sizes]), ranks)
            for rank, (gpu, communicator) in enumerate(group)
        ]
        for rank, output in enumerate(outputs):
            np.testing.assert_array_equal(
                output.result(), expected_output(operation, data, rank, ranks)
            )


def test_operation_in_place_replaces_the_input() -> None:
    collective = Collective("all-reduce", FP32, 4)
    with ranks_of(2) as group, ThreadPoolExecutor(2) as pool:

        def reduce_in_place(gpu: Sim, communicator: Communicator) -> bytes:
            host, buffer = gpu.host_malloc(16), gpu.malloc(16)
            np.frombuffer(gpu.host_view(host, 16), np.float32)[:] = 1.5
            gpu.copy(buffer, host, 16, LEGACY)
            communicator.enqueue(collective, buffer, buffer, LEGACY)
            gpu.copy(host, buffer, 16, LEGACY)
            communicator.synchronize(LEGACY)
            return bytes(gpu.host_view(host, 16))

        for output in pool.map(lambda pair: reduce_in_place(*pair), group):
            assert output == np.full(4, 3.0, np.float32).tobytes()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_time_grows_by_the_bus_bytes_at_80_percent_of_the_links(operation: str) -> None:
    times_ns = []
    for count in (1 << 10, 1 << 18):
        collective = Collective(operation, FP32, count)
        with ranks_of(2) as group, ThreadPoolExecutor(2) as pool:

            def measure(gpu: Sim, communicator: Communicator) -> int:
                chunks = max(collective.send_chunks(2), collective.receive_chunks(2))  # noqa: B023
                buffers = gpu.malloc(2 * chunks * collective.chunk_bytes)  # noqa: B023
                begin, end = gpu.event(), gpu.event()
                gpu.record(begin, LEGACY)
                communicator.enqueue(collective, buffers, buffers, LEGACY)  # noqa: B023
                gpu.record(end, LEGACY)
                communicator.synchronize(LEGACY)
                return round(gpu.elapsed(begin, end) * 1e9)

            times_ns.append(max(pool.map(lambda pair: measure(*pair), group)))
    chunks = max(collective.send_chunks(2), collective.receive_chunks(2))
    added_bytes = chunks * 4 * ((1 << 18) - (1 << 10))
    link_ns = added_bytes * bus_factor(operation, 2) / (0.8 * 18 * 20)
    memory_ns = 2 * added_bytes / 4800

    assert link_ns < times_ns[1] - times_ns[0] < link_ns + memory_ns + 50


def test_ranks_that_call_different_operations_fail() -> None:
    with ranks_of(2) as group, ThreadPoolExecutor(2) as pool:

        def call(rank: int) -> None:
            gpu, communicator = group[rank]
            collective = Collective("all-reduce", FP32, 4 + rank)
            buffer = gpu.malloc(64)
            communicator.enqueue(collective, buffer, buffer, LEGACY)
            communicator.synchronize(LEGACY)

        for future in [pool.submit(call, rank) for rank in range(2)]:
            with pytest.raises(CudaError, match="all-reduce"):
                future.result()


def test_end_of_one_rank_ends_the_wait_of_another() -> None:
    with ranks_of(2) as group:
        (gpu, communicator), (_, other_communicator) = group
        buffer = gpu.malloc(16)
        with ThreadPoolExecutor(1) as pool:

            def wait() -> None:
                communicator.enqueue(Collective("all-reduce", FP32, 4), buffer, buffer, LEGACY)
                communicator.synchronize(LEGACY)

            waiting = pool.submit(wait)
            other_communicator.abort()
            with pytest.raises(CollectiveError, match="another rank"):
                waiting.result(timeout=10)


def test_torch_needs_a_real_device() -> None:
    with closing(Sim()) as gpu, pytest.raises(Unsupported, match="torch needs a real GPU"):
        gpu.collectives("torch")
