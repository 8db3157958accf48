"""The fast path leaves the same state as the slow path."""

from __future__ import annotations

import gc
import random
import sys
from contextlib import suppress
from dataclasses import replace
from itertools import product
from types import FrameType
from typing import Any

import pytest
from allocator import invariants
from allocator.device import MIB, Device
from allocator.test_machine import SIZES, Pair, some_size
from allocator.virtual_device import VirtualDevice
from hypothesis import settings, strategies
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    multiple,
    rule,
)

from cudakit.allocator.allocator import DeviceCachingAllocator
from cudakit.allocator.blocks import Block
from cudakit.allocator.guard import Reentered
from cudakit.allocator.memory import native_module
from cudakit.errors import CudakitError
from cudakit.gpu.api import LEGACY, PER_THREAD
from cudakit.torch_rules.settings import Settings

needs_native = pytest.mark.skipif(
    native_module() is None, reason="the native types were not compiled"
)
STREAMS = (0, LEGACY, 11, 12)
CAPACITY = 256 * MIB


def always_slow(allocator: DeviceCachingAllocator) -> DeviceCachingAllocator:
    """Make every call of an allocator take the slow path."""
    for name in ("alloc", "free"):
        allocator.__dict__.pop(
            name, None
        )  # The native function that replaces the method of the class.
    return allocator


