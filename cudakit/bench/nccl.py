"""Benchmark of collective operations between GPUs, by NCCL and torch.distributed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import ClassVar, Literal

from cudakit.bench.case import Cache, Case, Mode, Verification, check_fit, verification
from cudakit.bench.labels import Axis, join_first_names
from cudakit.bench.nccl_ranks import GroupTimer, RankGroup
from cudakit.bench.pipeline import Progress, no_progress, run
from cudakit.bench.result import (
    BUS_FACTOR,
    BenchResult,
    CaseResult,
    CollectiveRate,
    Collectives,
    RankFacts,
)
from cudakit.bench.roofline import Work
from cudakit.bench.spec import (
    Spec,
    check_method,
    check_names,
    check_sizes,
    mode_option,
    option,
    sizes_option,
)
from cudakit.bench.words import Words
from cudakit.errors import InputError, Unsupported
from cudakit.gpu.api import Gpu, Stream
from cudakit.gpu.api.arrays import ELEMENTS, Element
from cudakit.gpu.api.collectives import OPERATIONS, Collective, bus_factor
from cudakit.gpu.api.facts import NOT_QUERIED, NvmlView, RunContext
from cudakit.report.document import Text, Value
from cudakit.serialize import from_plain
from cudakit.units import Unavailable

# Places of the buffers of a collective: in place, the send and receive buffers share memory.
PLACES = ("out-of-place", "in-place")
# Operations whose send and receive buffers cannot be the same memory.
_OUT_OF_PLACE_ONLY = ("all-to-all", "send-receive")
_BASELINES = ("torch",)

_SIZES_BYTES = (1 << 10, 32 << 10, 1 << 20, 32 << 20, 1 << 30)
_SIMULATED_SIZES_BYTES = (1 << 10, 16 << 10, 256 << 10)
# Chunks of at least this size are multiples of this size, as in nccl-tests: kernels access such units.
_CHUNK_UNIT_BYTES = 16
_WORD_BYTES = 4  # Outputs are compared as words of this size.
# Number of buffers of a library on one rank: send, receive and expected output.
_BUFFER_COUNT = 3
_SINGLE_RANK = (
    "one rank: NCCL copies data within the GPU and uses no link, so there is no bus bandwidth; "
    "use two GPUs, or --gpu sim:h200x2 for simulated ones"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclSpec(Spec):
    """Options of ``cudakit bench nccl``. ``measure_collectives`` makes the cases, which need the ranks."""

    bench: ClassVar[str] = "nccl"

    # GPUs settle sooner under collectives than under GEMMs, which draw more power.
    warmup_s: float = 0.1
    rounds: int = 2
    operations: tuple[str, ...] = option(
        "--operations",
        "Operations: all-reduce, all-gather, reduce-scatter, broadcast, reduce, all-to-all, "
        "send-receive.  [default: all]",
        default=OPERATIONS,
        choices=OPERATIONS,
        group="Operations",
    )
    # Sizes of the largest buffer of an operation. None: several sizes from 1 KiB on.
    sizes_bytes: tuple[int, ...] | None = sizes_option(
        "Bytes of the largest buffer of an operation", group="Operations"
    )
    dtypes: tuple[str, ...] = option(
        "--dtype",
        f"Data types: {', '.join(ELEMENTS)}.  [default: fp32]",
        default=("fp32",),
        choices=tuple(ELEMENTS),
        group="Operations",
    )
    places: tuple[str, ...] = option(
        "--places",
        "Buffers: out-of-place (separate send and receive buffers), in-place (one buffer; "
        "not for all-to-all and send-receive).  [default: both]",
        default=PLACES,
        choices=PLACES,
        group="Operations",
    )
    baselines: tuple[str, ...] = option(
        "--vs",
        "Baseline: torch, which is torch.distributed with its NCCL backend. Samples are interleaved.",
        default=(),
        metavar="NAME",
        choices=_BASELINES,
        group="Operations",
    )
    mode: Mode = mode_option("batch", default="batch", group="Method")
    cache: Cache = option(
        "--cache",
        "L2 state before each sample: rotate (cycle through buffers) or hot (operands cached).  "
        "[default: hot]",
        default="hot",
        kind="choice",
        metavar="STATE",
        choices=("rotate", "hot"),
        group="Method",
    )

    def __post_init__(self) -> None:
        Spec.__post_init__(self)
        check_names("operation", self.operations, OPERATIONS)
        check_names("place", self.places, PLACES)
        check_names("data type", self.dtypes, tuple(ELEMENTS))
        check_sizes(self.sizes_bytes, 1)
        check_method(self.mode, self.cache)
        if self.cache == "flush":
            raise InputError("collectives have no --cache flush", hint="use --cache rotate")
        for baseline in self.baselines:
            check_names("library", (baseline,), _BASELINES)


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
    links = _gpu_links(ranks, nvml)
    link: Literal["host", "peer", "network"] = "peer"
    if links and not any(path.startswith("NV") for path in links.values()):
        link = "host"
    if any(rank.host != ranks[0].host for rank in ranks):
        link = "network"
    cases: dict[tuple[object, ...], Case] = {}
    sizes_bytes = spec.sizes_bytes or (_SIMULATED_SIZES_BYTES if gpu.simulated else _SIZES_BYTES)
    for operation, dtype, place, size_bytes in product(
        spec.operations, spec.dtypes, spec.places, sizes_bytes
    ):
        if place == "in-place" and operation in _OUT_OF_PLACE_ONLY:
            continue
        collective = make_collective(operation, ELEMENTS[dtype], size_bytes, len(ranks))
        workload = CollectiveWorkload(group, collective, place, "nccl", versions["nccl"])
        work: Work | Unavailable  # The bytes over a rank's link: size times bus factor.
        if len(ranks) == 1:
            work = Unavailable("one rank sends no data over a link")
        elif link == "network":
            work = Unavailable("the bandwidth of the network between the hosts is unknown")
        else:
            work = Work(link_bytes=workload.size_bytes * workload.bus_factor, link=link)
        # Small sizes may round to the same size.
        cases.setdefault(
            tuple(workload.axes.values()),
            Case(
                workload,
                spec.method(spec.mode, spec.cache, fill="small integers"),
                work,
                size_bytes=workload.size_bytes,
                buffers=_BUFFER_COUNT * (1 + len(spec.baselines)),
                baselines=tuple(
                    replace(
                        workload,
                        library=name,
                        version=versions.get(name, ""),
                        reason_unsupported=unsupported_baselines.get(name, ""),
                    )
                    for name in spec.baselines
                ),
            ),
        )
    if not cases:
        raise Unsupported(f"{' and '.join(spec.operations)} cannot run in place")
    run_context = run_context or RunContext()
    check_fit(
        tuple(cases.values()),
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
        cases=tuple(cases.values()),
        open_timer=lambda device: GroupTimer(device, group),
    )
    collectives = Collectives(
        ranks=tuple(ranks),
        variables=dict(variables[0]) if variables else {},
        links=links,
        rates=tuple(
            CollectiveRate(*[Unavailable("the case was not measured")] * 3)
            if case.bus_factor is None
            else CollectiveRate(
                case.bus_factor, case.per_second(case.bytes_moved), case.bus_bandwidth
            )
            for case in result.results
        ),
    )
    differing_variables = [
        name
        for name in sorted({name for of_rank in variables for name in of_rank})
        if len({of_rank.get(name) for of_rank in variables}) > 1
    ]
    warnings = (
        *result.warnings,
        *(f"{name} differs between the ranks" for name in differing_variables),
        *([_SINGLE_RANK] if len(ranks) == 1 else []),
    )
    return replace(result, warnings=warnings, collectives=collectives)


def check_ranks(ranks: Sequence[RankFacts], *, simulated: bool) -> None:
    """Raise InputError if ranks have different versions of NCCL, or share a device."""
    first = ranks[0]
    for number, rank in enumerate(ranks):
        if rank.nccl_version != first.nccl_version:
            raise InputError(
                f"rank {number} on {rank.host} has NCCL {rank.nccl_version} ({rank.nccl_path}), "
                f"rank 0 on {first.host} has {first.nccl_version} ({first.nccl_path})",
                hint="install the same version on all hosts, or set CUDAKIT_NCCL_LIBRARY",
            )
    rank_by_device: dict[tuple[str, str], int] = {}
    for number, rank in enumerate(ranks):
        other = rank_by_device.setdefault((rank.host, rank.uuid), number)
        if other != number and rank.uuid and not simulated:
            raise InputError(
                f"ranks {other} and {number} on {rank.host} use the same GPU, {rank.uuid}",
                hint="start one rank per GPU: NCCL needs a GPU for each",
            )


def _gpu_links(ranks: Sequence[RankFacts], nvml: NvmlView | Unavailable) -> Mapping[str, str]:
    """Return the path between the GPUs of each pair of ranks on the first rank's host, as NVML names it."""
    if isinstance(nvml, Unavailable):
        return {}
    index_by_uuid = {device.uuid: device.index for device in nvml.devices}
    path_by_indices = {(link.first, link.second): link.path for link in nvml.links}
    local_ranks = [
        (number, index_by_uuid.get(rank.uuid, -1))
        for number, rank in enumerate(ranks)
        if rank.host == ranks[0].host
    ]
    links: dict[str, str] = {}
    for (number, index), (other_number, other_index) in combinations(local_ranks, 2):
        path = path_by_indices.get((min(index, other_index), max(index, other_index)))
        if isinstance(path, str) and path:
            links[f"{number}-{other_number}"] = path
    return links


