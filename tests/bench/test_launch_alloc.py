from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np
import pytest

from cudakit.bench.alloc import AllocatorFactory, AllocSpec
from cudakit.bench.launch import CALLS, LaunchSpec
from cudakit.bench.pipeline import run
from cudakit.bench.result import BenchResult
from cudakit.errors import CudaError, InputError
from cudakit.gpu.api import Gpu, Ptr, Stream
from cudakit.gpu.sim import Launch, Sim
from cudakit.units import Unavailable


def medians(result: BenchResult, axis: str) -> dict[object, float]:
    return {
        case.axes[axis]: case.median_s
        for case in result.results
        if not isinstance(case.median_s, Unavailable)
    }


# --- launch


def test_every_call_has_time_without_verification() -> None:
    with closing(Sim()) as gpu:
        result = run(LaunchSpec(), gpu)

    assert tuple(medians(result, "call")) == CALLS
    assert not any(case.verified for case in result.results)
    assert all(isinstance(case.verification, Unavailable) for case in result.results)
    assert all(isinstance(case.limit, Unavailable) for case in result.results)


def test_launch_latencies_increase_from_call_to_start_to_finish() -> None:
    with closing(Sim()) as gpu:
        medians_by_call = medians(run(LaunchSpec(), gpu), "call")

    assert (
        medians_by_call["launch"]
        < medians_by_call["launch-to-start"]
        <= medians_by_call["launch-to-finish"]
    )
    assert medians_by_call["launch-back-to-back"] <= medians_by_call["launch-to-finish"]


def test_modes_of_latencies() -> None:
    with closing(Sim()) as gpu:
        modes = {case.axes["call"]: case.method.mode for case in run(LaunchSpec(), gpu).results}

    assert modes["launch"] == modes["event-record"] == modes["stream-create-destroy"] == "call"
    assert modes["launch-to-finish"] == "host"
    assert modes["launch-back-to-back"] == "batch"


# --- alloc


def test_driver_allocators_are_verified_and_free_their_memory() -> None:
    with closing(Sim()) as gpu:
        free_bytes = gpu.memory_info().free_bytes
        result = run(AllocSpec(sizes_bytes=(1, 20, 1 << 20)), gpu)

        assert gpu.memory_info().free_bytes == free_bytes
    assert list(medians(result, "allocator")) == ["driver", "stream-ordered", "pinned", "virtual"]
    assert len(result.results) == 12
    assert all(case.verified for case in result.results)


class CountingReservations(Sim):
    """A simulated device that counts reserved addresses."""

    reserved = 0

    def reserve(self, size_bytes: int) -> Ptr:
        self.reserved += size_bytes
        return super().reserve(size_bytes)

    def unreserve(self, ptr: Ptr, size_bytes: int) -> None:
        self.reserved -= size_bytes
        super().unreserve(ptr, size_bytes)


def test_reserved_addresses_are_released_even_if_creation_fails() -> None:
    with closing(CountingReservations()) as gpu:
        run(AllocSpec(allocators=("virtual",), sizes_bytes=(3 << 20,)), gpu)
        assert gpu.reserved == 0
        gpu.fail_next("create", CudaError(2, "CUDA_ERROR_OUT_OF_MEMORY", "injected error"))
        with pytest.raises(CudaError, match="injected error"):
            run(AllocSpec(allocators=("virtual",), sizes_bytes=(3 << 20,)), gpu)
        assert gpu.reserved == 0


@dataclass
class FixedAddress:
    """An allocator that returns the same address for every allocation."""

    gpu: Gpu
    address: Ptr
    live: list[Ptr] = field(default_factory=list)
    calls: int = 0
    closed: int = 0

    def alloc(self, size_bytes: int, stream: Stream) -> Ptr:  # noqa: ARG002
        self.calls += 1
        self.live.append(self.address)
        return self.address

    def free(self, ptr: Ptr, stream: Stream) -> None:  # noqa: ARG002
        self.live.remove(ptr)

    def close(self) -> None:
        self.closed += 1


def test_allocators_of_factories_are_measured() -> None:
    with closing(Sim()) as gpu:
        bump = FixedAddress(gpu, gpu.malloc(1 << 20))
        others: Mapping[str, AllocatorFactory] = {"bump": lambda _: bump}
        names = ("driver", "bump")
        spec = AllocSpec(allocators=names, other_allocators=others, sizes_bytes=(4096,))
        result = run(spec, gpu)

    assert [case.axes["allocator"] for case in result.results] == ["driver", "bump"]
    assert all(case.verified for case in result.results)
    assert bump.calls > 10
    assert bump.live == []
    assert bump.closed == 1


def test_name_of_driver_allocator_is_rejected() -> None:
    with closing(Sim()) as gpu, pytest.raises(InputError, match="'pinned' is already the name"):
        AllocSpec(other_allocators={"pinned": lambda _: FixedAddress(gpu, Ptr(512))})


def test_unknown_allocator_is_rejected_with_choices() -> None:
    with pytest.raises(InputError) as caught:
        AllocSpec(
            allocators=("mine",), other_allocators={"bump": lambda gpu: FixedAddress(gpu, Ptr(512))}
        )
    assert "pinned, virtual, bump" in caught.value.hint


def test_memory_that_loses_writes_withholds_time() -> None:
    def lose_last_word(launch: Launch, target: Ptr, word: np.uint32, count: np.uint64) -> None:
        launch.write(target, np.uint32, 4 * int(count))[:-1] = word

    with closing(Sim(host_kernels={"cudakit_write": lose_last_word})) as gpu:
        (case,) = run(AllocSpec(allocators=("pinned",), sizes_bytes=(4096,)), gpu).results

    assert isinstance(case.median_s, Unavailable)
    assert "1 of 1024 words" in case.median_s.reason


def test_allocation_larger_than_memory_is_rejected_first() -> None:
    with closing(Sim(capacity_bytes=16 << 20)) as gpu:
        with pytest.raises(
            InputError, match=r"needs 32.0 MiB of device memory, but only 16.0 MiB is free"
        ):
            run(AllocSpec(sizes_bytes=(4096, 32 << 20)), gpu)
        assert gpu.memory_info().free_bytes == 16 << 20
