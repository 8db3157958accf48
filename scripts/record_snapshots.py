"""Record memory snapshots with PyTorch on a GPU, each with PyTorch's own counters.

    python scripts/record_snapshots.py FOLDER [CASE ...]

Writes CASE.pkl.gz and CASE.json: the peaks of the counters since recording began and their final values, the
versions, and the date. The small cases are test fixtures (tests/data); scripts/bench_memviz.py measures the
cases of a million events.
"""

from __future__ import annotations

import contextlib
import datetime
import gzip
import itertools
import json
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

_STATISTICS = ("requested_bytes", "allocated_bytes", "active_bytes", "reserved_bytes")
_MIB = 1 << 20


def train() -> None:
    """Train a small transformer for six steps with Adam."""
    layer = torch.nn.TransformerEncoderLayer(256, 4, 512, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 4).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(6):
        with torch.profiler.record_function(f"step{step}"):
            optimizer.zero_grad()
            batch = torch.randn(16, 128, 256, device="cuda")
            model(batch).square().mean().backward()
            optimizer.step()


def streams() -> None:
    """Use tensors on side streams, so that frees stay pending (record_stream)."""
    rng = random.Random(1)
    sides = [torch.cuda.Stream() for _ in range(3)]
    held: list[torch.Tensor] = []
    for _ in range(400):
        tensor = torch.empty(rng.randrange(1, 6 * _MIB), dtype=torch.uint8, device="cuda")
        if rng.random() < 0.4:
            side = rng.choice(sides)
            with torch.cuda.stream(side):
                torch.cuda._sleep(200_000)
                tensor.add_(1)
            tensor.record_stream(side)
        held.append(tensor)
        if len(held) > 24:
            held.pop(rng.randrange(len(held)))
    _keep(held)


def expandable() -> None:
    """Grow and shrink with expandable segments, so that ranges are mapped and unmapped."""
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    _churn(random.Random(2), events=900, live=40, largest=24 * _MIB, empty_cache_every=150)
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