def make_collective(
    operation: str, element: Element, size_bytes: int, rank_count: int
) -> Collective:
    """Return an operation whose largest buffer has at most ``size_bytes``, if that is possible.

    Chunks are multiples of 16 bytes, or of 4 bytes and one element if they are smaller.
    """
    chunk_bytes = size_bytes // _chunk_count(Collective(operation, element, 1), rank_count)
    small_unit_bytes = max(_WORD_BYTES, element.size_bytes)
    unit_bytes = _CHUNK_UNIT_BYTES if chunk_bytes >= _CHUNK_UNIT_BYTES else small_unit_bytes
    rounded_bytes = max(chunk_bytes // unit_bytes * unit_bytes, unit_bytes)
    return Collective(operation, element, rounded_bytes // element.size_bytes)


def _chunk_count(collective: Collective, rank_count: int) -> int:
    """Return the number of chunks of the largest buffer."""
    return max(collective.send_chunks(rank_count), collective.receive_chunks(rank_count))


@dataclass(frozen=True, slots=True)
class CollectiveWorkload:
    """A collective operation of all ranks by one library."""

    group: RankGroup
    collective: Collective
    place: str  # "in-place" or "out-of-place".
    library: str
    version: str  # Version of the library.
    reason_unsupported: str = ""  # Reason why the library cannot run; "" if it can.
    name: str = "nccl"

    @property
    def rank_count(self) -> int:
        return len(self.group.channels)

    @property
    def size_bytes(self) -> int:
        """Size of the largest buffer: the size S of the algorithm bandwidth S / time."""
        return _chunk_count(self.collective, self.rank_count) * self.collective.chunk_bytes

    @property
    def bus_factor(self) -> float:
        return bus_factor(self.collective.operation, self.rank_count)

    @property
    def axes(self) -> Mapping[str, Axis]:
        return {
            "operation": self.collective.operation,
            "dtype": self.collective.element.name,
            "place": self.place,
            "ranks": self.rank_count,
            "size_bytes": self.size_bytes,
        }

    def prepare(self, gpu: Gpu, seed: int) -> PreparedCollective:  # noqa: ARG002 ranks have own devices
        if self.reason_unsupported:
            raise Unsupported(self.reason_unsupported)
        return PreparedCollective(self, seed)


class PreparedCollective:
    """The buffers of a collective operation on all ranks."""

    operations = 0

    def __init__(self, workload: CollectiveWorkload, seed: int) -> None:
        self._group, collective = workload.group, workload.collective
        self.bytes_moved = workload.size_bytes
        self.footprint_bytes = collective.chunk_bytes * (
            collective.send_chunks(workload.rank_count)
            + collective.receive_chunks(workload.rank_count)
        )
        self.settings: Mapping[str, Axis] = {
            "library": workload.library,
            "version": workload.version,
            BUS_FACTOR: workload.bus_factor,
        }
        self._id: int | None = self._group.new_id()
        try:
            self._group.request(
                "prepare",
                operation_id=self._id,
                library=workload.library,
                collective=[collective.operation, collective.element.name, collective.count],
                in_place=workload.place == "in-place",
                seed=seed,
            )
            # The first execution connects the ranks, and finds out whether the library supports the
            # operation.
            self._group.enqueue(self._id, 0)
            self._group.execute_pending_work()
        except Unsupported:
            self.close()
            raise

    def rotate(self, set_count: int) -> None:
        self._group.request("rotate", operation_id=self._id, set_count=set_count)

    def enqueue(self, stream: Stream, set_index: int) -> None:  # noqa: ARG002 every rank has its own stream
        if self._id is not None:
            self._group.enqueue(self._id, set_index)

    def verify(self) -> Verification:
        self._group.execute_pending_work()
        counts_by_rank = self._group.request("verify", operation_id=self._id)
        wrong_count, word_count = map(sum, zip(*counts_by_rank, strict=True))
        detail = ""
        if wrong_count:
            wrong_ranks = [str(rank) for rank, (wrong, _) in enumerate(counts_by_rank) if wrong]
            detail = (
                f"{wrong_count} of {word_count} words are wrong, on rank {', '.join(wrong_ranks)}"
            )
        reference = "a host computation, all words"
        return verification(wrong_count / max(word_count, 1), 0.0, reference, detail)

    def close(self) -> None:
        operation_id, self._id = self._id, None
        if operation_id is not None and not self._group.failure:
            self._group.take_pending_work()
            self._group.request("release", operation_id=operation_id)


# --- the report ---------------------------------------------------------------------------------------


def _rank_rows(result: BenchResult) -> list[tuple[str, Value]]:
    """Return the GPUs of the ranks, the links between them, and the NCCL variables that are set."""
    collectives = result.collectives
    if collectives is None:
        return []
    ranks = [f"{i}: {rank.host} GPU {rank.device}" for i, rank in enumerate(collectives.ranks)]
    links = [f"{pair} {path}" for pair, path in collectives.links.items()]
    variables = [f"{name}={text}" for name, text in collectives.variables.items()]
    rows: list[tuple[str, Value]] = [("ranks", Text(join_first_names(ranks, 8)))]
    rows += [("links", Text(join_first_names(links, 8)))] if links else []
    rows += [("environment", Text(", ".join(variables)))] if variables else []
    return rows


def _explain_bandwidths(cases: Sequence[CaseResult]) -> str:
    if all(case.bus_factor is None for case in cases):
        return ""
    return (
        "Algbw: size divided by time. Busbw: algbw times the factor of nccl-tests, comparable with "
        "the peak of a GPU's links in one direction."
    )


NcclSpec.words = Words(peak=_explain_bandwidths, facts=_rank_rows)
