"""Long runs of random operations on several streams, with all kinds of sizes and changes of settings."""

from __future__ import annotations

import random
from collections.abc import Collection

from allocator_scenarios.scenario import (
    DEFAULT,
    MIB,
    STREAMS,
    Check,
    Scenario,
    Steps,
    Subject,
    scenario,
)

EDGE_SIZES = (1, 512, 513, MIB, MIB + 1, 9 * MIB, 10 * MIB - 512, 10 * MIB, 19 * MIB)
OTHER_STREAMS = STREAMS[:3]
MAX_LIVE_BYTES = 768 * MIB
LIMIT = 1024 * MIB
SETTINGS = ("", "roundup_power2_divisions:4", "roundup_power2_divisions:[1:2,16:8,>:1]")
# Without a limit PyTorch counts the age of blocks if there ever was one.
LIMITED_SETTINGS = (
    *SETTINGS,
    "garbage_collection_threshold:0.4",
    "roundup_power2_divisions:8,garbage_collection_threshold:0.6",
)
# A run has this setting always or never: if it is lowered during a run, PyTorch frees parts of split
# segments, which the driver rejects (release_available_cached_blocks).
UNSPLIT_SETTING = "max_split_size_mb:40"
EXPANDABLE = ("expandable_segments:True", "expandable_segments:True,roundup_power2_divisions:4")
WEIGHTS = {
    "alloc": 8,
    "free": 6,
    "record_use": 2,
    "finish_work": 0.4,
    "keep_busy": 0.3,
    "reset": 0.3,
    "change_settings": 0.02,
}


class RandomRun:
    """One run, in phases: with a limit no stream is busy, since memory may be released at any time."""

    def __init__(
        self,
        subject: Subject,
        seed: int,
        *,
        settings: tuple[str, ...] = (),
        fixed_settings: str = "",
        pools: int = 0,
    ) -> None:
        self.subject = subject
        self.rng = random.Random(seed)
        self.settings, self.fixed_settings = settings, fixed_settings
        self.pools = [subject.make_pool() for _ in range(pools)]
        self.weights = WEIGHTS | ({"use_pool": 1} if pools else {})
        self.live_bytes: dict[int, int] = {}
        self.raw_ptrs: set[int] = set()  # pointers whose streams PyTorch does not know
        self.used_ptrs: set[int] = set()  # pointers that other streams use
        self.has_limit = False
        self.failed_allocations = 0
        self.configure("")

    def step(self) -> None:
        name = self.rng.choices(list(self.weights), list(self.weights.values()))[0]
        getattr(self, name)()

    def alloc(self) -> None:
        size, stream = self.size(), self.rng.choice((DEFAULT, *OTHER_STREAMS))
        if sum(self.live_bytes.values()) + size > MAX_LIVE_BYTES:
            self.free(among=self.live_bytes.keys() - self.used_ptrs)
            return
        raw = self.rng.random() < 0.3
        ptr = self.subject.try_alloc(size, stream, raw=raw)
        if not ptr:
            self.failed_allocations += 1
            return
        self.live_bytes[ptr] = size
        self.raw_ptrs.update([ptr] * raw)

    def free(self, among: Collection[int] = ()) -> None:
        if candidates := [ptr for ptr in self.live_bytes if not among or ptr in among]:
            ptr = self.rng.choice(candidates)
            del self.live_bytes[ptr]
            self.raw_ptrs.discard(ptr)
            self.subject.free(ptr)
            if ptr in self.used_ptrs:
                self.used_ptrs.discard(ptr)
                self.process_events()

    def record_use(self) -> None:
        if tensors := [ptr for ptr in self.live_bytes if ptr not in self.raw_ptrs]:
            ptr = self.rng.choice(tensors)
            self.used_ptrs.add(ptr)
            self.subject.record_use(ptr, self.rng.choice(OTHER_STREAMS))

    def keep_busy(self) -> None:
        if not self.has_limit:
            self.subject.keep_busy(self.rng.choice(OTHER_STREAMS))

    def finish_work(self) -> None:
        self.finish_stream(self.rng.choice(OTHER_STREAMS))

    def reset(self) -> None:
        self.finish_all()
        getattr(self.subject, self.rng.choice(("empty_cache", "reset_peaks", "reset_sums")))()

    def change_settings(self) -> None:
        """Change the settings, and set or remove a limit."""
        self.finish_all()
        self.has_limit = self.rng.random() < 0.5
        # One MiB is added because the fraction is rounded and segments are whole MiB.
        self.subject.set_memory_fraction(
            (LIMIT + MIB) / self.subject.total_bytes if self.has_limit else 1.0
        )
        settings = LIMITED_SETTINGS if self.has_limit else SETTINGS
        self.configure(self.rng.choice((*settings, *self.settings)))

    def configure(self, settings: str) -> None:
        self.subject.configure(",".join(filter(None, (settings, self.fixed_settings))))

    def use_pool(self) -> None:
        """Allocate and free in a pool, without pending frees, in which PyTorch's versions differ."""
        if self.has_limit:
            return
        self.subject.free(self.subject.alloc(512))  # which looks at events
        with self.subject.use_pool(self.rng.choice(self.pools)):
            for _ in range(self.rng.randint(1, 6)):
                self.alloc()
                if self.rng.random() < 0.6 and (unused := self.live_bytes.keys() - self.used_ptrs):
                    self.free(among=unused)

    def finish_all(self) -> None:
        for stream in OTHER_STREAMS:
            self.finish_stream(stream)

    def finish_stream(self, stream: str) -> None:
        self.subject.finish_work(stream)
        self.process_events()

    def process_events(self) -> None:
        """Process events now, before another stream has completed events.

        PyTorch completes the frees of several streams in the order of a hash map, which shows in
        the peaks and sums of pieces and in the last request of a free block.
        """
        if ptr := self.subject.try_alloc(512, DEFAULT, raw=True):
            self.subject.free(ptr)

    def size(self) -> int:
        kind = self.rng.random()
        if kind < 0.15:
            return self.rng.choice(EDGE_SIZES)
        if kind < 0.5:
            return self.rng.randint(1, 200_000)
        if kind < 0.8:
            return self.rng.randint(1, 20) * MIB
        return self.rng.randint(1, 70 * MIB)


def random_run(
    number: int,
    seed: int,
    steps: int = 10_000,
    *,
    kind: str = "random operations",
    settings: tuple[str, ...] = (),
    fixed_settings: str = "",
    pools: int = 0,
) -> Scenario:
    @scenario(number, f"{kind}, seed {seed}")
    def run(s: Subject) -> Steps:
        run_state = RandomRun(
            s, seed, settings=settings, fixed_settings=fixed_settings, pools=pools
        )
        for step in range(1, steps + 1):
            run_state.step()
            if step % 500 == 0:
                yield Check(f"{step}", now={"allocation.all.current": len(run_state.live_bytes)})
        run_state.finish_all()
        # Unsplit blocks are released as whole segments, so that the limit is rarely reached.
        facts = (
            {"some allocations failed": run_state.failed_allocations > 0}
            if steps >= 10_000 and not fixed_settings
            else {}
        )
        yield Check("finished", {"allocation": 0}, facts=facts)

    return run
