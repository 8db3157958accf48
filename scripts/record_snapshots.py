"""Record memory snapshots with PyTorch on a GPU, each with the values of PyTorch's counters.

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
    """Use tensors on side streams (record_stream), so that frees are delayed."""
    rng = random.Random(1)
    side_streams = [torch.cuda.Stream() for _ in range(3)]
    tensors: list[torch.Tensor] = []
    for _ in range(400):
        tensor = torch.empty(rng.randrange(1, 6 * _MIB), dtype=torch.uint8, device="cuda")
        if rng.random() < 0.4:
            side_stream = rng.choice(side_streams)
            with torch.cuda.stream(side_stream):
                torch.cuda._sleep(200_000)
                tensor.add_(1)
            tensor.record_stream(side_stream)
        tensors.append(tensor)
        if len(tensors) > 24:
            tensors.pop(rng.randrange(len(tensors)))
    _keep(tensors)


def expandable() -> None:
    """Grow and shrink with expandable segments, so that ranges are mapped and unmapped."""
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    _churn(random.Random(2), events=900, live=40, largest=24 * _MIB, empty_cache_every=150)
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


def pools() -> None:
    """Capture a CUDA graph and use a MemPool, so that memory lies in private pools."""
    static = torch.zeros(4 * _MIB, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = (static * 2 + 1).relu()
    graph.replay()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        tensors = [torch.empty(3 * _MIB, dtype=torch.uint8, device="cuda") for _ in range(6)]
    del tensors[::2]
    _keep([graph, result, pool, tensors, static])


def leak() -> None:
    """Keep an additional tensor at each step of a loop without annotations."""
    results: list[torch.Tensor] = []
    weight = torch.randn(512, 512, device="cuda")
    for _ in range(12):
        hidden = torch.randn(256, 512, device="cuda") @ weight
        hidden = torch.relu(hidden) @ weight
        results.append(_retained_result(hidden))
        del hidden
    _keep(results)


def _retained_result(hidden: torch.Tensor) -> torch.Tensor:
    return hidden.sum(dim=1).repeat(2000)


def fragmented_oom() -> None:
    """Run out of memory although enough memory is free, because each free block is too small."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(2048 * _MIB / total)
    activations, statistics = [], []
    for _ in range(90):
        activations.append(torch.empty(9 * _MIB, dtype=torch.uint8, device="cuda"))
        statistics.append(torch.empty(2 * _MIB, dtype=torch.uint8, device="cuda"))
        activations.append(torch.empty(9 * _MIB, dtype=torch.uint8, device="cuda"))
    del activations
    with contextlib.suppress(torch.OutOfMemoryError):
        _failing_allocation()
    torch.cuda.set_per_process_memory_fraction(1.0)
    _keep(statistics)


def _failing_allocation() -> torch.Tensor:
    return torch.empty(700 * _MIB, dtype=torch.uint8, device="cuda")


def million_few() -> None:
    """Record a million events with a handful of call stacks on one stream."""
    _churn(random.Random(3), events=1_000_000, live=1_500, largest=4 * _MIB)


def million_many() -> None:
    """Record a million events with more than 5,000 call stacks on four streams, with delayed frees."""
    rng = random.Random(4)
    call = _call_paths(levels=4, width=9)
    side_streams = [torch.cuda.current_stream(), *(torch.cuda.Stream() for _ in range(3))]
    tensors: list[torch.Tensor] = []
    while _event_count < 1_000_000:
        stream = rng.choice(side_streams)
        with torch.cuda.stream(stream):
            tensor = call(rng.randrange(9**4), _allocation_of_random_size(rng, 4 * _MIB))
        if rng.random() < 0.05:
            side_stream = rng.choice(side_streams)
            with torch.cuda.stream(side_stream):
                tensor.add_(1)
            tensor.record_stream(side_stream)
        _count(1)
        tensors.append(tensor)
        if len(tensors) > 1_500:
            tensors.pop(rng.randrange(len(tensors)))
            _count(2)
    _keep(tensors)


_event_count = 0
_kept_objects: list[object] = []


def _count(events: int) -> None:
    global _event_count
    _event_count += events


def _keep(value: object) -> None:
    """Keep an object alive until the snapshot is written."""
    _kept_objects.append(value)


def _churn(
    rng: random.Random, *, events: int, live: int, largest: int, empty_cache_every: int = 0
) -> None:
    tensors: list[torch.Tensor] = []
    event_count = 0
    while event_count < events:
        tensors.append(_allocation_of_random_size(rng, largest)())
        event_count += 1
        if len(tensors) > live:
            tensors.pop(rng.randrange(len(tensors)))
            event_count += 2
        if empty_cache_every and event_count % empty_cache_every == 0:
            del tensors[: len(tensors) // 2]
            torch.cuda.empty_cache()
    _keep(tensors)


def _allocation_of_random_size(rng: random.Random, largest: int) -> Callable[[], torch.Tensor]:
    size = rng.randrange(1, largest) if rng.random() < 0.6 else rng.randrange(1, 64 << 10)
    return lambda: torch.empty(size, dtype=torch.uint8, device="cuda")


def _call_paths(
    *, levels: int, width: int
) -> Callable[[int, Callable[[], torch.Tensor]], torch.Tensor]:
    """Return a function that allocates with the call stack that a number selects, one of width**levels."""
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
    namespace: dict[str, object] = {}
    exec(compile("\n".join(source), "model.py", "exec"), namespace)  # noqa: S102 the source is built above
    table = [[namespace[f"level{i}_branch{j}"] for j in range(width)] for i in range(levels)]
    namespace["LEVELS"] = table
    return lambda path, allocate: table[0][path % width](path // width, allocate)  # type: ignore[operator]


_CASES = (train, streams, expandable, pools, leak, fragmented_oom, million_few, million_many)


def record(case: Callable[[], None], folder: Path) -> None:
    """Run a case with an empty allocator; write the snapshot and the values of the counters."""
    _kept_objects.clear()
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
    repository = str(Path(__file__).resolve().parent.parent)
    packages = str(Path(torch.__file__).parent.parent)
    items_with_frames = [
        *itertools.chain.from_iterable(snapshot["device_traces"]),
        *snapshot["segments"],
    ]
    items_with_frames += [block for segment in snapshot["segments"] for block in segment["blocks"]]
    for frame in {
        id(frame): frame for item in items_with_frames for frame in item["frames"]
    }.values():
        name = frame["filename"].replace(repository, "project")
        frame["filename"] = name.replace(packages, "python/site-packages")


def _facts(statistics: dict[str, int]) -> Iterator[tuple[str, object]]:
    yield "peak", {key: statistics[f"{key}.all.peak"] for key in _STATISTICS}
    yield "end", {key: statistics[f"{key}.all.current"] for key in _STATISTICS}
    yield "torch", torch.__version__
    yield "gpu", torch.cuda.get_device_name()
    yield "date", datetime.datetime.now(datetime.UTC).date().isoformat()


def main() -> None:
    """Record the cases that the command line names; without names, all cases."""
    folder = Path(sys.argv[1])
    selected = set(sys.argv[2:]) or {case.__name__ for case in _CASES}
    torch.zeros(1, device="cuda")
    for case in _CASES:
        if case.__name__ in selected:
            record(case, folder)


if __name__ == "__main__":
    main()
