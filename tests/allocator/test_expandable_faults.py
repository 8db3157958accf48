"""Every driver call of expandable segments can fail: nothing leaks, and statistics stay right."""

from __future__ import annotations

from dataclasses import replace

import pytest
from allocator import invariants
from allocator.device import MIB
from allocator.virtual_device import VirtualDevice

from cudakit.allocator.allocator import DeviceCachingAllocator
from cudakit.errors import CudaError
from cudakit.torch_rules.settings import Settings

CAPACITY = 160 * MIB
EXPANDING = Settings(expandable_segments=True)
SETTINGS = (
    EXPANDING,
    replace(EXPANDING, memory_fraction=0.75, garbage_collection_threshold=0.4),
    replace(EXPANDING, max_split_size_bytes=20 * MIB),
)


def program(allocator: DeviceCachingAllocator, device: VirtualDevice) -> list[CudaError]:
    """Run all kinds of operations, continue after failures, and return the failures."""
    live: dict[str, int] = {}
    failures: list[CudaError] = []
    settings = allocator.settings

    def do(operation: str, name: str = "", size: int = 0, stream: int = 0) -> None:
        try:
            if operation == "alloc":
                live[name] = allocator.alloc(size, stream)
            elif operation == "switch":
                allocator.configure(replace(settings, expandable_segments=bool(size)))
            elif operation == "empty":
                allocator.empty_cache()
            elif name in live:
                allocator.free(live.pop(name), stream or None)
        except CudaError as error:
            failures.append(error)
        invariants.check(allocator)

    do("alloc", "a", 9 * MIB)
    do("alloc", "b", 700)
    do("alloc", "c", 30 * MIB)
    do("alloc", "d", 22 * MIB, 12)
    do("free", "c", stream=11)
    do("empty")
    do("switch")
    do("alloc", "e", 20 * MIB)
    do("free", "e")
    do("switch", size=1)
    do("alloc", "f", 44 * MIB)
    do("free", "a")
    device.finish(11)
    do("alloc", "g", 130 * MIB)
    do("free", "f")
    do("alloc", "h", 90 * MIB, 12)
    do("empty")
    for name in "abcdefgh":
        do("free", name)
    return failures


@pytest.mark.parametrize("settings", SETTINGS)
def test_failed_driver_call_is_reported_and_leaks_nothing(settings: Settings) -> None:
    device = VirtualDevice(CAPACITY)
    expected = program(DeviceCachingAllocator(device, settings), device)
    assert {"map", "unmap", "reserve", "malloc", "free"} <= set(device.calls)
    failed = set()
    first = len(device_and_allocator(settings)[0].calls)
    for fail_at in range(first + 1, len(device.calls) + 1):
        failing, allocator = device_and_allocator(settings)
        failing.fail_at = fail_at
        failures = program(allocator, failing)
        allocator.close()

        invariants.check(allocator)
        assert (failing.held, failing.mapped, failing.reserved) == ({}, {}, {})
        assert failing.events == {}
        assert allocator.statistics()["reserved_bytes.all.current"] == 0
        name = failing.calls[fail_at - 1]
        reported_errors = [error for error in failures if error is failing.error]
        assert reported_errors or name in ("record", "event"), name
        assert all(error.code in (2, 999) for error in failures)
        failed.add(name)
    assert {"map", "unmap", "reserve", "unreserve", "sync_stream"} <= failed
    assert {error.code for error in expected} == {2}


def device_and_allocator(settings: Settings) -> tuple[VirtualDevice, DeviceCachingAllocator]:
    device = VirtualDevice(CAPACITY)
    return device, DeviceCachingAllocator(device, settings)
