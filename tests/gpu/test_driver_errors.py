from __future__ import annotations

import pytest
from cuda.bindings import driver

from cudakit.gpu.driver_errors import STICKY, Status, cuda_error


@pytest.mark.parametrize("status", Status)
def test_every_status_is_the_drivers_and_has_words(status: Status) -> None:
    error = cuda_error(status)

    assert driver.CUresult(error.code).name == error.name
    assert len(error.message) > len(f"{error.name}: ")


@pytest.mark.parametrize("status", STICKY)
def test_a_status_that_loses_the_context_says_that_the_process_must_end(status: Status) -> None:
    assert "end this process" in cuda_error(status).hint


def test_other_statuses_do_not_end_the_process() -> None:
    assert not [s for s in set(Status) - STICKY if "end this process" in cuda_error(s).hint]


def test_the_values_that_were_seen_are_in_the_message() -> None:
    error = cuda_error(2, seen="8.0 GiB asked, 1.2 GiB free on cuda:0")

    assert str(error) == (
        "CUDA_ERROR_OUT_OF_MEMORY: the device has not enough free memory: "
        "8.0 GiB asked, 1.2 GiB free on cuda:0"
    )


def test_an_error_without_words_here_has_the_drivers_own() -> None:
    error = cuda_error(915, name="CUDA_ERROR_NEW", text="something new", seen="cuda:0")

    assert (error.code, str(error)) == (915, "CUDA_ERROR_NEW: something new: cuda:0")
    assert str(cuda_error(12345)) == "CUDA error 12345: no explanation"