def pools() -> None:
    """Capture a CUDA graph and use a user pool, so that memory lies in private pools."""
    static = torch.zeros(4 * _MIB, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = (static * 2 + 1).relu()
    graph.replay()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        held = [torch.empty(3 * _MIB, dtype=torch.uint8, device="cuda") for _ in range(6)]
    del held[::2]
    _keep([graph, result, pool, held, static])


def leak() -> None:
    """Keep one tensor more at each step of a loop without annotations."""
    kept: list[torch.Tensor] = []
    weight = torch.randn(512, 512, device="cuda")
    for _ in range(12):
        hidden = torch.randn(256, 512, device="cuda") @ weight
        hidden = torch.relu(hidden) @ weight
        kept.append(_forgotten(hidden))
        del hidden
    _keep(kept)


def _forgotten(hidden: torch.Tensor) -> torch.Tensor:
    return hidden.sum(dim=1).repeat(2000)


def fragmented_oom() -> None:
    """Run out of memory with enough free memory, in blocks that are too small."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(2048 * _MIB / total)
    activations, statistics = [], []
    for _ in range(90):
        activations.append(torch.empty(9 * _MIB, dtype=torch.uint8, device="cuda"))
        statistics.append(torch.empty(2 * _MIB, dtype=torch.uint8, device="cuda"))
        activations.append(torch.empty(9 * _MIB, dtype=torch.uint8, device="cuda"))
    del activations
    with contextlib.suppress(torch.OutOfMemoryError):
        _too_much()
    torch.cuda.set_per_process_memory_fraction(1.0)
    _keep(statistics)


def _too_much() -> torch.Tensor:
    return torch.empty(700 * _MIB, dtype=torch.uint8, device="cuda")


def million_few() -> None:
    """Make a million events from a handful of stacks on one stream."""
    _churn(random.Random(3), events=1_000_000, live=1_500, largest=4 * _MIB)


def million_many() -> None:
    """Make a million events from more than 5,000 stacks on four streams, with pending frees."""
    rng = random.Random(4)
    call = _call_paths(levels=4, width=9)
    sides = [torch.cuda.current_stream(), *(torch.cuda.Stream() for _ in range(3))]
    held: list[torch.Tensor] = []
    while _events < 1_000_000:
        stream = rng.choice(sides)
        with torch.cuda.stream(stream):
            tensor = call(rng.randrange(9**4), _sized(rng, 4 * _MIB))
        if rng.random() < 0.05:
            other = rng.choice(sides)
            with torch.cuda.stream(other):
                tensor.add_(1)
            tensor.record_stream(other)
        _count(1)
        held.append(tensor)
        if len(held) > 1_500:
            held.pop(rng.randrange(len(held)))
            _count(2)
    _keep(held)


_events = 0
_held: list[object] = []


def _count(events: int) -> None:
    global _events
    _events += events


def _keep(what: object) -> None:
    """Keep objects alive until the snapshot is written."""
    _held.append(what)


def _churn(
    rng: random.Random, *, events: int, live: int, largest: int, empty_cache_every: int = 0
) -> None:
    held: list[torch.Tensor] = []
    done = 0
    while done < events:
        held.append(_sized(rng, largest)())
        done += 1
        if len(held) > live:
            held.pop(rng.randrange(len(held)))
            done += 2
        if empty_cache_every and done % empty_cache_every == 0:
            del held[: len(held) // 2]
            torch.cuda.empty_cache()
    _keep(held)


def _sized(rng: random.Random, largest: int) -> Callable[[], torch.Tensor]:
    size = rng.randrange(1, largest) if rng.random() < 0.6 else rng.randrange(1, 64 << 10)
    return lambda: torch.empty(size, dtype=torch.uint8, device="cuda")


def _call_paths(
    *, levels: int, width: int
) -> Callable[[int, Callable[[], torch.Tensor]], torch.Tensor]:
    """Return a function that calls through a path of functions, a distinct call stack per number."""
    source = []
    for level in range(levels):
        for branch in range(width):
            source.append(f"def level{level}_branch{branch}(path, allocate):")
            if level == levels - 1:
                source.append("    return allocate()")
            else:
                source.append(
                    f"    return LEVELS[{level + 1}][path % {width}](path // {width}, allocate)"
                )
    space: dict[str, object] = {}
    exec(compile("\n".join(source), "model.py", "exec"), space)  # noqa: S102 our own text, above
    table = [[space[f"level{i}_branch{j}"] for j in range(width)] for i in range(levels)]
    space["LEVELS"] = table
    return lambda path, allocate: table[0][path % width](path // width, allocate)  # type: ignore[operator]


_CASES = (train, streams, expandable, pools, leak, fragmented_oom, million_few, million_many)


def record(case: Callable[[], None], folder: Path) -> None:
    """Run one case with an empty allocator and write its snapshot."""
    _held.clear()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory._record_memory_history(stacks="python", context="all")
    case()
    snapshot = torch.cuda.memory._snapshot()
    _shorten_paths(snapshot)
    statistics = torch.cuda.memory_stats()
    torch.cuda.memory._record_memory_history(enabled=None)
    name = case.__name__
    with gzip.open(folder / f"{name}.pkl.gz", "wb", compresslevel=6) as file:
        pickle.dump(snapshot, file)
    facts = dict(_facts(statistics))
    facts["events"] = sum(map(len, snapshot["device_traces"]))
    (folder / f"{name}.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(name, facts["events"], "events", facts["peak"])


def _shorten_paths(snapshot: dict[str, Any]) -> None:
    """Remove the directories of this machine from file names. Call stacks share frames."""
    own = str(Path(__file__).resolve().parent.parent)
    packages = str(Path(torch.__file__).parent.parent)
    entries = [*itertools.chain.from_iterable(snapshot["device_traces"]), *snapshot["segments"]]
    entries += [block for segment in snapshot["segments"] for block in segment["blocks"]]
    for frame in {id(f): f for entry in entries for f in entry["frames"]}.values():
        name = frame["filename"].replace(own, "project")
        frame["filename"] = name.replace(packages, "python/site-packages")


def _facts(statistics: dict[str, int]) -> Iterator[tuple[str, object]]:
    yield "peak", {key: statistics[f"{key}.all.peak"] for key in _STATISTICS}
    yield "end", {key: statistics[f"{key}.all.current"] for key in _STATISTICS}
    yield "torch", torch.__version__
    yield "gpu", torch.cuda.get_device_name()
    yield "date", datetime.datetime.now(datetime.UTC).date().isoformat()


def main() -> None:
    """Record the given cases, or all."""
    folder = Path(sys.argv[1])
    wanted = set(sys.argv[2:]) or {case.__name__ for case in _CASES}
    torch.zeros(1, device="cuda")
    for case in _CASES:
        if case.__name__ in wanted:
            record(case, folder)


if __name__ == "__main__":
    main()
