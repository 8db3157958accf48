"""Groups of ranks in threads, on simulated devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudakit.bench.case import Mode, Rule
from cudakit.bench.nccl import NcclSpec, check_ranks, make_collective, measure_collectives
from cudakit.bench.nccl_ranks import Answers, Rank, RankGroup
from cudakit.bench.result import BenchResult, RankFacts
from cudakit.errors import CollectiveError, InputError, Unsupported
from cudakit.gpu.api import Gpu, Ptr, Stream
from cudakit.gpu.api.arrays import ELEMENTS
from cudakit.gpu.api.collectives import (
    OPERATIONS,
    Collective,
    CollectiveLibrary,
    CollectiveLibraryName,
    Communicator,
    bus_factor,
)
from cudakit.gpu.machine import open_machine
from cudakit.gpu.run_context import gather
from cudakit.gpu.sim import Sim
from cudakit.units import Unavailable

SPEC = NcclSpec(
    sizes_bytes=(4 << 10,), warmup_s=0.0, rounds=1, rule=Rule(min_samples=3, min_time_s=0.0)
)
MODES: tuple[Mode, ...] = ("isolated", "batch", "graph", "host")
FACTS = RankFacts(
    "gpu01", 1, 0, "NVIDIA H200", "GPU-1", "0000:01:00.0", "2.28.9", "libnccl", 1 << 30
)


def open_sim(rank: int) -> Gpu:
    return Sim("h200x2", ordinal=rank % 2)


@contextmanager
def group_of(
    ranks: int, open_gpu: Callable[[int], Gpu] = open_sim, timeout_s: float = 20.0
) -> Iterator[RankGroup]:
    answers = Answers()
    channels = [
        Rank(lambda rank=rank: open_gpu(rank), rank, ranks, answers.put)  # type: ignore[misc]
        for rank in range(ranks)
    ]
    group = RankGroup(channels, answers, timeout_s)
    try:
        yield group
    finally:
        group.close()


def measure(spec: NcclSpec, ranks: int = 2, **options: object) -> BenchResult:
    machine = open_machine("sim:h200x2")
    with group_of(ranks, **options) as group, closing(open_sim(0)) as gpu:  # type: ignore[arg-type]
        return measure_collectives(
            spec,
            gpu,
            group,
            run_context=gather(machine, variables={}),
            nvml=machine.nvml(links=True),
            variables=[{}] * ranks,
        )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_operation_is_measured_and_verified(mode: Mode, ranks: int) -> None:
    result = measure(replace(SPEC, mode=mode), ranks)

    assert result.complete
    assert [case.verified for case in result.results] == [True] * 12
    assert {case.axes["operation"] for case in result.results} == set(OPERATIONS)
    assert {case.method.mode for case in result.results} == {mode}


@pytest.mark.parametrize("dtype", ELEMENTS)
def test_every_data_type_is_verified(dtype: str) -> None:
    spec = replace(SPEC, dtypes=(dtype,), operations=("all-reduce", "reduce-scatter"))
    result = measure(spec, 3)

    assert all(case.verified for case in result.results)


def test_rates_are_those_of_nccl_tests() -> None:
    result = measure(replace(SPEC, operations=("all-reduce",), places=("in-place",)), 3)
    case, collectives = result.results[0], result.collectives

    assert collectives
    rate = collectives.rates[0]
    assert case.median_s == pytest.approx(4096 / rate.algbw_bytes_per_s)
    assert rate.busbw_bytes_per_s == pytest.approx(4 / 3 * rate.algbw_bytes_per_s)
    # The bus bandwidth reaches the link limit when the share of the peak is 1.
    assert case.ratio_to_limit == pytest.approx(rate.busbw_bytes_per_s / (18 * 25e9))


def test_ranks_and_links_are_recorded() -> None:
    collectives = measure(replace(SPEC, operations=("broadcast",))).collectives

    assert collectives
    assert [rank.device for rank in collectives.ranks] == [0, 1]
    assert {rank.nccl_version for rank in collectives.ranks} == {"simulated"}
    assert collectives.links == {"0-1": "NV18"}


def test_single_rank_has_no_bus_bandwidth() -> None:
    result = measure(SPEC, 1)

    assert result.collectives
    assert all(case.verified for case in result.results)
    for rate in result.collectives.rates:
        assert isinstance(rate.busbw_bytes_per_s, Unavailable)
    assert any("one rank" in warning for warning in result.warnings)


def test_buffer_sets_rotate_on_all_ranks() -> None:
    spec = replace(SPEC, cache="rotate", sizes_bytes=(1 << 20,), operations=("all-gather",))
    result = measure(spec)

    assert all(case.verified for case in result.results)
    assert all(case.method.buffer_sets > 1 for case in result.results)


def test_sizes_that_round_to_one_size_are_measured_once() -> None:
    spec = replace(
        SPEC, operations=("all-to-all",), sizes_bytes=(1, 2, 8, 100), places=("out-of-place",)
    )
    result = measure(spec, 3)

    assert [case.axes["size_bytes"] for case in result.results] == [12, 96]


def test_size_above_the_free_memory_is_refused_before_any_allocation() -> None:
    spec = replace(SPEC, operations=("all-reduce",), sizes_bytes=(1 << 40,))
    with pytest.raises(
        InputError, match=r"needs 3.00 TiB of device memory in 3 buffers on each of 2 ranks"
    ):
        measure(spec)


def test_operation_without_an_in_place_form_is_unsupported() -> None:
    spec = replace(SPEC, operations=("all-to-all", "send-receive"), places=("in-place",))
    with pytest.raises(Unsupported, match="all-to-all and send-receive cannot run in place"):
        measure(spec)


def test_torch_is_unsupported_on_simulated_devices() -> None:
    result = measure(replace(SPEC, operations=("all-reduce",), baselines=("torch",)))

    nccl_cases = [case for case in result.results if case.library == "cudakit"]
    torch_cases = [case for case in result.results if case.library == "torch"]
    assert len(nccl_cases) == len(torch_cases)
    assert all(case.verified for case in nccl_cases)
    for case in torch_cases:
        assert isinstance(case.median_s, Unavailable)
        assert "torch needs a real GPU" in case.median_s.reason


@dataclass
class WrongCommunicator:
    """A rank whose all-reduce leaves one wrong byte."""

    gpu: Gpu
    communicator: Communicator

    def enqueue(self, collective: Collective, send: Ptr, receive: Ptr, stream: Stream) -> None:
        self.communicator.enqueue(collective, send, receive, stream)
        if collective.operation == "all-reduce" and collective.count > 1:
            self.gpu.fill(Ptr(receive + 8), 0xEE, 1, stream)

    def synchronize(self, stream: Stream) -> None:
        self.communicator.synchronize(stream)

    def abort(self) -> None:
        self.communicator.abort()

    def close(self) -> None:
        self.communicator.close()


class WrongDevice(Sim):
    """A device whose NCCL computes a wrong value."""

    def collectives(self, library: CollectiveLibraryName = "nccl") -> CollectiveLibrary:
        return WrongLibrary(self, super().collectives(library))


@dataclass
class WrongLibrary:
    gpu: Gpu
    library: CollectiveLibrary
    version: str = "simulated"
    path: str = "simulated"

    def unique_id(self, host: str) -> bytes:
        return self.library.unique_id(host)

    def connect(self, unique_id: bytes, rank: int, ranks: int) -> WrongCommunicator:
        return WrongCommunicator(self.gpu, self.library.connect(unique_id, rank, ranks))


def test_wrong_value_of_one_rank_withholds_the_time() -> None:
    def open_gpu(rank: int) -> Gpu:
        return WrongDevice("h200x2", ordinal=1) if rank else open_sim(0)

    spec = replace(SPEC, operations=("all-reduce", "all-gather"))
    result = measure(spec, open_gpu=open_gpu)
    wrong = [case for case in result.results if case.axes["operation"] == "all-reduce"]

    assert len(wrong) == 2
    for case in wrong:
        assert isinstance(case.median_s, Unavailable)
        assert case.median_s.reason == "wrong results: 1 of 2048 words are wrong, on rank 1"
    assert all(case.verified for case in result.results if case not in wrong)


def test_device_that_cannot_be_opened_ends_the_group() -> None:
    def open_gpu(rank: int) -> Gpu:
        return Sim("h200x2", ordinal=5 * rank)

    with pytest.raises(CollectiveError, match=r"^rank 1: CUDA_ERROR_INVALID_DEVICE"):
        measure(SPEC, open_gpu=open_gpu)


def test_error_of_one_rank_ends_the_others_at_once() -> None:
    with group_of(3) as group, closing(open_sim(0)):
        group.request("describe")
        group.connect("nccl", "127.0.0.1")
        with pytest.raises(CollectiveError, match=r"^rank 2: KeyError"):
            group.request("verify", only_rank=2, operation_id=99)
        assert group.failure
        with pytest.raises(CollectiveError, match="rank 2"):
            group.request("describe")


def test_rank_without_an_answer_is_named() -> None:
    with group_of(2, timeout_s=0.5) as group:
        group.request("describe")
        group.connect("nccl", "127.0.0.1")
        group.request(
            "prepare",
            operation_id=1,
            library="nccl",
            collective=["all-reduce", "fp32", 4],
            in_place=False,
            seed=0,
        )
        # Rank 1 never takes part in the operation.
        with pytest.raises(CollectiveError, match=r"^rank 0 did not answer within 0.5 s"):
            group.request("execute", only_rank=0, work=[(1, 0)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nccl_version": "2.27.3"}, "rank 1 on gpu01 has NCCL 2.27.3"),
        ({}, "ranks 0 and 1 on gpu01 use the same GPU, GPU-1"),
    ],
)
def test_ranks_that_cannot_work_together_are_refused(change: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_ranks([FACTS, replace(FACTS, process=2, **change)], simulated=False)  # type: ignore[arg-type]


def test_same_uuid_on_two_hosts_is_two_devices() -> None:
    check_ranks([FACTS, replace(FACTS, host="gpu02")], simulated=False)


@given(st.sampled_from(OPERATIONS), st.integers(2, 64), st.floats(1e-6, 10.0))
def test_bus_bandwidth_of_a_ring_at_full_speed_is_that_of_its_links(
    operation: str, ranks: int, seconds: float
) -> None:
    """A ring moves size / ranks per step; broadcast, reduce and send-receive move the size once."""
    steps = {"all-reduce": 2 * (ranks - 1)}.get(operation, ranks - 1)
    is_divided = operation in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
    size = 1e9
    bytes_per_link = steps * size / ranks if is_divided else size
    link_bandwidth = bytes_per_link / seconds

    assert bus_factor(operation, ranks) * size / seconds == pytest.approx(link_bandwidth)


@given(
    st.sampled_from(OPERATIONS),
    st.sampled_from(list(ELEMENTS)),
    st.integers(1, 1 << 40),
    st.integers(1, 64),
)
def test_chunks_are_aligned_and_fit_in_the_size(
    operation: str, dtype: str, size_bytes: int, ranks: int
) -> None:
    element = ELEMENTS[dtype]
    collective = make_collective(operation, element, size_bytes, ranks)
    chunks = max(collective.send_chunks(ranks), collective.receive_chunks(ranks))
    smallest = chunks * max(4, element.size_bytes)

    assert chunks * collective.chunk_bytes <= max(size_bytes, smallest)
    assert collective.chunk_bytes % 4 == 0
    assert collective.chunk_bytes % 16 == 0 or collective.chunk_bytes < 16
    assert size_bytes - chunks * collective.chunk_bytes < 16 * chunks


def test_invalid_options_are_refused() -> None:
    for option, value in (
        ("operations", ("gossip",)),
        ("dtypes", ("fp4",)),
        ("places", ("elsewhere",)),
        ("baselines", ("gloo",)),
        ("cache", "flush"),
        ("sizes_bytes", (0,)),
    ):
        with pytest.raises(InputError):
            NcclSpec(**{option: value})  # type: ignore[arg-type]
