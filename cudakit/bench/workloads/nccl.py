"""Benchmark of collective operations between GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import ClassVar

from cudakit.bench.case import Cache, Case, Mode, Verification, verification
from cudakit.bench.collectives.group import RankGroup
from cudakit.bench.labels import Axis
from cudakit.bench.result import BUS_FACTOR
from cudakit.bench.roofline import Work
from cudakit.bench.spec import Spec, check_method, check_names, check_sizes
from cudakit.errors import InputError, Unsupported
from cudakit.gpu.api import Gpu, Stream
from cudakit.gpu.api.arrays import ELEMENTS, Element
from cudakit.gpu.api.collectives import OPERATIONS, Collective, bus_factor
from cudakit.units import Unavailable

# Places of the buffers of a collective: in place, the send and receive buffers share memory.
PLACES = ("out-of-place", "in-place")
# Libraries that bench nccl measures beside NCCL.
COLLECTIVE_BASELINES = ("torch",)
# GPUs settle sooner under collectives than under GEMMs, which draw more power.
_WARMUP_S = 0.1
_SIZES_BYTES = (1 << 10, 32 << 10, 1 << 20, 32 << 20, 1 << 30)
_SIMULATED_SIZES_BYTES = (1 << 10, 16 << 10, 256 << 10)
# Chunks of at least this size are multiples of this size, as in nccl-tests: kernels access such units.
_CHUNK_UNIT_BYTES = 16
_WORD_BYTES = 4  # Outputs are compared as words of this size.
# Operations whose send and receive buffers cannot be the same memory.
_OUT_OF_PLACE_ONLY = ("all-to-all", "send-receive")
# Number of buffers of a library on one rank: send, receive and expected output.
_BUFFER_COUNT = 3
_REFERENCE = "a host computation, all words"


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclSpec(Spec):
    """Options of ``cudakit bench nccl``."""

    bench: ClassVar[str] = "nccl"

    warmup_s: float = _WARMUP_S
    rounds: int = 2
    operations: tuple[str, ...] = OPERATIONS
    # Sizes of the largest buffer of an operation. None: several sizes from 1 KiB on.
    sizes_bytes: tuple[int, ...] | None = None
    dtypes: tuple[str, ...] = ("fp32",)
    places: tuple[str, ...] = PLACES
    mode: Mode = "batch"
    cache: Cache = "hot"
    baselines: tuple[str, ...] = ()

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
            check_names("library", (baseline,), COLLECTIVE_BASELINES)


def nccl_cases(
    spec: NcclSpec,
    group: RankGroup,
    versions: Mapping[str, str],
    unsupported_baselines: Mapping[str, str] = MappingProxyType({}),
    *,
    simulated: bool,
    host_count: int = 1,
    uses_pcie: bool = False,
) -> tuple[Case, ...]:
    """Return a case per operation, data type, place (in-place or out-of-place) and size.

    ``versions`` are those of the libraries, ``unsupported_baselines`` the reasons why baselines cannot run.
    ``uses_pcie``: no two of the GPUs have an NVLink.
    Raises Unsupported if no operation can run in the given places.
    """
    rank_count = len(group.channels)
    case_by_key: dict[tuple[object, ...], Case] = {}
    for operation, dtype, place, size_bytes in _combinations(spec, simulated=simulated):
        collective = make_collective(operation, ELEMENTS[dtype], size_bytes, rank_count)
        workload = CollectiveWorkload(group, collective, place, "nccl", versions["nccl"])
        work = _make_work(workload, host_count, uses_pcie=uses_pcie)
        # Small sizes may round to the same size.
        case_by_key.setdefault(
            tuple(workload.axes.values()),
            _case(spec, workload, versions, unsupported_baselines, work),
        )
    if not case_by_key:
        raise Unsupported(f"{' and '.join(spec.operations)} cannot run in place")
    return tuple(case_by_key.values())


def make_collective(
    operation: str, element: Element, size_bytes: int, rank_count: int
) -> Collective:
    """Return an operation whose largest buffer has at most ``size_bytes``, if that is possible.

    Chunks are multiples of 16 bytes, or of 4 bytes and one element if they are smaller.
    """
    smallest_collective = Collective(operation, element, 1)
    chunk_count = max(
        smallest_collective.send_chunks(rank_count),
        smallest_collective.receive_chunks(rank_count),
    )
    chunk_bytes = size_bytes // chunk_count
    small_unit_bytes = max(_WORD_BYTES, element.size_bytes)
    unit_bytes = _CHUNK_UNIT_BYTES if chunk_bytes >= _CHUNK_UNIT_BYTES else small_unit_bytes
    rounded_bytes = max(chunk_bytes // unit_bytes * unit_bytes, unit_bytes)
    return Collective(operation, element, rounded_bytes // element.size_bytes)


def _combinations(spec: NcclSpec, *, simulated: bool) -> Iterator[tuple[str, str, str, int]]:
    default_sizes = _SIMULATED_SIZES_BYTES if simulated else _SIZES_BYTES
    return (
        (operation, dtype, place, size_bytes)
        for operation in spec.operations
        for dtype in spec.dtypes
        for place in spec.places
        for size_bytes in spec.sizes_bytes or default_sizes
        if place != "in-place" or operation not in _OUT_OF_PLACE_ONLY
    )


def _case(
    spec: NcclSpec,
    workload: CollectiveWorkload,
    versions: Mapping[str, str],
    unsupported_baselines: Mapping[str, str],
    work: Work | Unavailable,
) -> Case:
    return Case(
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
    )


def _make_work(
    workload: CollectiveWorkload, host_count: int, *, uses_pcie: bool
) -> Work | Unavailable:
    """Return the work of an operation: the bytes over a rank's link (size times bus factor)."""
    if workload.rank_count == 1:
        return Unavailable("one rank sends no data over a link")
    if host_count > 1:
        return Unavailable("the bandwidth of the network between the hosts is unknown")
    factor = bus_factor(workload.collective.operation, workload.rank_count)
    return Work(link_bytes=workload.size_bytes * factor, link="host" if uses_pcie else "peer")