@pytest.fixture(params=[False, pytest.param(True, marks=needs_native)], ids=["plain", "native"])
def native(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


class FastAndSlow:
    """A native allocator, and one in plain Python that always takes the slow path."""

    def __init__(self, capacity: int = CAPACITY, **options: Any) -> None:
        self.devices = VirtualDevice(capacity), VirtualDevice(capacity)
        fast = DeviceCachingAllocator(self.devices[0], native=True, **options)
        self.allocators = (
            fast,
            always_slow(DeviceCachingAllocator(self.devices[1], native=False, **options)),
        )

    def alloc(self, size: Any, *stream: int) -> int:
        """Allocate in both; return 0 if out of memory."""
        result, expected = (
            _outcome(allocator.alloc, size, *stream) for allocator in self.allocators
        )
        assert result == expected
        return result if isinstance(result, int) else 0

    def free(self, ptr: Any, *stream: int | None) -> None:
        result, expected = (_outcome(allocator.free, ptr, *stream) for allocator in self.allocators)
        assert result == expected

    def do(self, name: str, *args: Any, **options: Any) -> None:
        for allocator in self.allocators:
            getattr(allocator, name)(*args, **options)

    def finish(self, stream: int) -> None:
        for device in self.devices:
            device.finish(stream)

    def check(self) -> None:
        result, expected = (state_of(allocator) for allocator in self.allocators)
        assert result == expected
        assert self.devices[0].held == self.devices[1].held
        for allocator in self.allocators:
            invariants.check(allocator)


def _outcome(call: Any, *args: Any) -> Any:
    try:
        return call(*args)
    except (CudakitError, TypeError, ValueError) as error:
        return type(error)


def state_of(allocator: DeviceCachingAllocator) -> Any:
    """Return the whole state of an allocator, without times."""
    snapshot = allocator.snapshot()
    for trace in snapshot["device_traces"]:
        for entry in trace:
            del entry["time_us"]
    engine = allocator._engine
    pools = [*engine.default_pools, *(pool for pools in engine.private_pools for pool in pools)]
    return {
        "segments": snapshot["segments"],
        "traces": snapshot["device_traces"],
        "statistics": allocator.statistics(),
        "blocks": [
            attributes_of_block(b) for segment in engine.segments.values() for b in segment.blocks()
        ],
        "free": [[attributes_of_block(block) for block in pool] for pool in pools],
    }


def attributes_of_block(block: Block) -> dict[str, Any]:
    """Return the attributes of a block, with other blocks as addresses."""
    skipped_attributes = ("free_blocks", "expandable_segment")
    attributes = {
        name: getattr(block, name) for name in Block.__slots__ if name not in skipped_attributes
    }
    for name in ("prev", "next"):
        attributes[name] = attributes[name] and attributes[name].ptr
    return attributes


class AgainstSlowPath(RuleBasedStateMachine):
    live: Bundle[int] = Bundle("live")

    @initialize(
        max_split=strategies.sampled_from([None, 20, 40]),
        divisions=strategies.sampled_from([1, 4]),
        garbage=strategies.sampled_from([0.0, 0.5]),
        uses_expandable=strategies.booleans(),
    )
    def begin(
        self,
        max_split: int | None,
        divisions: int,
        garbage: float,
        uses_expandable: bool,
    ) -> None:
        chosen_settings = Settings(
            max_split_size_bytes=max_split and max_split * MIB,
            roundup_power2_divisions=(divisions,) * 16,
            garbage_collection_threshold=garbage,
            memory_fraction=0.75 if garbage else 1.0,
            expandable_segments=uses_expandable,
        )
        self.fast_and_slow = FastAndSlow(settings=chosen_settings)

    @rule(target=live, size=SIZES, stream=strategies.sampled_from(STREAMS))
    def alloc(self, size: int, stream: int) -> Any:
        return self.fast_and_slow.alloc(size, stream) or multiple()

    @rule(ptr=live, stream=strategies.sampled_from(STREAMS))
    def use(self, ptr: int, stream: int) -> None:
        self.fast_and_slow.do("record_use", ptr, stream)

    @rule(ptr=consumes(live), stream=strategies.sampled_from([None, *STREAMS]))
    def free(self, ptr: int, stream: int | None) -> None:
        self.fast_and_slow.free(ptr, stream)

    @rule(target=live, ptr=consumes(live), size=SIZES)
    def replace(self, ptr: int, size: int) -> Any:
        self.fast_and_slow.free(ptr)
        return self.fast_and_slow.alloc(size) or multiple()

    @rule(ptr=strategies.sampled_from([0, 1, 0x7F00_0000_0200]))
    def free_what_may_not_be_there(self, ptr: int) -> None:
        if ptr not in self.fast_and_slow.allocators[0]._live_blocks:
            self.fast_and_slow.free(ptr)

    @rule(stream=strategies.sampled_from(STREAMS))
    def finish(self, stream: int) -> None:
        self.fast_and_slow.finish(stream)

    @rule(
        history=strategies.sampled_from([None, "all", "all"]),
        context=strategies.sampled_from([None, None, "state", "all"]),
        skip_actions=strategies.sampled_from([(), ("alloc",)]),
        max_entries=strategies.sampled_from([5, 1000]),
    )
    def record(
        self,
        history: str | None,
        context: str | None,
        skip_actions: tuple[str, ...],
        max_entries: int,
    ) -> None:
        options = {"context": context, "skip_actions": skip_actions, "max_entries": max_entries}
        self.fast_and_slow.do("record_history", history, **options)

    @rule(limited=strategies.booleans())
    def configure(self, limited: bool) -> None:
        for allocator in self.fast_and_slow.allocators:
            settings = replace(
                allocator.settings,
                memory_fraction=0.75 if limited else 1.0,
                garbage_collection_threshold=0.5 if limited else 0.0,
            )
            allocator.configure(settings)

    @rule(name=strategies.sampled_from(["empty_cache", "reset_peaks", "reset_sums", "statistics"]))
    def without_arguments(self, name: str) -> None:
        self.fast_and_slow.do(name)

    @rule()
    def check(self) -> None:
        self.fast_and_slow.check()

    def teardown(self) -> None:
        if hasattr(self, "both"):
            self.fast_and_slow.check()


AgainstSlowPath.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestAgainstSlowPath = needs_native(AgainstSlowPath.TestCase)


@needs_native
@pytest.mark.parametrize("recorded", [False, True])
def test_long_run_equals_the_slow_path(recorded: bool) -> None:
    fast_and_slow, rng = FastAndSlow(1 << 40), random.Random(3)
    if recorded:
        fast_and_slow.do("record_history", "all", context=None, max_entries=500)
    live: list[int] = []
    for step in range(6000):
        if live and rng.random() < 0.45:
            fast_and_slow.free(live.pop(rng.randrange(len(live))), rng.choice([None, 0, LEGACY]))
        else:
            live.append(fast_and_slow.alloc(some_size(rng)))
        if step % 1000 == 999:
            fast_and_slow.check()


@needs_native
def test_long_lists_of_free_blocks_equal_the_slow_path() -> None:
    fast_and_slow, rng = FastAndSlow(1 << 40), random.Random(4)
    live = [fast_and_slow.alloc(512 * (1 + number % 5)) for number in range(9000)]
    for ptr in live[::2]:
        fast_and_slow.free(ptr)
    fast_and_slow.check()
    live = live[1::2]
    for _ in range(6000):
        index = rng.randrange(len(live))
        fast_and_slow.free(live[index])
        live[index] = fast_and_slow.alloc(512 * rng.randint(1, 40))
    fast_and_slow.check()
    rng.shuffle(live)
    for ptr in live:  # Frees all blocks of the segment.
        fast_and_slow.free(ptr)
    fast_and_slow.check()
    fast_and_slow.do("empty_cache")
    assert fast_and_slow.devices[0].held == {}


@needs_native
@pytest.mark.parametrize(
    "size", [-1, 0, True, 1 << 59, 1 << 60, 1 << 70, 700.0, "700", None], ids=repr
)
def test_invalid_sizes_behave_as_on_the_slow_path(size: object) -> None:
    fast_and_slow = FastAndSlow()
    fast_and_slow.free(fast_and_slow.alloc(1))
    fast_and_slow.alloc(size)
    fast_and_slow.check()


@needs_native
@pytest.mark.parametrize("ptr", [-1, 0, 0x7F00_0000_0200, 1 << 70, 0.0, "0", None], ids=repr)
def test_invalid_addresses_behave_as_on_the_slow_path(ptr: object) -> None:
    fast_and_slow = FastAndSlow()
    fast_and_slow.alloc(700)
    fast_and_slow.free(ptr)
    fast_and_slow.check()


@needs_native
def test_stream_numbers_equal_the_slow_path() -> None:
    fast_and_slow = FastAndSlow()
    for stream in (LEGACY, PER_THREAD, -5, 1 << 63, 12):
        fast_and_slow.alloc(700, stream)
        fast_and_slow.free(fast_and_slow.alloc(700, stream), stream)
        fast_and_slow.free(fast_and_slow.alloc(700, stream), 11)
    fast_and_slow.check()


@needs_native
def test_arguments_may_be_named() -> None:
    for allocator in FastAndSlow().allocators:
        allocator.free(ptr=allocator.alloc(size_bytes=700, stream=11), stream=11)
        with pytest.raises(TypeError):
            allocator.alloc()  # type: ignore[call-arg]
        with pytest.raises(TypeError):
            allocator.free(1, 2, 3)  # type: ignore[call-arg]


@needs_native
@pytest.mark.parametrize("recorded", [False, True])
def test_usual_calls_run_no_python_function(recorded: bool) -> None:
    allocator = DeviceCachingAllocator(Device(), native=True)
    if recorded:
        allocator.record_history(context=None)
    sizes = (700, 700, MIB, 30 * MIB)
    for _ in range(2):
        for ptr in [allocator.alloc(size) for size in sizes]:
            allocator.free(ptr)
    called: list[str] = []
    ptrs: list[int] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        for size in sizes:
            ptrs += (allocator.alloc(size, LEGACY),)  # A comprehension would be a Python function.
        for ptr in ptrs:
            allocator.free(ptr, LEGACY)
    finally:
        sys.setprofile(None)

    assert called == []


@needs_native
def test_split_moves_stack_and_age_to_the_upper_part() -> None:
    collecting = Settings(memory_fraction=0.75, garbage_collection_threshold=0.5)
    fast_and_slow = FastAndSlow(settings=collecting)
    fast_and_slow.do("record_history", context="all")
    blocks = [fast_and_slow.alloc(700) for _ in range(6)] + [
        fast_and_slow.alloc(2 * MIB) for _ in range(6)
    ]
    for ptr in blocks[::2]:
        fast_and_slow.free(ptr)
    fast_and_slow.do("record_history", None)
    fast_and_slow.do("configure", Settings())
    for size in (1500, 3 * MIB, 700, 2 * MIB):  # The first two requests find no free block.
        fast_and_slow.alloc(size)
        fast_and_slow.check()


@needs_native
def test_recorded_stack_begins_at_the_caller() -> None:
    frame_names = []
    for allocator in FastAndSlow().allocators:
        allocator.record_history(context="all")
        allocator.free(allocator.alloc(700))
        traced = allocator.snapshot()["device_traces"][0]
        frame_names.append([[frame["name"] for frame in entry["frames"]] for entry in traced])

    assert frame_names[0] == frame_names[1]
    assert frame_names[0][0][0] == "test_recorded_stack_begins_at_the_caller"


def test_trace_times_come_from_the_monotonic_clock(native: bool) -> None:
    allocator = DeviceCachingAllocator(Device(), native=native)
    allocator.record_history(context=None)
    allocator.free(allocator.alloc(700))  # The request allocates a segment.
    allocator.free(allocator.alloc(700))

    entries = allocator.snapshot()["device_traces"][0]
    times = [entry["time_us"] for entry in entries]
    assert times == sorted(times)
    assert times[-1] - times[0] < 10_000_000
    assert [entry["action"] for entry in entries[-3:]] == [
        "alloc",
        "free_requested",
        "free_completed",
    ]


def test_garbage_collection_during_a_call_can_free(native: bool) -> None:
    allocator = DeviceCachingAllocator(Device(), native=native)
    ready: list[int] = []

    def collected(phase: str, _: dict[str, int]) -> None:
        while phase == "stop" and ready:
            allocator.free(ready.pop())
            with suppress(Reentered):
                allocator.free(allocator.alloc(700))

    thresholds = gc.get_threshold()
    gc.callbacks.append(collected)
    try:
        gc.set_threshold(1)
        for size in (1, 700, MIB, 5 * MIB) * 200:
            ready += [allocator.alloc(size), allocator.alloc(size + 512)]
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(collected)

    for ptr in ready:
        allocator.free(ptr)
    invariants.check(allocator)
    assert allocator.statistics()["allocation.all.current"] == 0


def test_failed_host_allocation_leaves_the_allocator_unchanged() -> None:
    pytest.importorskip("cudakit.allocator._fast", reason="Python code may stop anywhere")
    memory = pytest.importorskip("_testcapi", reason="CPython's own tests are not there")
    allocator = DeviceCachingAllocator(Device(), native=True)
    sizes = (700, 1000, MIB, 5 * MIB)
    blocks = [allocator.alloc(size) for size in sizes * 8]
    for ptr in blocks[: len(blocks) // 2]:
        allocator.free(ptr)
    failures = 0
    for number, size in product(range(4), sizes):
        ptr = without_memory(memory, number, allocator.alloc, size)
        invariants.check(allocator)
        if ptr is FAILED:
            failures += 1
            ptr = allocator.alloc(size)
        if without_memory(memory, number, allocator.free, ptr) is FAILED:
            failures += 1
            invariants.check(allocator)
            allocator.free(ptr)
        invariants.check(allocator)
    assert failures >= len(sizes)


FAILED = object()


def without_memory(memory: Any, number: int, call: Any, argument: Any) -> Any:
    """Call a function while one memory allocation of the interpreter fails."""
    memory.set_nomemory(number, number + 1)
    try:
        return call(argument)
    except MemoryError:
        return FAILED
    finally:
        memory.remove_mem_hooks()


class SlowPair(Pair):
    """The model, and an allocator that uses the slow path only."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        always_slow(self.allocator)


def test_slow_path_equals_the_model() -> None:
    pair, rng = SlowPair(limited=True, max_split=None, gc=0.0), random.Random(9)
    live: list[int] = []
    for _ in range(700):
        if live and rng.random() < 0.5:
            pair.free(live.pop(rng.randrange(len(live))))
        elif ptr := pair.alloc(some_size(rng), rng.choice((0, 11))):
            live.append(ptr)
        pair.check()
