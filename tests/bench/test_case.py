""""""

from __future__ import annotations

import pytest
from bench.workloads import Copy

from cudakit.bench.case import Case, Method, check_fit
from cudakit.errors import InputError

METHOD = Method("isolated", "hot")


def test_error_of_case_that_does_not_fit_names_fitting_size() -> None:
    case = Case(Copy(4 << 20), METHOD, size_bytes=4 << 20, buffers=2)

    with pytest.raises(
        InputError, match=r"needs 8.00 MiB of device memory in 2 buffers, but only 4.00 MiB is"
    ) as caught:
        check_fit([case], 4 << 20)
    assert caught.value.hint == "a size of 1.90 MiB would fit"


def test_error_is_that_of_the_case_that_needs_most_memory() -> None:
    read, triad = (
        Case(Copy(4 << 20), METHOD, size_bytes=4 << 20, buffers=buffers) for buffers in (1, 3)
    )

    with pytest.raises(InputError, match=r"needs 12.0 MiB of device memory in 3 buffers") as caught:
        check_fit([read, triad], 3 << 20)
    assert caught.value.hint == "a size of 972 KiB would fit"


def test_cases_that_fit_pass_check() -> None:
    small_case = Case(Copy(), METHOD, size_bytes=1 << 10, buffers=2)
    host_case = Case(Copy(), METHOD, size_bytes=1 << 40, buffers=0)

    check_fit([small_case, host_case], 4 << 20)


@pytest.mark.parametrize("free_bytes", [1_000_003, 8 << 20, 123_456_789, 139 << 30])
def test_size_named_in_hint_fits(free_bytes: int) -> None:
    with pytest.raises(InputError) as caught:
        check_fit([Case(Copy(), METHOD, size_bytes=free_bytes, buffers=3)], free_bytes)
    amount, unit = caught.value.hint.removeprefix("a size of ").removesuffix(" would fit").split()
    size_bytes = float(amount) * {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}[unit]

    assert 0.9 < 3 * size_bytes / (0.95 * free_bytes) < 1.005


def test_check_counts_other_buffers_and_uses_description_of_fitting_case() -> None:
    case = Case(
        Copy(),
        METHOD,
        other_buffer_bytes=3 << 20,
        describe_fitting=lambda usable: f"{usable} and no more",
    )

    check_fit([case], 4 << 20)
    with pytest.raises(
        InputError, match=r"needs 3.00 MiB of device memory, but only 1.00 MiB is free"
    ) as caught:
        check_fit([case], 1 << 20)
    assert caught.value.hint == f"{int(0.95 * (1 << 20))} and no more would fit"


def test_check_counts_host_memory_if_known() -> None:
    case = Case(Copy(4 << 20), METHOD, size_bytes=4 << 20, buffers=1, host_bytes=8 << 20)

    check_fit([case], 1 << 30)
    check_fit([case], 1 << 30, 1 << 30)
    with pytest.raises(InputError, match=r"needs 8.00 MiB of host memory, but") as caught:
        check_fit([case], 1 << 30, 8 << 20)
    assert caught.value.hint == "a size of 3.80 MiB would fit"


def test_memory_of_simulated_device_is_limited_by_host_memory() -> None:
    case = Case(Copy(4 << 20), METHOD, size_bytes=4 << 20, buffers=2)

    check_fit([case], 1 << 30, 4 << 20)
    with pytest.raises(InputError, match=r"has only 2.00 MiB for it: half of its free memory"):
        check_fit([case], 1 << 30, 4 << 20, simulated=True)


def test_memory_of_host_is_shared_by_simulated_ranks() -> None:
    case = Case(Copy(4 << 20), METHOD, size_bytes=4 << 20, buffers=2)

    check_fit([case], 1 << 30, 16 << 20, simulated=True)
    with pytest.raises(
        InputError,
        match=r"needs 8.00 MiB of device memory in 2 buffers on each of 2 ranks, "
        r"but the host, which simulates their devices, has only 5.00 MiB for them: half of",
    ) as caught:
        check_fit([case], 1 << 30, 10 << 20, simulated=True, rank_count=2)
    assert caught.value.hint == "a size of 1.25 MiB would fit"


def test_methods_with_other_mode_cache_or_blocker_differ() -> None:
    method = Method("isolated", "rotate")

    assert method.differences_from(Method("isolated", "hot")) == (
        "cache: rotate before, hot after",
    )
    assert method.differences_from(Method("batch", "rotate", blocker=False)) == (
        "mode: isolated before, batch after",
        "blocker: on before, off after",
    )


def test_methods_with_other_warm_up_and_seed_do_not_differ() -> None:
    assert (
        Method("isolated", "rotate").differences_from(Method("isolated", "rotate", 3.0, seed=7))
        == ()
    )