@dataclass(frozen=True, slots=True)
class CollectiveWorkload:
    """A collective operation of all ranks by one library."""

    group: RankGroup
    collective: Collective
    place: str  # "in-place" or "out-of-place".
    library: str
    version: str  # Version of the library.
    reason_unsupported: str = ""  # Reason why the library cannot run; "" if it can.
    name: str = field(default="nccl")

    @property
    def rank_count(self) -> int:
        """Number of ranks."""
        return len(self.group.channels)

    @property
    def size_bytes(self) -> int:
        """Size of the largest buffer: the size S of the algorithm bandwidth S / time."""
        collective, rank_count = self.collective, self.rank_count
        chunk_count = max(collective.send_chunks(rank_count), collective.receive_chunks(rank_count))
        return chunk_count * collective.chunk_bytes

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
            BUS_FACTOR: bus_factor(collective.operation, workload.rank_count),
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
        wrong_count, word_count = (
            sum(counts_of_ranks) for counts_of_ranks in zip(*counts_by_rank, strict=True)
        )
        detail = ""
        if wrong_count:
            wrong_rank_text = ", ".join(
                str(rank) for rank, (wrong_counts, _) in enumerate(counts_by_rank) if wrong_counts
            )
            detail = f"{wrong_count} of {word_count} words are wrong, on rank {wrong_rank_text}"
        return verification(wrong_count / max(word_count, 1), 0.0, _REFERENCE, detail)

    def close(self) -> None:
        operation_id, self._id = self._id, None
        if operation_id is not None and not self._group.failure:
            self._group.take_pending_work()
            self._group.request("release", operation_id=operation_id)
