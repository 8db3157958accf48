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

EDGES = (1, 512, 513, MIB, MIB + 1, 9 * MIB, 10 * MIB - 512, 10 * MIB, 19 * MIB)
USERS = STREAMS[:3]
MOST_LIVE = 768 * MIB
LIMIT = 1024 * MIB
SETTINGS = ("", "roundup_power2_divisions:4", "roundup_power2_divisions:[1:2,16:8,>:1]")
# Without a limit PyTorch counts the age of blocks if there ever was one.
LIMITED_SETTINGS = (
    *SETTINGS,
    "garbage_collection_threshold:0.4",
    "roundup_power2_divisions:8,garbage_collection_threshold:0.6",
)
# In all settings of a run or in none: where the limit is lowered PyTorch gives back parts of what was split
# before, which the driver refuses (release_available_cached_blocks).
UNSPLIT = "max_split_size_mb:40"
EXPANDABLE = ("expandable_segments:True", "expandable_segments:True,roundup_power2_divisions:4")
WEIGHTS = {
    "alloc": 8,
    "free": 6,
    "use": 2,
    "settle": 0.4,
    "busy": 0.3,
    "rare": 0.3,
    "phase": 0.02,
}


class Run:
    """One run, in phases: with a limit no stream is busy, since memory may be released at any time."""

    def __init__(
        self,
        subject: Subject,
        seed: int,
        *,
        settings: tuple[str, ...] = (),
        always: str = "",
        pools: int = 0,
    ) -> None:
        self.subject = subject
        self.rng = random.Random(seed)
        self.settings, self.always = settings, always
        self.pools = [subject.make_pool() for _ in range(pools)]
        self.weights = WEIGHTS | ({"pooled": 1} if pools else {})
        self.live: dict[int, int] = {}
        self.raw: set[int] = set()  # pointers whose streams PyTorch does not know
        self.used: set[int] = set()  # pointers that other streams use
        self.limited = False
        self.refused = 0
        self.configure("")

    def step(self) -> None:
        name = self.rng.choices(list(self.weights), list(self.weights.values()))[0]
        getattr(self, name)()

    def alloc(self) -> None:
        size, stream = self.size(), self.rng.choice((DEFAULT, *USERS))
        if sum(self.live.values()) + size > MOST_LIVE:
            self.free(among=self.live.keys() - self.used)
            return
        raw = self.rng.random() < 0.3
        ptr = self.subject.attempt(size, stream, raw=raw)
        if not ptr:
            self.refused += 1
            return
        self.live[ptr] = size
        self.raw.update([ptr] * raw)

    def free(self, among: Collection[int] = ()) -> None:
        if found := [ptr for ptr in self.live if not among or ptr in among]:
            ptr = self.rng.choice(found)
            del self.live[ptr]
            self.raw.discard(ptr)
            self.subject.free(ptr)
            if ptr in self.used:
                self.used.discard(ptr)
                self.look()

    def use(self) -> None:
        if tensors := [ptr for ptr in self.live if ptr not in self.raw]:
            ptr = self.rng.choice(tensors)
            self.used.add(ptr)
            self.subject.use(ptr, self.rng.choice(USERS))

    def busy(self) -> None:
        if not self.limited:
            self.subject.busy(self.rng.choice(USERS))

    def settle(self) -> None:
        self.settle_one(self.rng.choice(USERS))

    def rare(self) -> None:
        self.settle_all()
        getattr(self.subject, self.rng.choice(("empty_cache", "reset_peaks", "reset_sums")))()

    def phase(self) -> None:
        """Change the settings, and set or remove a limit."""
        self.settle_all()
        self.limited = self.rng.random() < 0.5
        # A MiB more: the fraction is rounded, and segments are whole MiB.
        self.subject.limit((LIMIT + MIB) / self.subject.total_bytes if self.limited else 1.0)
        settings = LIMITED_SETTINGS if self.limited else SETTINGS
        self.configure(self.rng.choice((*settings, *self.settings)))

    def configure(self, settings: str) -> None:
        self.subject.configure(",".join(filter(None, (settings, self.always))))

    def pooled(self) -> None:
        """Allocate and free in a pool, without pending frees, in which PyTorch's versions differ."""
        if self.limited:
            return
        self.subject.free(self.subject.alloc(512))  # which looks at events
        with self.subject.inside(self.rng.choice(self.pools)):
            for _ in range(self.rng.randint(1, 6)):
                self.alloc()
                if self.rng.random() < 0.6 and (unused := self.live.keys() - self.used):
                    self.free(among=unused)

    def settle_all(self) -> None:
        for stream in USERS:
            self.settle_one(stream)

    def settle_one(self, stream: str) -> None:
        self.subject.settle(stream)
        self.look()

    def look(self) -> None:
        """Process events now, before another stream has completed events.

        PyTorch completes the frees of several streams in the order of a hash map, which shows in
        the peaks and sums of pieces and in the last request of a free block.
        """
        if ptr := self.subject.attempt(512, DEFAULT, raw=True):
            self.subject.free(ptr)

    def size(self) -> int:
        kind = self.rng.random()
        if kind < 0.15:
            return self.rng.choice(EDGES)
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
    always: str = "",
    pools: int = 0,
) -> Scenario:
    @scenario(number, f"{kind}, seed {seed}")
    def run(s: Subject) -> Steps:
        own = Run(s, seed, settings=settings, always=always, pools=pools)
        for step in range(1, steps + 1):
            own.step()
            if step % 500 == 0:
                yield Check(f"{step}", now={"allocation.all.current": len(own.live)})
        own.settle_all()
        # Unsplit blocks are released as whole segments, so that the limit is rarely reached.
        facts = {"some were refused": own.refused > 0} if steps >= 10_000 and not always else {}
        yield Check("settled", {"allocation": 0}, facts=facts)

    return run
