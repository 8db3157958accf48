"""Every driver call can fail: nothing leaks, and statistics stay right."""

from __future__ import annotations

import pytest
from allocator.device import MIB
from allocator.pinned import invariants
from allocator.pinned.host import Host

from cudakit.allocator.pinned import CachingHostAllocator
from cudakit.errors import CudaError
from cudakit.torch_rules.settings import Settings

CAPACITY = 32 * MIB
SETTINGS = (
    Settings(),
    Settings(pinned_max_cached_size_bytes=2 * MIB),
    Settings(pinned_reserve_segment_size_bytes=4 * MIB),
    Settings(pinned_free_catch_all=True),
)


def program(pool: CachingHostAllocator, host: Host) -> list[CudaError]:
    """Run all kinds of operations, continue after failures, and return the failures."""
    live: dict[str, int] = {}
    failures: list[CudaError] = []

    def do(operation: str, name: str = "", size: int = 0) -> None:
        try:
            if operation == "alloc":
                live[name] = pool.alloc(size)
            elif operation == "empty":
                pool.empty_cache()
            elif operation == "use":
                pool.record_use(live[name], 11)
            elif name in live:
                pool.free(live.pop(name))
        except (CudaError, KeyError) as error:
            failures.extend([error] if isinstance(error, CudaError) else [])
        invariants.check(pool, host)

    do("alloc", "a", 3 * MIB)
    do("alloc", "b", 700)
    do("alloc", "c", 7 * MIB)
    do("use", "a")
    do("use", "c")
    do("free", "a")
    do("free", "b")
    do("alloc", "d", 600)
    host.finish(11)
    do("free", "c")
    do("alloc", "e", 4 * MIB)
    do("alloc", "f", 14 * MIB)  # more memory than is free before the other blocks are released
    do("alloc", "g", 40 * MIB)
    do("free", "e")
    do("empty")
    for name in "abcdefg":
        do("free", name)
    return failures


@pytest.mark.parametrize("settings", SETTINGS)
def test_failed_driver_call_is_reported_and_leaks_nothing(settings: Settings) -> None:
    host = Host(CAPACITY)
    expected = program(CachingHostAllocator(host, settings), host)
    calls = len(host.calls)
    assert calls > 10
    assert {error.code for error in expected} == {2}

    for fail_at in range(1, calls + 1):
        failing = Host(CAPACITY)
        failing.device.fail_at = fail_at
        pool = CachingHostAllocator(failing, settings)
        failures = program(pool, failing)
        pool.close()

        assert failing.held == {}
        assert failing.device.events == {}
        invariants.check(pool, failing)
        is_reported = any(error is failing.error for error in failures)
        quiet = failing.calls[fail_at - 1] in ("record", "event", "free")
        assert is_reported or quiet, failing.calls[fail_at - 1]


def test_memory_stays_cached_if_its_release_fails(host: Host) -> None:
    pool = CachingHostAllocator(host)
    for ptr in [pool.alloc(MIB) for _ in range(3)]:
        pool.free(ptr)
    host.device.fail_at = len(host.calls) + 2

    with pytest.raises(CudaError, match="requested by the test"):
        pool.empty_cache()

    assert len(host.held) == 2
    assert pool.counters()["num_free_failures"] == 1
    invariants.check(pool, host)
    pool.empty_cache()
    assert host.held == {}
