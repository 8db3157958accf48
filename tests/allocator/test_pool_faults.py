"""Every driver call can fail in a program with private pools: nothing leaks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import pytest
from allocator import invariants
from allocator.device import MIB, Device
from allocator.virtual_device import VirtualDevice

from cudakit.allocator.allocator import DeviceCachingAllocator
from cudakit.allocator.pools import MemPool
from cudakit.errors import CudaError
from cudakit.torch_rules.settings import Settings

CAPACITY = 96 * MIB
SETTINGS = (Settings(), Settings(expandable_segments=True), Settings(max_split_size_bytes=20 * MIB))


def program(allocator: DeviceCachingAllocator, device: Device) -> list[CudaError]:
    """Use pools and captures, continue after failures, and return the failures."""
    failures: list[CudaError] = []
    live: list[int] = []

    def attempt(operation: Callable[[], object]) -> None:
        try:
            operation()
        except CudaError as error:
            failures.append(error)
        invariants.check(allocator)

    def alloc(size: int, stream: int = 0) -> None:
        live.append(allocator.alloc(size))
        allocator.record_use(live[-1], stream)

    def captured() -> None:
        with allocator.capture() as memory:
            attempt(lambda: alloc(9 * MIB, 11))
            attempt(lambda: alloc(700))
            while live:
                attempt(lambda: allocator.free(live.pop()))
        memory.close()

    pools = [MemPool(allocator, use_on_oom=True), MemPool(allocator, upstream=device)]
    for pool in pools:
        with allocator.use_pool(pool):
            attempt(lambda: alloc(30 * MIB, 12))
            attempt(lambda: alloc(700))
    attempt(captured)
    attempt(lambda: alloc(50 * MIB))
    device.finish(11)
    attempt(lambda: alloc(25 * MIB))
    while live:
        attempt(lambda: allocator.free(live.pop()))
    for pool in pools:
        attempt(pool.close)
        pool.close()
    attempt(allocator.empty_cache)
    return failures


@pytest.mark.parametrize("settings", SETTINGS)
def test_failed_driver_call_is_reported_and_leaks_nothing(settings: Settings) -> None:
    without_failures = VirtualDevice(CAPACITY)
    program(DeviceCachingAllocator(without_failures, settings), without_failures)
    assert len(without_failures.calls) > 20

    for fail_at in range(1, len(without_failures.calls) + 1):
        device = VirtualDevice(CAPACITY)
        device.fail_at = fail_at
        try:
            allocator = DeviceCachingAllocator(device, settings)
        except CudaError:
            continue
        failures = program(allocator, device)
        for _ in range(2):
            with suppress(CudaError):
                allocator.empty_cache()

        quiet = device.calls[fail_at - 1] in ("record", "event", "memory_info")
        assert quiet or any(error is device.error for error in failures), device.calls[fail_at - 1]
        assert (device.held, device.mapped) == ({}, {})
        assert allocator.private_pools() == ()
        allocator.close()
        assert device.events == {}


def test_threads_use_pools_concurrently() -> None:
    device = Device()
    allocator = DeviceCachingAllocator(device)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for iteration in range(30):
                with MemPool(allocator, no_split=iteration % 2 > 0) as pool:
                    with allocator.use_pool(pool):
                        blocks = [allocator.alloc(MIB * seed + 512 * i) for i in range(1, 6)]
                    assert {int(ptr) for ptr in blocks} == {
                        block["address"]
                        for segment in pool.snapshot()
                        for block in segment["blocks"]
                        if block["state"] != "inactive"
                    }
                    for ptr in blocks:
                        allocator.free(ptr)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    allocator.empty_cache()

    assert failures == []
    assert device.held == {}
    assert allocator.private_pools() == ()
    invariants.check(allocator)
