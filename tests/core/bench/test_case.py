from __future__ import annotations

import pytest
from core.bench.workloads import Copy

from cudakit.core.bench.case import Case, check_fit
from cudakit.core.bench.method import Method
from cudakit.errors import InputError

METHOD = Method("isolated", "hot")


def test_what_does_not_fit_is_refused_with_what_would() -> None:
    case = Case(Copy(4 << 20), METHOD, size_bytes=4 << 20, buffers=2)

    with pytest.raises(
        InputError, match=r"needs 8.00 MiB in 2 buffers, and 4.00 MiB are"
    ) as caught:
        check_fit([case], 4 << 20)
    assert caught.value.hint == "1.90 MiB would fit"


def test_what_fits_is_left_alone() -> None:
    small = Case(Copy(), METHOD, size_bytes=1 << 10, buffers=2)
    on_the_host = Case(Copy(), METHOD, size_bytes=1 << 40, buffers=0)

    check_fit([small, on_the_host], 4 << 20)


@pytest.mark.parametrize("free_bytes", [1_000_003, 8 << 20, 123_456_789, 139 << 30])
def test_what_is_said_to_fit_does(free_bytes: int) -> None:
    with pytest.raises(InputError) as caught:
        check_fit([Case(Copy(), METHOD, size_bytes=free_bytes, buffers=3)], free_bytes)
    amount, unit, *_ = caught.value.hint.split()
    size_bytes = float(amount) * {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}[unit]

    assert 0.9 < 3 * size_bytes / (0.95 * free_bytes) < 1.005


def test_buffers_of_other_sizes_count_and_what_would_fit_is_said_in_their_words() -> None:
    case = Case(Copy(), METHOD, more_bytes=3 << 20, fitting=lambda usable: f"{usable} and no more")

    check_fit([case], 4 << 20)
    with pytest.raises(InputError, match=r"needs 3.00 MiB, and 1.00 MiB are free") as caught:
        check_fit([case], 1 << 20)
    assert caught.value.hint == f"{int(0.95 * (1 << 20))} and no more would fit"


def test_the_memory_of_the_host_is_another_and_counts_where_it_is_known() -> None:
    case = Case(Copy(4 << 20), METHOD, size_bytes=4 << 20, buffers=1, host_bytes=8 << 20)

    check_fit([case], 1 << 30)
    check_fit([case], 1 << 30, 1 << 30)
    with pytest.raises(InputError, match=r"needs 8.00 MiB of the host's memory, and") as caught:
        check_fit([case], 1 << 30, 8 << 20)
    assert caught.value.hint == "3.80 MiB would fit"
