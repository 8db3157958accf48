"""Measure collective operations: check the ranks, connect them, run the pipeline, and add the bandwidths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from cudakit.bench.case import check_fit
from cudakit.bench.collectives.group import GroupTimer, RankGroup
from cudakit.bench.pipeline import Progress, no_progress, run
from cudakit.bench.result import (
    BenchResult,
    CaseResult,
    CollectiveRate,
    Collectives,
    RankFacts,
)
from cudakit.bench.workloads.nccl import NcclSpec, nccl_cases
from cudakit.errors import InputError, Unsupported
from cudakit.gpu.api import Gpu
from cudakit.gpu.api.facts import NOT_QUERIED, Link, NvmlView, RunContext
from cudakit.serialize import from_plain
from cudakit.units import Unavailable

_SINGLE_RANK = (
    "one rank: NCCL copies data within the GPU and uses no link, so there is no bus bandwidth; "
    "use two GPUs, or --gpu sim:h200x2 for simulated ones"
)


def measure_collectives(
    spec: NcclSpec,
    gpu: Gpu,
    group: RankGroup,
    progress: Progress = no_progress,
    *,
    run_context: RunContext | None = None,
    nvml: NvmlView | Unavailable = NOT_QUERIED,
    host: str = "127.0.0.1",
    variables: Sequence[Mapping[str, str]] = (),
) -> BenchResult:
    """Measure the cases of a Spec on the ranks of a group.

    ``gpu`` is the device of the first rank, ``nvml`` gives the links of this device. The other ranks reach
    the process of rank 0 at ``host``. ``variables`` are the NCCL variables of each rank. Raises
    CollectiveError if a rank fails before the first case is complete; later, the result has the complete
    cases and a warning.
    """
    ranks = [from_plain(RankFacts, facts) for facts in group.request("describe")]
    check_ranks(ranks, simulated=gpu.simulated)
    versions = {"nccl": group.connect("nccl", host)[0]}
    unsupported_baselines: dict[str, str] = {}  # Reason by library.
    for name in spec.baselines:
        try:
            versions[name] = group.connect(name, host)[0]
        except Unsupported as error:
            unsupported_baselines[name] = error.message
    host_count = len({rank.host for rank in ranks})
    links = _gpu_links(ranks, nvml)
    cases = nccl_cases(
        spec,
        group,
        versions,
        unsupported_baselines,
        simulated=gpu.simulated,
        host_count=host_count,
        uses_pcie=bool(links) and not any(path.startswith("NV") for path in links.values()),
    )
    run_context = run_context or RunContext()
    check_fit(
        cases,
        min(rank.free_bytes for rank in ranks),
        run_context.host.available_bytes,
        simulated=gpu.simulated,
        rank_count=sum(rank.host == ranks[0].host for rank in ranks),
    )
    result = run(
        spec,
        gpu,
        progress,
        run_context=run_context,
        cases=cases,
        open_timer=lambda device: GroupTimer(device, group),
    )
    collectives = Collectives(
        ranks=tuple(ranks),
        variables=dict(variables[0]) if variables else {},
        links=links,
        rates=tuple(map(_collective_rate, result.results)),
    )
    warnings = [*result.warnings, *_variable_warnings(variables)]
    if len(ranks) == 1:
        warnings.append(_SINGLE_RANK)
    return replace(result, warnings=tuple(warnings), collectives=collectives)


def check_ranks(ranks: Sequence[RankFacts], *, simulated: bool) -> None:
    """Raise InputError if ranks have different versions of NCCL, or share a device."""
    first_rank = ranks[0]
    for rank in ranks[1:]:
        if rank.nccl_version != first_rank.nccl_version:
            raise InputError(
                f"rank {ranks.index(rank)} on {rank.host} has NCCL {rank.nccl_version} "
                f"({rank.nccl_path}), rank 0 on {first_rank.host} has {first_rank.nccl_version} "
                f"({first_rank.nccl_path})",
                hint="install the same version on all hosts, or set CUDAKIT_NCCL_LIBRARY",
            )
    if simulated:
        return
    ranks_by_device: dict[tuple[str, str], int] = {}
    for rank_number, rank in enumerate(ranks):
        other_rank_number = ranks_by_device.setdefault((rank.host, rank.uuid), rank_number)
        if other_rank_number != rank_number and rank.uuid:
            raise InputError(
                f"ranks {other_rank_number} and {rank_number} on {rank.host} use the same GPU, {rank.uuid}",
                hint="start one rank per GPU: NCCL needs a GPU for each",
            )


def _gpu_links(ranks: Sequence[RankFacts], nvml: NvmlView | Unavailable) -> Mapping[str, str]:
    """Return the path between the GPUs of each pair of ranks on the first rank's host, as NVML names it."""
    if isinstance(nvml, Unavailable):
        return {}
    index_by_uuid = {device.uuid: device.index for device in nvml.devices}
    path_by_indices = {(link.first, link.second): _link_path(link) for link in nvml.links}
    link_by_ranks: dict[str, str] = {}
    local_ranks = [
        (rank_number, rank) for rank_number, rank in enumerate(ranks) if rank.host == ranks[0].host
    ]
    for position, (rank_number, rank) in enumerate(local_ranks):
        for other_rank_number, other_rank in local_ranks[position + 1 :]:
            indices = (index_by_uuid.get(rank.uuid, -1), index_by_uuid.get(other_rank.uuid, -1))
            if path := path_by_indices.get((min(indices), max(indices))):
                link_by_ranks[f"{rank_number}-{other_rank_number}"] = path
    return link_by_ranks


def _link_path(link: Link) -> str:
    return link.path if isinstance(link.path, str) else ""


def _collective_rate(case: CaseResult) -> CollectiveRate:
    """Return the bandwidths of a case as nccl-tests define them."""
    if case.bus_factor is None:
        reason = Unavailable("the case was not measured")
        return CollectiveRate(reason, reason, reason)
    return CollectiveRate(case.bus_factor, case.per_second(case.bytes_moved), case.bus_bandwidth)


def _variable_warnings(variables: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a warning for each NCCL variable that differs between ranks."""
    variable_names = sorted({name for rank_variables in variables for name in rank_variables})
    return [
        f"{name} differs between the ranks"
        for name in variable_names
        if len({rank_variables.get(name) for rank_variables in variables}) > 1
    ]
