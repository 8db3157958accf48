from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from cudakit.bench.copy import DIRECTIONS, CopySpec
from cudakit.bench.pipeline import run
from cudakit.bench.result import CaseResult
from cudakit.errors import InputError, Unsupported
from cudakit.gpu.api import Ptr, Stream
from cudakit.gpu.api.facts import RunContext
from cudakit.gpu.sim import Sim
from cudakit.units import Unavailable

SIZE = 1 << 20
LINK = {
    "pcie_generation_max": 5,
    "pcie_width_max": 16,
    "nvlink_count": 18,
    "nvlink_version": "4.0",
}
PAGEABLE = ("pageable-h2d", "pageable-d2h")
TO_PEERS = ("peer", "peer-both")


def measure(gpu: Sim, direction: str, **options: Any) -> CaseResult:
    options = {"sizes_bytes": (SIZE,), "cache": "hot"} | options
    run_context = RunContext(nvml_device=replace(gpu.facts(), fields=LINK))
    spec = CopySpec(directions=(direction,), **options)
    (case,) = run(spec, gpu, run_context=run_context).results
    return case


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("size_bytes", [4, 20, SIZE])
def test_each_direction_is_measured_and_verified(direction: str, size_bytes: int) -> None:
    with closing(Sim("h200x2")) as gpu:
        free_bytes = gpu.memory_info().free_bytes
        case = measure(gpu, direction, sizes_bytes=(size_bytes,))

        peer = {"peer": 1, "access": "direct"} if direction in TO_PEERS else {}
        assert case.verified
        assert case.axes == {"direction": direction, **peer, "size_bytes": size_bytes}
        assert gpu.memory_info().free_bytes == free_bytes


def test_copies_are_bound_by_link_or_memory() -> None:
    with closing(Sim("h200x2")) as gpu:
        limits = {
            name: measure(gpu, name, cache="flush" if name == "d2d" else "hot").limit
            for name in DIRECTIONS
        }

    rates = {}
    for name, limit in limits.items():
        assert not isinstance(limit, Unavailable)
        assert limit.bound == ("memory" if name == "d2d" else "link")
        assert not isinstance(limit.link_bytes_per_s, Unavailable)
        rates[name] = round(limit.link_bytes_per_s / 1e9)
    assert rates == dict.fromkeys(DIRECTIONS, 63) | dict.fromkeys(TO_PEERS, 450)


def test_copy_within_the_l2_cache_has_no_peak() -> None:
    with closing(Sim()) as gpu:
        limits = [
            measure(gpu, "d2d", cache=cache, sizes_bytes=(1 << 20,)).limit
            for cache in ("hot", "rotate")
        ]

    assert [isinstance(limit, Unavailable) for limit in limits] == [True, False]


def test_concurrent_directions_move_twice_the_bytes() -> None:
    with closing(Sim()) as gpu:
        one_direction, both, within = (measure(gpu, name) for name in ("h2d", "both", "d2d"))

        assert one_direction.median_s == pytest.approx(
            gpu.costs.duration_ns(SIZE, gpu.costs.link_bytes_per_s) / 1e9
        )
    assert both.median_s == one_direction.median_s
    assert (one_direction.bytes_moved, both.bytes_moved, within.bytes_moved) == (
        SIZE,
        2 * SIZE,
        2 * SIZE,
    )


@pytest.mark.parametrize(
    ("direction", "mode"), [("d2d", "batch"), ("both", "batch"), ("both", "graph")]
)
def test_rotated_copy_uses_many_buffer_sets(direction: str, mode: str) -> None:
    with closing(Sim("jetson")) as gpu:
        case = measure(gpu, direction, mode=mode, cache="rotate", sizes_bytes=(1 << 20,))

    assert case.verified
    assert case.method.buffer_sets > 3


def test_copy_within_device_is_cold_if_large_enough() -> None:
    with closing(Sim()) as gpu:
        large, small, to_device = (
            measure(gpu, direction, cache=None, sizes_bytes=(size_bytes,))
            for direction, size_bytes in (("d2d", 4 << 20), ("d2d", 4 << 10), ("h2d", 4 << 20))
        )

    assert [case.method.cache for case in (large, small, to_device)] == ["rotate", "hot", "hot"]


def test_copy_of_pageable_memory_is_slower_and_timed_by_host() -> None:
    with closing(Sim()) as gpu:
        pinned = measure(gpu, "h2d")
        for direction in PAGEABLE:
            case = measure(gpu, direction)

            assert (case.method.mode, case.method.blocker) == ("host", False)
            assert not isinstance(case.median_s, Unavailable)
            assert not isinstance(pinned.median_s, Unavailable)
            assert case.median_s > 2 * pinned.median_s


