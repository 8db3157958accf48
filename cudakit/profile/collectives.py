"""Sum the collectives of NCCL, with their rates; find the rank that the others wait for.

NCCL 2.28 and newer reports the size of each operation to its profiler plugin, which is the recorder. The
kernels of a CUDA graph, and the kernels of older versions, have no size. Rates are those of nccl-tests
(https://github.com/NVIDIA/nccl-tests, PERFORMANCE.md): the algorithm bandwidth is the size of an
operation divided by its time. The bus bandwidth is the algorithm bandwidth times a factor, which depends
on the operation and on the number of ranks; it is comparable with the rate of the links.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from cudakit.profile.idle import IntervalSet
from cudakit.profile.result import Collective, Straggler
from cudakit.profile.tables import WorkTable, groups
from cudakit.profile.timeline import Column, Timeline, WorkKind
from cudakit.trace.kinds import ELEMENT_BYTES, CollectiveFunction, EventKind, NcclDatatype


def is_collective(timeline: Timeline, name: int) -> bool:
    """Return whether a kernel is a collective: NCCL names them ncclDevKernel_* or ncclKernel_*."""
    return timeline.names[name].startswith(("ncclDev", "ncclKernel"))


def collectives(
    table: WorkTable, collective_rows: Column, compute_time: IntervalSet
) -> tuple[Collective, ...]:
    """Return the collectives by kernel and size; ``collective_rows`` has all collective kernels."""
    work = table.work
    sizes_by_correlation = _operations_by_correlation(table.timeline)
    # The correlation of a graph's kernel is that of the graph, so the kernel has no size.
    correlations = np.where(work.graph_node == 0, work.correlation, 0)[collective_rows].tolist()
    # Size, size times the bus factor, and number of ranks; 0 if NCCL did not report them.
    sizes = [sizes_by_correlation.get(correlation, (0, 0.0, 0)) for correlation in correlations]
    names = work.name[collective_rows].tolist()
    positions: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
    for position, (name, (size_bytes, _, ranks)) in enumerate(zip(names, sizes, strict=True)):
        positions[name, size_bytes, ranks].append(position)
    result = []
    for (name, size_bytes, ranks), index in sorted(positions.items()):
        rows = collective_rows[index]
        stack, site = table.stack(rows)
        total_ns = int(table.duration_ns[rows].sum())
        overlapped_ns = compute_time.covered_within(work.start_ns[rows], work.end_ns[rows])
        bus_bytes = sum(sizes[position][1] for position in index)
        has_rate = size_bytes > 0 and total_ns > 0
        result.append(
            Collective(
                name=table.demangle(table.timeline.names[name]),
                calls=len(rows),
                total_ns=total_ns,
                overlapped_ns=int(overlapped_ns.sum()),
                stack=stack,
                site=site,
                ranks=ranks or None,
                size_bytes=size_bytes or None,
                algorithm_bytes_per_s=size_bytes * len(rows) / total_ns * 1e9 if has_rate else None,
                bus_bytes_per_s=bus_bytes / total_ns * 1e9 if has_rate else None,
            )
        )
    return tuple(sorted(result, key=lambda row: -row.total_ns))


def _operations_by_correlation(timeline: Timeline) -> dict[int, tuple[int, float, int]]:
    """Return by correlation the size, the size times the bus factor, and the number of ranks of operations.

    A call launches several operations if the program groups them. Calls with an operation of unknown size
    have no entry.
    """
    records = timeline.activities.records
    operations, communicators = records[EventKind.COLLECTIVE], records[EventKind.COMMUNICATOR]
    launches = records[EventKind.API_CALL]
    launches = launches[np.isin(launches["seq"], operations["seq"])]
    correlation_of_call = dict(
        zip(launches["seq"].tolist(), launches["correlation"].tolist(), strict=True)
    )
    # NCCL does not report the number of ranks of every communicator.
    rank_counts = {
        communicator: ranks
        for communicator, ranks in communicators[["communicator", "rank_count"]].tolist()
        if ranks
    }
    sizes: dict[int, tuple[int, float, int]] = {}
    without_size = set()
    fields = ["seq", "function", "datatype", "element_count", "communicator"]
    for seq, function, datatype, elements, communicator in operations[fields].tolist():
        correlation = correlation_of_call.get(seq, 0)
        ranks = rank_counts.get(communicator, 0)
        size_bytes, bus_bytes = _sizes(
            CollectiveFunction(function), NcclDatatype(datatype), elements, ranks
        )
        if not size_bytes or not correlation:
            without_size.add(correlation)
            continue
        earlier_bytes, earlier_bus_bytes, _ = sizes.get(correlation, (0, 0.0, 0))
        sizes[correlation] = earlier_bytes + size_bytes, earlier_bus_bytes + bus_bytes, ranks
    return {number: size for number, size in sizes.items() if number not in without_size}


def _sizes(
    function: CollectiveFunction, datatype: NcclDatatype, elements: int, ranks: int
) -> tuple[int, float]:
    """Return the size of an operation as nccl-tests count it, and times its bus factor; 0 if unknown."""
    if function is CollectiveFunction.UNKNOWN or datatype is NcclDatatype.UNKNOWN or not ranks:
        return 0, 0.0
    size_bytes = elements * ELEMENT_BYTES[datatype]
    # The element count of these functions is that of one rank; their size is the sum over all ranks.
    if function in (CollectiveFunction.ALL_GATHER, CollectiveFunction.REDUCE_SCATTER):
        return size_bytes * ranks, size_bytes * (ranks - 1)
    if function is CollectiveFunction.ALL_REDUCE:
        return size_bytes, size_bytes * 2 * (ranks - 1) / ranks
    return size_bytes, size_bytes


# --- the rank that the others wait for -------------------------------------------------------------


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
        (timeline.process, device, starts)
        for timeline in timelines
        for device in np.unique(timeline.work.device).tolist()
        if (starts := _collective_starts(timeline, device))
    ]
    if len(ranks) < 2:
        return None
    counts = [{name: len(starts[name]) for name in starts} for _, _, starts in ranks]
    if any(of_rank != counts[0] for of_rank in counts):
        return None
    # A row for each rank, a column for each collective.
    start_ns = np.concatenate(
        [np.stack([starts[name] for _, _, starts in ranks]) for name in counts[0]], axis=1
    )
    measured = np.array([measured_times[process, device] for process, device, _ in ranks])
    begin_ns, end_ns = measured.T[:, :, np.newaxis]
    start_ns = start_ns[:, ((begin_ns <= start_ns) & (start_ns <= end_ns)).all(axis=0)]
    if not start_ns.shape[1]:
        return None
    last_rank = start_ns.argmax(axis=0)
    waited_ns = (start_ns.max(axis=0) - start_ns).sum(axis=0)
    last_counts = np.bincount(last_rank, minlength=len(ranks))
    straggler = int(last_counts.argmax())
    process, device, _ = ranks[straggler]
    return Straggler(
        matched=start_ns.shape[1],
        process=process,
        device=device,
        last_count=int(last_counts[straggler]),
        waited_ns=int(waited_ns[last_rank == straggler].sum()),
    )


def _collective_starts(timeline: Timeline, device: int) -> dict[str, Column]:
    """Return the start times of the NCCL kernels of a device by name, sorted."""
    work = timeline.work
    rows = np.flatnonzero((work.device == device) & (work.kind == WorkKind.KERNEL))
    return {
        timeline.names[name]: work.start_ns[rows[index]]
        for name, index in groups(work.name[rows])
        if is_collective(timeline, name)
    }
