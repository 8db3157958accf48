"""Match the collectives of all ranks by their order, to find the rank that the others wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cudakit.profile.intervals import Times
from cudakit.profile.result import Straggler
from cudakit.profile.timeline import Timeline, WorkKind


def match_collectives(
    timelines: Sequence[Timeline], measured_times: Mapping[tuple[int, int], tuple[int, int]]
) -> Straggler | None:
    """Return the rank that the other ranks waited for; None if the ranks ran different collectives.

    ``measured_times`` has for each process and device the start and the end of the measured time, in
    nanoseconds; other collectives are not counted.

    A rank is one device of one process. A collective begins on a rank when its kernel starts, and cannot
    complete before it has begun on all ranks, so that all ranks wait for the last one. The times of all
    processes are on the same clock, because the processes run on one machine.
    """
    ranks = [
        (process_timeline.process, device, _collective_starts(process_timeline, device))
        for process_timeline in timelines
        for device in np.unique(process_timeline.work.device).tolist()
    ]
    ranks = [rank_starts for rank_starts in ranks if rank_starts[2]]
    if len(ranks) < 2:
        return None
    counts_by_rank = [
        {name: len(starts) for name, starts in starts_by_name.items()}
        for _, _, starts_by_name in ranks
    ]
    if any(collective_count != counts_by_rank[0] for collective_count in counts_by_rank):
        return None
    start_times = np.concatenate(
        [
            np.stack([starts_by_name[name] for _, _, starts_by_name in ranks])
            for name in counts_by_rank[0]
        ],
        axis=1,
    )
    begin_times, end_times = np.array(
        [measured_times[process, device] for process, device, _ in ranks]
    ).T[:, :, np.newaxis]
    is_measured = ((begin_times <= start_times) & (start_times <= end_times)).all(axis=0)
    start_times = start_times[:, is_measured]
    if not start_times.shape[1]:
        return None
    last_ranks = start_times.argmax(axis=0)
    waited_ns = (start_times.max(axis=0) - start_times).sum(axis=0)
    last_counts = np.bincount(last_ranks, minlength=len(ranks))
    straggler_index = int(last_counts.argmax())
    process, device, _ = ranks[straggler_index]
    return Straggler(
        matched=start_times.shape[1],
        process=process,
        device=device,
        last_count=int(last_counts[straggler_index]),
        waited_ns=int(waited_ns[last_ranks == straggler_index].sum()),
    )


def _collective_starts(timeline: Timeline, device: int) -> dict[str, Times]:
    """Return the start times of the NCCL kernels of a device by name, sorted."""
    work = timeline.work
    rows = np.flatnonzero((work.device == device) & (work.kind == WorkKind.KERNEL))
    names, index = np.unique(work.name[rows], return_inverse=True)
    return {
        timeline.names[name]: work.start_ns[rows[index == name_index]]
        for name_index, name in enumerate(names.tolist())
        if timeline.names[name].startswith(("ncclDev", "ncclKernel"))
    }