def test_copy_of_pageable_memory_timed_by_events_has_no_blocker() -> None:
    with closing(Sim()) as gpu:
        case = measure(gpu, "pageable-d2h", mode="isolated", sizes_bytes=(16 << 20,))

    assert case.verified
    assert (case.method.mode, case.method.blocker) == ("isolated", False)


def test_pageable_memory_in_graph_is_rejected() -> None:
    with pytest.raises(InputError, match="a graph cannot contain them"):
        CopySpec(directions=("h2d", "pageable-h2d"), mode="graph")
    with closing(Sim()) as gpu:
        cases = CopySpec(mode="graph", sizes_bytes=(SIZE,)).cases(gpu)

    assert [case.workload.axes["direction"] for case in cases] == ["h2d", "d2h", "both", "d2d"]


def test_peer_copies_run_concurrently() -> None:
    with closing(Sim("h200x2", ordinal=1)) as gpu:
        one_direction, both = measure(gpu, "peer"), measure(gpu, "peer-both")

        assert one_direction.axes["peer"] == 0
        assert one_direction.median_s == pytest.approx(gpu.costs.to_peer_ns(SIZE, 18) / 1e9)
    assert both.median_s == one_direction.median_s
    assert (one_direction.bytes_moved, both.bytes_moved) == (SIZE, 2 * SIZE)


class WithoutPeerAccess(Sim):
    """A simulated device without direct access to other devices."""

    def can_access_peer(self, ordinal: int) -> bool:
        return super().can_access_peer(ordinal) and False


def test_staged_peer_copy_is_recorded_and_bound_by_host_link() -> None:
    with closing(WithoutPeerAccess("h200x2")) as gpu:
        case = measure(gpu, "peer")

    assert case.verified
    assert case.axes["access"] == "staged"
    assert not case.method.blocker
    assert not isinstance(case.limit, Unavailable)
    assert round(case.limit.datasheet_s * 63e9 / SIZE, 2) == 1.0


def test_default_directions_are_all_that_machine_supports() -> None:
    for model, peer_directions in (("h200", set()), ("h200x2", set(TO_PEERS))):
        with closing(Sim(model)) as gpu:
            cases = CopySpec(sizes_bytes=(SIZE,)).cases(gpu)

            assert {case.workload.axes["direction"] for case in cases} == (
                set(DIRECTIONS) - set(TO_PEERS) | peer_directions
            )


@pytest.mark.parametrize("direction", TO_PEERS)
def test_peer_copy_needs_second_device(direction: str) -> None:
    with closing(Sim()) as gpu, pytest.raises(Unsupported, match="needs two GPUs"):
        measure(gpu, direction)


class DroppingLastWord(Sim):
    """A simulated device that loses the last word of large copies."""

    def copy(self, dst: Ptr, src: Ptr, size_bytes: int, stream: Stream) -> None:
        super().copy(dst, src, size_bytes - 4 * (size_bytes > 64), stream)


class StoppingCopies(Sim):
    """A simulated device that copies nothing after a number of copies."""

    copies_left = 0

    def copy(self, dst: Ptr, src: Ptr, size_bytes: int, stream: Stream) -> None:
        self.copies_left -= size_bytes > 64
        super().copy(dst, src, size_bytes * (self.copies_left >= 0 or size_bytes <= 64), stream)


@pytest.mark.parametrize(
    (
        "direction",
        "copies",
    ),  # Number of copies that fill host buffers and that the first check needs.
    [
        ("h2d", 1 + 1),
        ("d2h", 1),
        ("both", 1 + 2),
        ("d2d", 1),
        ("pageable-h2d", 1 + 1 + 1),
        ("pageable-d2h", 1 + 1),
        ("peer", 1 + 1 + 1),
        ("peer-both", 1 + 2 + 2 + 2),
    ],
)
def test_copies_that_stop_after_first_check_withhold_time(direction: str, copies: int) -> None:
    with closing(StoppingCopies("h200x2")) as gpu:
        gpu.copies_left = copies
        case = measure(gpu, direction)

        assert gpu.copies_left < -5
    assert isinstance(case.median_s, Unavailable)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_incomplete_copy_withholds_time(direction: str) -> None:
    with closing(DroppingLastWord("h200x2")) as gpu:
        case = measure(gpu, direction)

    assert isinstance(case.median_s, Unavailable)
    assert "1 of 262144 words are wrong" in case.median_s.reason
