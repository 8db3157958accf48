"""Sum the collectives of NCCL, with their rates; find the rank that the others wait for.

NCCL 2.28 and newer reports the size of each operation to its profiler plugin, which is the recorder. The
kernels of a CUDA graph, and the kernels of older versions, have no size. Rates are those of nccl-tests
(https://github.com/NVIDIA/nccl-tests, PERFORMANCE.md): the algorithm bandwidth is the size of an
operation divided by its time. The bus bandwidth is the algorithm bandwidth times a factor, which depends
on the operation and on the number of ranks; it is comparable with the rate of the links.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cudakit.profile.idle import IntervalSet, Ints, Mask, Times
from cudakit.profile.result import Collective, Straggler
from cudakit.profile.tables import WorkTable, groups
from cudakit.profile.timeline import Timeline, WorkKind
from cudakit.trace.kinds import ELEMENT_BYTES, CollectiveFunction, EventKind, NcclDatatype

# Functions whose element count is that of one rank; their size is the sum over all ranks.
_FUNCTIONS_COUNTED_BY_RANK = (CollectiveFunction.ALL_GATHER, CollectiveFunction.REDUCE_SCATTER)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The sizes of the operations of each collective kernel; 0 bytes if NCCL did not report them."""

    size_bytes: Ints  # summed size of the operations that the kernel performs
    bus_bytes: Ints  # sum of the sizes times the bus bandwidth factors of the operations
    rank_count: Ints  # number of ranks of the communicator


def is_collective_kernel(table: WorkTable, positions: Ints) -> Mask:
    """Return a mask of the kernels that are collectives: NCCL names them ncclDevKernel_* or ncclKernel_*."""
    names = table.timeline.names
    name = table.timeline.work.name[table.rows[positions]]
    distinct_names, distinct_indices = np.unique(name, return_inverse=True)
    is_nccl = np.array(
        [names[name_index].startswith(("ncclDev", "ncclKernel")) for name_index in distinct_names],
        bool,
    )
    result: Mask = is_nccl[distinct_indices] if len(distinct_names) else np.empty(0, bool)
    return result


def collectives(
    table: WorkTable, positions: Ints, compute_time: IntervalSet
) -> tuple[Collective, ...]:
    """Return the collectives by kernel and size; ``positions`` has all collective kernels."""
    kernel_sizes = _sizes_of_kernels(table, positions)
    name = table.timeline.work.name[table.rows[positions]]
    size_keys = np.stack([name, kernel_sizes.size_bytes, kernel_sizes.rank_count], axis=1)
    _, key_numbers = np.unique(size_keys, axis=0, return_inverse=True)
    collective_rows = []
    for _, index in groups(key_numbers.reshape(-1)):
        kernel_positions = positions[index]
        overlapped_ns = compute_time.covered_within(
            table.start_ns[kernel_positions], table.end_ns[kernel_positions]
        )
        stack, site = table.stack(kernel_positions)
        total_ns = int(table.duration_ns[kernel_positions].sum())
        size_bytes, bus_bytes = (
            int(kernel_sizes.size_bytes[index[0]]),
            float(kernel_sizes.bus_bytes[index].sum()),
        )
        has_rate = size_bytes > 0 and total_ns > 0
        collective_rows.append(
            Collective(
                name=table.demangle(table.timeline.names[name[index[0]]]),
                calls=len(kernel_positions),
                total_ns=total_ns,
                overlapped_ns=int(overlapped_ns.sum()),
                stack=stack,
                site=site,
                ranks=int(kernel_sizes.rank_count[index[0]]) or None,
                size_bytes=size_bytes or None,
                algorithm_bytes_per_s=(
                    size_bytes * len(kernel_positions) / total_ns * 1e9 if has_rate else None
                ),
                bus_bytes_per_s=bus_bytes / total_ns * 1e9 if has_rate else None,
            )
        )
    return tuple(sorted(collective_rows, key=lambda row: -row.total_ns))


