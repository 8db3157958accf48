from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from cudakit.core.bench.result import CaseResult
from cudakit.core.bench.session import Circumstances, run
from cudakit.core.bench.spec import DIRECTIONS, CopySpec
from cudakit.gpu.api import Ptr, Stream
from cudakit.gpu.sim import Sim
from cudakit.units import Unavailable

SIZE = 1 << 20
LINK = {"pcie_generation_max": 5, "pcie_width_max": 16}


def measured(gpu: Sim, direction: str, **options: Any) -> CaseResult:
    options = {"sizes_bytes": (SIZE,), "cache": "hot"} | options
    linked = Circumstances(management=replace(gpu.facts(), fields=LINK))
    spec = CopySpec(directions=(direction,), **options)
    (case,) = run(spec, gpu, circumstances=linked).results
    return case


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("size_bytes", [4, 20, SIZE])
def test_each_direction_is_measured_and_verified(direction: str, size_bytes: int) -> None:
    with closing(Sim()) as gpu:
        free_bytes = gpu.memory_info().free_bytes
        case = measured(gpu, direction, sizes_bytes=(size_bytes,))

        assert case.verified
        assert case.axes == {"direction": direction, "size_bytes": size_bytes}
        assert gpu.memory_info().free_bytes == free_bytes


def test_the_link_bounds_what_crosses_it_and_memory_what_does_not() -> None:
    with closing(Sim()) as gpu:
        bounds = {
            name: case.limit.bound
            for name in DIRECTIONS
            if not isinstance((case := measured(gpu, name)).limit, Unavailable)
        }

    assert bounds == {"h2d": "link", "d2h": "link", "both": "link", "d2d": "memory"}


def test_both_ways_at_once_move_twice_as_much_in_the_same_time() -> None:
    with closing(Sim()) as gpu:
        one, both, within = (measured(gpu, name) for name in ("h2d", "both", "d2d"))

        assert one.median_s == pytest.approx(gpu.costs.over_link_ns(SIZE) / 1e9)
    assert both.median_s == one.median_s
    assert (one.bytes_moved, both.bytes_moved, within.bytes_moved) == (SIZE, 2 * SIZE, 2 * SIZE)


@pytest.mark.parametrize(
    ("direction", "mode"), [("d2d", "batch"), ("both", "batch"), ("both", "graph")]
)
def test_many_copies_go_over_many_buffers(direction: str, mode: str) -> None:
    with closing(Sim()) as gpu:
        case = measured(gpu, direction, mode=mode, cache="rotate", sizes_bytes=(16 << 20,))

    assert case.verified
    assert case.method.buffer_sets > 3


def test_within_the_device_the_cache_is_cold_where_it_can_be() -> None:
    with closing(Sim()) as gpu:
        large, small, link = (
            measured(gpu, direction, cache=None, sizes_bytes=(size_bytes,))
            for direction, size_bytes in (("d2d", 4 << 20), ("d2d", 4 << 10), ("h2d", 4 << 20))
        )

    assert [case.method.cache for case in (large, small, link)] == ["rotate", "hot", "hot"]


class Dropping(Sim):
    """Forgets the last word of every copy that is not small."""

    def copy(self, dst: Ptr, src: Ptr, size_bytes: int, stream: Stream) -> None:
        super().copy(dst, src, size_bytes - 4 * (size_bytes > 64), stream)


class Tiring(Sim):
    """Copies no more after so many times."""

    left = 0

    def copy(self, dst: Ptr, src: Ptr, size_bytes: int, stream: Stream) -> None:
        self.left -= size_bytes > 64
        super().copy(dst, src, size_bytes * (self.left >= 0 or size_bytes <= 64), stream)


@pytest.mark.parametrize(
    ("direction", "copies"),  # to fill what lies at the host, and for the first check
    [("h2d", 1 + 1), ("d2h", 1), ("both", 1 + 2), ("d2d", 1)],
)
def test_copies_that_stop_after_the_first_check_are_found_out(direction: str, copies: int) -> None:
    with closing(Tiring()) as gpu:
        gpu.left = copies
        case = measured(gpu, direction)

        assert gpu.left < -5
    assert isinstance(case.median_s, Unavailable)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_copy_that_is_not_whole_has_no_figures(direction: str) -> None:
    with closing(Dropping()) as gpu:
        case = measured(gpu, direction)

    assert isinstance(case.median_s, Unavailable)
    assert "1 of 262144 words are wrong" in case.median_s.reason
