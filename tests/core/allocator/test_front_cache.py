"""The front cache: exact sizes at once, and numbers as without it."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest
from core.allocator import law
from core.allocator.device import MIB, Device
from core.allocator.virtual_device import VirtualDevice
from core.allocator.watching import actions, current
from hypothesis import settings, strategies
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, rule

from cudakit.core.allocator.allocator import CachingAllocator
from cudakit.core.allocator.private_pools import MemPool
from cudakit.core.allocator.state import InvalidPointer
from cudakit.errors import InputError
from cudakit.torch_rules.settings import Settings

STREAMS = (0, 11, 12)
# Of these every request has a block of exactly its rounded size, wherever it comes from.
SIZES = (1, 512, 700, 701, 4096, MIB, 12 * MIB, 20 * MIB, 32 * MIB)
SAME = ("allocation", "allocated_bytes", "requested_bytes", "active", "active_bytes")


@pytest.fixture
def allocator(device: Device) -> Iterator[CachingAllocator]:
    made = CachingAllocator(device, front_cache=4, native=False)
    yield made
    law.check(made)


def compared(allocator: CachingAllocator) -> dict[str, int]:
    """Return the numbers that a front cache leaves alone."""
    return {
        name: value
        for name, value in allocator.statistics().items()
        if name.split(".", maxsplit=1)[0] in SAME
    }


@pytest.mark.parametrize("stream", STREAMS)
def test_front_cache_keeps_blocks_freed_on_their_own_stream(
    allocator: CachingAllocator, stream: int
) -> None:
    kept = allocator.alloc(512, stream)
    allocator.free(kept, stream)

    assert allocator.alloc(1024, stream) == kept + 512  # a block that went back would be merged
    assert allocator.alloc(512, stream) == kept
    for ptr in (kept, kept + 512):
        allocator.free(ptr)


class BesidePlain:
    """An allocator with a front cache, and one without."""

    def __init__(self) -> None:
        self.devices = Device(1 << 40), Device(1 << 40)
        self.fronted = CachingAllocator(self.devices[0], front_cache=2, native=False)
        self.plain = CachingAllocator(self.devices[1], native=False)

    def alloc(self, size: int, stream: int) -> tuple[int, int]:
        return self.fronted.alloc(size, stream), self.plain.alloc(size, stream)

    def use(self, ptrs: tuple[int, int], stream: int) -> None:
        self.fronted.record_use(ptrs[0], stream)
        self.plain.record_use(ptrs[1], stream)

    def free(self, ptrs: tuple[int, int]) -> None:
        self.fronted.free(ptrs[0])
        self.plain.free(ptrs[1])

    def finish(self, stream: int) -> None:
        for device in self.devices:
            device.finish(stream)

    def both(self, operation: str) -> None:
        getattr(self.fronted, operation)()
        getattr(self.plain, operation)()

    def check(self) -> None:
        assert compared(self.fronted) == compared(self.plain)
        law.check(self.fronted)


class WithAndWithout(RuleBasedStateMachine):
    live: Bundle[tuple[int, int]] = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        self.beside = BesidePlain()

    @rule(target=live, size=strategies.sampled_from(SIZES), stream=strategies.sampled_from(STREAMS))
    def alloc(self, size: int, stream: int) -> tuple[int, int]:
        return self.beside.alloc(size, stream)

    @rule(ptrs=live, stream=strategies.sampled_from(STREAMS))
    def use(self, ptrs: tuple[int, int], stream: int) -> None:
        self.beside.use(ptrs, stream)

    @rule(ptrs=consumes(live))
    def free(self, ptrs: tuple[int, int]) -> None:
        self.beside.free(ptrs)

    @rule(target=live, ptrs=consumes(live), size=strategies.sampled_from(SIZES))
    def replace(self, ptrs: tuple[int, int], size: int) -> tuple[int, int]:
        self.beside.free(ptrs)
        return self.beside.alloc(size, 0)

    @rule(stream=strategies.sampled_from(STREAMS))
    def finish(self, stream: int) -> None:
        self.beside.finish(stream)

    @rule(operation=strategies.sampled_from(["empty_cache", "reset_peaks", "reset_sums"]))
    def without_arguments(self, operation: str) -> None:
        self.beside.both(operation)

    @rule()
    def check(self) -> None:
        self.beside.check()

    def teardown(self) -> None:
        self.beside.check()


WithAndWithout.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestWithAndWithout = WithAndWithout.TestCase


def test_a_long_run_has_the_numbers_that_it_has_without() -> None:
    beside, rng = BesidePlain(), random.Random(5)
    live: list[tuple[int, int]] = []
    for step in range(4000):
        if live and rng.random() < 0.5:
            beside.free(live.pop(rng.randrange(len(live))))
        else:
            live.append(beside.alloc(rng.choice(SIZES), rng.choice(STREAMS)))
        if step % 400 == 0:
            beside.check()
    beside.check()


def test_block_freed_last_serves_the_next_request_of_equal_size(
    allocator: CachingAllocator,
) -> None:
    first, second = allocator.alloc(700), allocator.alloc(700)
    allocator.free(first)
    allocator.free(second)

    assert allocator.alloc(701) not in (first, second)
    assert allocator.alloc(700) == second
    assert allocator.alloc(700) == first


def test_of_each_size_and_stream_so_many_blocks_are_kept(device: Device) -> None:
    allocator = CachingAllocator(device, front_cache=1, native=False)
    pieces = [allocator.alloc(512) for _ in range(3)]
    for ptr in pieces:
        allocator.free(ptr)

    assert allocator.alloc(512) == pieces[0]
    assert allocator.alloc(1024) == pieces[1]


def test_peaks_are_those_of_what_was_allocated_at_once(allocator: CachingAllocator) -> None:
    allocator.free(allocator.alloc(4096))
    allocator.free(allocator.alloc(512))
    assert allocator.statistics()["allocated_bytes.all.peak"] == 4096

    small, large = allocator.alloc(512), allocator.alloc(4096)
    assert allocator.statistics()["allocated_bytes.all.peak"] == 4608
    allocator.free(small)
    allocator.free(large)
    allocator.reset_peaks()
    allocator.free(allocator.alloc(512))
    allocator.free(allocator.alloc(512))
    assert allocator.statistics()["allocated_bytes.small_pool.peak"] == 512


@pytest.mark.parametrize("sizes", [3, 100])
def test_peaks_are_so_whatever_was_kept_meanwhile(sizes: int, device: Device) -> None:
    allocator = CachingAllocator(device, front_cache=4, native=False)
    for size in range(1, sizes):
        allocator.free(allocator.alloc(size))
    for _ in range(2):
        pieces = [allocator.alloc(4096) for _ in range(3)]
        for ptr in pieces:
            allocator.free(ptr)
        held = allocator.alloc(8192), allocator.alloc(4096)
        assert current(allocator, "allocated_bytes") == 8192 + 4096
        assert allocator.statistics()["allocated_bytes.all.peak"] == 3 * 4096
        for ptr in held:
            allocator.free(ptr)
    held = allocator.alloc(8192), allocator.alloc(4097)
    assert allocator.statistics()["allocated_bytes.all.peak"] == 8192 + 4608
    for ptr in held:
        allocator.free(ptr)


def test_kept_block_is_not_active_while_others_are_pending(
    allocator: CachingAllocator, device: Device
) -> None:
    allocator.free(allocator.alloc(4608))
    allocator.statistics()
    kept, waiting = allocator.alloc(3585), allocator.alloc(1)
    allocator.free(kept)
    allocator.free(waiting, 12)
    allocator.alloc(1)

    assert allocator.statistics()["active_bytes.all.peak"] == 4608
    device.finish(12)


def test_a_monitor_sees_nothing_of_what_is_kept(allocator: CachingAllocator) -> None:
    seen: list[object] = []
    allocator.free(allocator.alloc(4096))
    allocator.monitor("allocated_bytes", 4608, seen.append)
    allocator.free(allocator.alloc(1024))
    assert seen == []


def test_a_block_serves_its_own_stream_only(allocator: CachingAllocator) -> None:
    own = allocator.alloc(700, 11)
    allocator.free(own)

    assert allocator.alloc(700, 12) != own
    assert allocator.alloc(700) != own
    assert allocator.alloc(700, 11) == own


def test_a_block_that_another_stream_uses_is_waited_for(
    allocator: CachingAllocator, device: Device
) -> None:
    ptr = allocator.alloc(700)
    allocator.record_use(ptr, 11)
    allocator.free(ptr)
    assert allocator.alloc(700) != ptr
    other = allocator.alloc(700)
    allocator.free(other, 12)
    assert allocator.alloc(700) != other

    device.finish(11)
    device.finish(12)
    assert allocator.alloc(700) == ptr


def test_kept_blocks_are_released_for_a_larger_request() -> None:
    device = Device(64 * MIB)
    allocator = CachingAllocator(device, front_cache=4, native=False)
    pieces = [allocator.alloc(20 * MIB) for _ in range(3)]
    for ptr in pieces:
        allocator.free(ptr)

    allocator.alloc(60 * MIB)

    assert allocator.statistics()["num_ooms"] == 0
    law.check(allocator)


def test_before_the_device_is_asked_what_is_kept_is_merged(
    allocator: CachingAllocator, device: Device
) -> None:
    pieces = [allocator.alloc(MIB) for _ in range(2)]
    for ptr in pieces:
        allocator.free(ptr)

    assert allocator.alloc(MIB - 512) == pieces[0]
    assert len(device.held) == 1


def test_emptying_the_cache_gives_everything_back(
    allocator: CachingAllocator, device: Device
) -> None:
    allocator.free(allocator.alloc(700))
    allocator.free(allocator.alloc(30 * MIB, 11))
    allocator.empty_cache()

    assert device.held == {}


def test_a_snapshot_shows_what_is_kept_as_free(allocator: CachingAllocator) -> None:
    allocator.free(allocator.alloc(700))

    (segment,) = allocator.snapshot()["segments"]
    assert [block["state"] for block in segment["blocks"]] == ["inactive"]


def test_a_second_free_is_refused(allocator: CachingAllocator) -> None:
    ptr = allocator.alloc(700)
    allocator.free(ptr)

    with pytest.raises(InvalidPointer, match="freed before"):
        allocator.free(ptr)
    with pytest.raises(InvalidPointer, match="freed before"):
        allocator.record_use(ptr, 11)


@pytest.mark.parametrize("operation", ["free", "record_use"])
def test_of_an_address_within_what_is_kept_it_says_that_it_was_freed(
    allocator: CachingAllocator, operation: str
) -> None:
    ptr = allocator.alloc(700)
    allocator.free(ptr)

    with pytest.raises(InvalidPointer, match="freed before"):
        getattr(allocator, operation)(ptr + 8, 11)


def test_a_size_that_is_equal_to_a_kept_one_must_still_be_a_number_of_bytes(
    allocator: CachingAllocator,
) -> None:
    allocator.free(allocator.alloc(1024))

    with pytest.raises(TypeError):
        allocator.alloc(1024.0)  # type: ignore[arg-type]


def test_a_trace_has_every_event(allocator: CachingAllocator) -> None:
    allocator.free(allocator.alloc(700))
    allocator.record_history(context="alloc")
    for _ in range(2):
        allocator.free(allocator.alloc(700))

    assert actions(allocator) == ["alloc", "free_requested", "free_completed"] * 2
    allocator.record_history(None)
    held = allocator.alloc(700)
    allocator.free(held)
    assert allocator.alloc(700) == held


def test_a_block_shows_no_stack_of_an_earlier_allocation(allocator: CachingAllocator) -> None:
    allocator.record_history("state", context="state")
    ptr = allocator.alloc(700)
    allocator.record_history(None)
    allocator.free(ptr)
    assert allocator.alloc(700) == ptr

    (segment,) = allocator.snapshot()["segments"]
    assert segment["blocks"][0]["frames"] == []


def test_blocks_that_are_not_to_be_split_are_counted_as_ever(device: Device) -> None:
    allocator = CachingAllocator(device, Settings(max_split_size_bytes=20 * MIB), front_cache=4)
    for _ in range(3):
        allocator.free(allocator.alloc(30 * MIB))

    statistics = allocator.statistics()
    assert statistics["oversize_allocations.allocated"] == 3
    assert statistics["oversize_allocations.current"] == 0


def test_a_private_pool_has_no_part_in_it(allocator: CachingAllocator) -> None:
    outside = allocator.alloc(700)
    allocator.free(outside)
    with MemPool(allocator) as pool:
        with allocator.use_pool(pool):
            inside = allocator.alloc(700)
        allocator.free(inside)

        assert inside != outside
        assert allocator.alloc(700) == outside
        assert allocator.alloc(700) != inside


def test_restored_pool_has_no_blocks_in_the_front_cache(
    allocator: CachingAllocator,
) -> None:
    with MemPool(allocator) as pool:
        with allocator.use_pool(pool):
            pieces = [allocator.alloc(700) for _ in range(2)]
        state = allocator.checkpoint(pool)
        for ptr in pieces:
            allocator.free(ptr)
        outside = [allocator.alloc(700) for _ in range(2)]
        for ptr in outside:
            allocator.free(ptr)
        allocator.statistics()  # which merges what is kept, and lets a block be used anew

        allocator.restore(state)
        for ptr in pieces:
            allocator.free(ptr)

        assert [allocator.alloc(700) for _ in range(2)] == outside


def test_without_caching_nothing_is_kept(allocator: CachingAllocator, device: Device) -> None:
    kept = allocator.alloc(700)
    allocator.free(kept)
    held = dict(device.held)
    allocator.enable_caching(enabled=False)
    ptr = allocator.alloc(700)
    assert device.held == held | {ptr: 700}
    allocator.free(ptr)
    allocator.enable_caching(enabled=True)

    assert device.held == held
    assert allocator.alloc(700) == kept


def test_front_cache_is_off_while_frees_are_pending(
    allocator: CachingAllocator, device: Device
) -> None:
    allocator.free(allocator.alloc(512))
    waiting = allocator.alloc(4096)
    allocator.free(waiting, 12)
    allocator.alloc(512)
    assert allocator.statistics()["active_bytes.all.peak"] == 4608

    allocator.free(allocator.alloc(700))
    device.finish(12)
    allocator.alloc(700)
    assert current(allocator, "active_bytes") == 512 + 1024


def test_more_sizes_than_there_are_bins_go_to_the_pools(allocator: CachingAllocator) -> None:
    for size in range(1, 6000):
        allocator.free(allocator.alloc(size))

    assert current(allocator, "allocation") == 0


def test_a_front_cache_of_less_than_nothing_is_refused(device: Device) -> None:
    with pytest.raises(InputError, match="-1"):
        CachingAllocator(device, front_cache=-1)


def test_threads_share_it() -> None:
    allocator = CachingAllocator(Device(1 << 40), front_cache=8)
    failures: list[Exception] = []
    live: set[int] = set()

    def churn(seed: int) -> None:
        rng = random.Random(seed)
        own: list[int] = []
        try:
            for step in range(1500):
                if own and rng.random() < 0.5:
                    ptr = own.pop(rng.randrange(len(own)))
                    live.remove(ptr)
                    allocator.free(ptr)
                else:
                    ptr = allocator.alloc(rng.choice(SIZES))
                    assert ptr not in live
                    live.add(ptr)
                    own.append(ptr)
                if step % 300 == 0:
                    allocator.snapshot()
            for ptr in own:
                live.remove(ptr)
                allocator.free(ptr)
        except Exception as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failures == []
    law.check(allocator)
    statistics = allocator.statistics()
    assert statistics["active_bytes.all.current"] == 0
    assert statistics["allocation.all.allocated"] == statistics["allocation.all.freed"]
    allocator.empty_cache()
    assert current(allocator, "reserved_bytes") == 0


@pytest.mark.parametrize(
    "chosen",
    [
        Settings(expandable_segments=True),
        Settings(max_split_size_bytes=20 * MIB),
        Settings(roundup_power2_divisions=(4,) * 16),
    ],
    ids=["expandable", "max split", "divisions"],
)
def test_front_cache_keeps_blocks_under_settings_of_the_slow_path(chosen: Settings) -> None:
    allocator = CachingAllocator(VirtualDevice(), chosen, front_cache=4, native=False)
    first, second = allocator.alloc(700), allocator.alloc(700)
    allocator.free(first)
    allocator.free(second)

    assert allocator.alloc(701) not in (first, second)
    assert allocator.alloc(700) == second
    law.check(allocator)
