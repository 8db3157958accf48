"""The public functions for memory snapshots: the results of ``cudakit memviz`` as objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike, fspath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cudakit.memory.result import DiffResult, MemoryResult, WhatIfResult
    from cudakit.memory.snapshot import Snapshot
    from cudakit.memory.whatif import WhatIfSpec
    from cudakit.memory.whatif.replay import ReplayAllocator, ReplayDevice
    from cudakit.torch_rules.settings import Settings

    Path = str | PathLike[str]


def load_snapshot(path: Path) -> Snapshot:
    """Read a memory snapshot into columns. Nothing in the file is executed.

    Raises SnapshotError if the file is not a memory snapshot, or needs more time or memory than a snapshot of
    its size can.

    >>> snapshot = cudakit.load_snapshot("examples/memory/kv_cache.pkl.gz")
    >>> len(snapshot.devices[0].events)
    5665
    """
    from cudakit.gpu.host import available_host_memory
    from cudakit.memory.load import load

    return load(fspath(path), available_host_memory())


def memviz(
    *paths: Path,
    at: str | int = "peak",
    device: int | str | None = None,
    stream: int | None = None,
    pool: tuple[int, int] | str | None = None,
) -> MemoryResult:
    """Analyze memory snapshots: return the result that ``cudakit memviz --json`` prints.

    ``at`` is "peak", "end", "oom" or the index of an event. ``device`` is 0, "cuda:0" or "host", ``stream`` a
    number in the report, and ``pool`` a name in the report, such as "default", or its two numbers. Raises
    SnapshotError for a bad file, UsageError if no file has the device, stream, pool or event.

    >>> result = cudakit.memviz("examples/memory/kv_cache.pkl.gz")
    >>> result.devices[0].peak.requested_bytes
    146447695872
    """
    from cudakit.memory.analyze import analyze
    from cudakit.memory.selection import (
        MemorySpec,
        parse_device,
        parse_moment,
        parse_pool,
        parse_stream,
    )

    spec = MemorySpec(
        at=parse_moment(at),
        device=None if device is None else parse_device(device),
        stream=None if stream is None else parse_stream(stream),
        pool=None if pool is None else parse_pool(pool),
    )
    return analyze([load_snapshot(path) for path in paths], spec, new_allocator)


def memviz_diff(before: Path, after: Path) -> DiffResult:
    """Compare two memory snapshots: return the result of ``cudakit memviz AFTER --diff BEFORE --json``.

    >>> before = "examples/memory/retained_graph_fixed.pkl.gz"
    >>> diff = cudakit.memviz_diff(before, "examples/memory/retained_graph.pkl.gz")
    >>> diff.grew_beyond(0.05)
    True
    """
    from cudakit.memory.analyze import diff
    from cudakit.memory.selection import MemorySpec

    return diff(load_snapshot(before), load_snapshot(after), MemorySpec())


def memviz_what_if(
    path: Path, *settings: str, limit_bytes: int | None = None, device: int | None = None
) -> WhatIfResult:
    """Replay a trace with other settings: return the result of ``cudakit memviz --what-if SETTINGS --json``.

    Settings have the format of PYTORCH_CUDA_ALLOC_CONF; "" stands for the default settings. ``limit_bytes``
    is the memory of the device; if it is None, and memory ran out in the recording, the limit of the
    recording applies. Raises InputError for invalid settings, SnapshotError for a bad file or a file without
    a trace, UsageError if the file lacks the device.

    >>> path = "examples/memory/varying_lengths.pkl.gz"
    >>> result = cudakit.memviz_what_if(path, "expandable_segments:True")
    >>> result.devices[0].headline
    'expandable_segments:True would have let the failed request succeed, with 130 GiB reserved at the peak'
    """
    from cudakit.memory.whatif import WhatIfSpec

    return replay_snapshots([load_snapshot(path)], WhatIfSpec(settings, limit_bytes, device))


def replay_snapshots(
    snapshots: Sequence[Snapshot],
    spec: WhatIfSpec,
    progress: Callable[[str, float], None] | None = None,
) -> WhatIfResult:
    """Return the result of a WhatIfSpec for loaded snapshots. Raises the errors of ``memviz_what_if``."""
    from cudakit.memory.whatif import what_if

    return what_if(spec, snapshots, new_allocator, progress)


def new_allocator(device: ReplayDevice, settings: Settings, search_again: bool) -> ReplayAllocator:
    """Return the caching allocator for a replay by ``memory.whatif``."""
    from cudakit.allocator.allocator import DeviceCachingAllocator

    return DeviceCachingAllocator(device, settings, search_again=search_again)