def _sizes_of_kernels(table: WorkTable, positions: Ints) -> _Sizes:
    """Return the sizes of kernels by the calls that launched them; kernels of graphs have no size."""
    sizes_by_correlation = _operations_by_correlation(table.timeline)
    work, rows = table.timeline.work, table.rows[positions]
    correlations = np.where(work.graph_node[rows] == 0, work.correlation[rows], 0)
    no_size = (0, 0.0, 0)
    sizes = [
        sizes_by_correlation.get(correlation, no_size) for correlation in correlations.tolist()
    ]
    return _Sizes(
        np.array([size_bytes for size_bytes, _, _ in sizes], np.int64),
        np.array([bus_bytes for _, bus_bytes, _ in sizes], np.float64),
        np.array([rank_count for _, _, rank_count in sizes], np.int64),
    )


def _operations_by_correlation(timeline: Timeline) -> dict[int, tuple[int, float, int]]:
    """Return by correlation the size, the size times the bus factor, and the number of ranks of operations.

    A call launches several operations if the program groups them. Calls with an operation of unknown size
    have no entry.
    """
    activities = timeline.activities
    calls, operations = (
        activities.records_of(EventKind.API_CALL),
        activities.records_of(EventKind.COLLECTIVE),
    )
    is_launch = np.isin(calls["seq"], operations["seq"])
    launches = calls[is_launch]
    correlation_of_call = dict(
        zip(launches["seq"].tolist(), launches["correlation"].tolist(), strict=True)
    )
    rank_counts = _rank_counts(timeline)
    sizes_by_correlation: dict[int, tuple[int, float, int]] = {}
    calls_without_size = set()
    field_names = ("seq", "function", "datatype", "element_count", "communicator")
    for seq, function, datatype, element_count, communicator in zip(
        *(operations[column].tolist() for column in field_names), strict=True
    ):
        correlation = correlation_of_call.get(seq, 0)
        rank_count = rank_counts.get(communicator, 0)
        size_bytes = _size_bytes(
            CollectiveFunction(function), NcclDatatype(datatype), element_count, rank_count
        )
        if not size_bytes or not correlation:
            calls_without_size.add(correlation)
            continue
        bus_bytes = size_bytes * _bus_factor(CollectiveFunction(function), rank_count)
        previous_size_bytes, previous_bus_bytes, _ = sizes_by_correlation.get(
            correlation, (0, 0.0, 0)
        )
        sizes_by_correlation[correlation] = (
            previous_size_bytes + size_bytes,
            previous_bus_bytes + bus_bytes,
            rank_count,
        )
    return {
        correlation_number: size_bytes
        for correlation_number, size_bytes in sizes_by_correlation.items()
        if correlation_number not in calls_without_size
    }


def _rank_counts(timeline: Timeline) -> dict[int, int]:
    """Return the number of ranks of each communicator for which NCCL reports the number."""
    records = timeline.activities.records_of(EventKind.COMMUNICATOR)
    number_and_count = zip(
        records["communicator"].tolist(), records["rank_count"].tolist(), strict=True
    )
    return {communicator: rank_count for communicator, rank_count in number_and_count if rank_count}


def _size_bytes(
    function: CollectiveFunction, datatype: NcclDatatype, element_count: int, rank_count: int
) -> int:
    """Return the size of an operation as nccl-tests count it; 0 if it is unknown."""
    is_unknown = function is CollectiveFunction.UNKNOWN or datatype is NcclDatatype.UNKNOWN
    if is_unknown or not rank_count:
        return 0
    size_bytes = element_count * ELEMENT_BYTES[datatype]
    return size_bytes * rank_count if function in _FUNCTIONS_COUNTED_BY_RANK else size_bytes


def _bus_factor(function: CollectiveFunction, rank_count: int) -> float:
    if function is CollectiveFunction.ALL_REDUCE:
        return 2 * (rank_count - 1) / rank_count
    if function in _FUNCTIONS_COUNTED_BY_RANK:
        return (rank_count - 1) / rank_count
    return 1.0


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
