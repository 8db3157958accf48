"""The public functions for memory snapshots: the results of ``cudakit memviz`` as objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from os import PathLike, fspath
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from cudakit.core.memory.result import DiffResult, MemoryResult
    from cudakit.core.memory.snapshot import Snapshot
    from cudakit.core.memory.whatif import WhatIfSpec
    from cudakit.core.memory.whatif.device import ReplayDevice
    from cudakit.core.memory.whatif.replay import ReplayAllocator
    from cudakit.core.memory.whatif.result import WhatIfResult
    from cudakit.torch_rules.settings import Settings

    Path = str | PathLike[str]


def load_snapshot(path: Path) -> Snapshot:
    """Read a memory snapshot into columns. Nothing in the file is executed.

    Raises SnapshotError if the file is not a memory snapshot.

    >>> snapshot = load_snapshot("examples/oom.pkl.gz")
    >>> len(snapshot.devices[0].events)
    7713
    """
    from cudakit.core.memory.load import load

    return load(fspath(path))


def memviz(
    *paths: Path,
    at: str | int = "peak",
    device: int | None = None,
    stream: int | None = None,
    pool: tuple[int, int] | None = None,
) -> MemoryResult:
    """Analyze memory snapshots: return the result that ``cudakit memviz --json`` prints.

    ``at`` is "peak", "end", "oom" or the index of an event; ``stream`` is the number in the report. Raises
    SnapshotError for a bad file, UsageError if no file has the device, stream, pool or event.

    >>> result = memviz("examples/oom.pkl.gz")
    >>> result.devices[0].peak.requested_bytes
    2790084608
    """
    from cudakit.core.memory.analyze import MemorySpec, analyze

    spec = MemorySpec(at=at, device=device, stream=stream, pool=pool)
    return analyze([load_snapshot(path) for path in paths], spec, new_allocator)


def memviz_diff(before: Path, after: Path) -> DiffResult:
    """Compare two memory snapshots: return the result of ``cudakit memviz AFTER --diff BEFORE --json``.

    >>> diff = memviz_diff("examples/train_python.pkl.gz", "examples/oom.pkl.gz")
    >>> diff.grew_beyond(0.05)
    True
    """
    from cudakit.core.memory.analyze import MemorySpec
    from cudakit.core.memory.analyze.diff import diff

    return diff(load_snapshot(before), load_snapshot(after), MemorySpec())


def memviz_what_if(
    path: Path, *settings: str, limit_bytes: int | None = None, device: int | None = None
) -> WhatIfResult:
    """Replay a trace with other settings: return the result of ``cudakit memviz --what-if SETTINGS --json``.

    Settings have the format of PYTORCH_CUDA_ALLOC_CONF; "" is the defaults. ``limit_bytes`` is the memory of
    the device; None: the limit of the recording, if memory ran out. Raises InputError for invalid settings,
    SnapshotError for a bad file or one without a trace, UsageError if the file lacks the device.

    >>> result = memviz_what_if("examples/train_python.pkl.gz", "expandable_segments:True")
    >>> result.devices[0].headline
    'expandable_segments:True would have reserved 20.0 MiB (3%) less at the peak'
    """
    from cudakit.core.memory.whatif import WhatIfSpec

    return replay_snapshots([load_snapshot(path)], WhatIfSpec(settings, limit_bytes, device))


def replay_snapshots(
    snapshots: Sequence[Snapshot],
    spec: WhatIfSpec,
    progress: Callable[[str, float], None] | None = None,
) -> WhatIfResult:
    """Return the result of a WhatIfSpec for loaded snapshots. Raises what ``memviz_what_if`` does."""
    from cudakit.core.memory.whatif import what_if

    return what_if(spec, snapshots, new_allocator, progress)


def new_allocator(device: ReplayDevice, settings: Settings, search_again: bool) -> ReplayAllocator:
    """Return the caching allocator for a replay by ``core.memory.whatif``."""
    from cudakit.core.allocator.allocator import CachingAllocator

    return CachingAllocator(device, settings, search_again=search_again)


def record_memory(
    path: Path = "cudakit-memory.pickle",
    *,
    max_entries: int = 200_000,
    stacks: Literal["python", "all"] = "python",
) -> AbstractContextManager[None]:
    """Record PyTorch's memory in a ``with`` block, for ``cudakit memviz``; also a decorator.

    The snapshot is written to ``path`` when the block ends, also after an exception. When memory first runs
    out in the block, another snapshot is written before the error is raised, to a name with ``-oom``, such as
    ``cudakit-memory-oom.pickle``. Existing files are replaced. The snapshot has the last ``max_entries``
    events of each device; with ``stacks`` "all" also C++ frames.

    Uses ``torch.cuda.memory._record_memory_history``, which has one state per process: do not nest blocks or
    call it in the block. Raises MissingDependency without PyTorch.

    >>> with cudakit.record_memory("step.pickle"):  # doctest: +SKIP
    ...     train_step()
    """
    from cudakit.gpu.capture.torch_memory import record

    return record(fspath(path), max_entries=max_entries, stacks=stacks)
