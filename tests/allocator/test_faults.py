"""Every driver call can fail: nothing leaks, and statistics stay right."""

from __future__ import annotations

from contextlib import suppress

import pytest
from allocator import invariants
from allocator.device import MIB, Device

from cudakit.allocator.allocator import DeviceCachingAllocator
from cudakit.errors import CudaError
from cudakit.torch_rules.settings import Settings

CAPACITY = 128 * MIB
SETTINGS = (
    Settings(),
    Settings(memory_fraction=0.75, garbage_collection_threshold=0.4),
    Settings(max_split_size_bytes=20 * MIB),
    Settings(release_lock_on_cudamalloc=True),
)
OPERATIONS = "abcdefgh"


def program(allocator: DeviceCachingAllocator, device: Device) -> list[CudaError]:
    """Run all kinds of operations, continue after failures, and return the failures."""
    live: dict[str, int] = {}
    failures: list[CudaError] = []

    def do(operation: str, name: str, size: int = 0, stream: int = 0) -> None:
        try:
            if operation == "alloc":
                live[name] = allocator.alloc(size, stream)
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
    do("alloc", "d", 40 * MIB, 12)
    do("free", "a", stream=11)
    do("free", "c")
    do("alloc", "e", 33 * MIB)
    device.finish(11)
    do("alloc", "f", 8 * MIB)
    do("free", "d", stream=13)
    do("free", "e", stream=13)
    do("alloc", "g", 60 * MIB)
    do("alloc", "h", 200 * MIB)
    do("free", "g")
    do("empty", "")
    for name in OPERATIONS:
        do("free", name)
    return failures


@pytest.mark.parametrize("settings", SETTINGS)
def test_failed_driver_call_is_reported_and_leaks_nothing(settings: Settings) -> None:
    device = Device(CAPACITY)
    first_call = len(device.calls)
    expected = program(DeviceCachingAllocator(device, settings), device)
    calls = len(device.calls)
    assert calls > first_call + 15

    for fail_at in range(1, calls + 1):
        failing = Device(CAPACITY)
        allocator = DeviceCachingAllocator(failing, SETTINGS[0])
        if len(failing.calls) < fail_at:
            failing.fail_at = fail_at
        with suppress(CudaError):
            allocator.configure(settings)
        failures = program(allocator, failing)
        allocator.empty_cache()

        assert failing.held == {}
        reported_errors = [error for error in failures if error is failing.error]
        quiet = failing.calls[fail_at - 1] in ("record", "event", "memory_info")
        assert reported_errors or quiet, failing.calls[fail_at - 1]
        assert all(error.code in (2, 999) for error in failures)
        allocator.close()
        assert failing.events == {}
    assert {error.code for error in expected} == {2}


@pytest.mark.parametrize("fail_at", [1, 2, 3])
def test_memory_stays_cached_if_its_release_fails(fail_at: int) -> None:
    device = Device()
    allocator = DeviceCachingAllocator(device)
    for ptr in [allocator.alloc(30 * MIB) for _ in range(3)]:
        allocator.free(ptr)
    device.fail_at = len(device.calls) + fail_at

    with pytest.raises(CudaError, match="requested by the test"):
        allocator.empty_cache()

    assert len(device.held) == 4 - fail_at
    invariants.check(allocator)
    allocator.empty_cache()
    assert device.held == {}
