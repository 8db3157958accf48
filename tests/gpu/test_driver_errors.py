from __future__ import annotations

import pytest
from cuda.bindings import driver, runtime

from cudakit.gpu.driver_errors import RUNTIME_ONLY, STICKY, Status, cuda_error, runtime_name


@pytest.mark.parametrize("status", Status)
def test_status_has_name_of_driver_and_message(status: Status) -> None:
    error = cuda_error(status)

    assert driver.CUresult(error.code).name == error.name
    assert len(error.message) > len(f"{error.name}: ")


@pytest.mark.parametrize("status", STICKY)
def test_sticky_status_has_hint_to_restart_process(status: Status) -> None:
    assert "restart the process" in cuda_error(status).hint


def test_other_statuses_have_no_hint_to_restart_process() -> None:
    assert not [
        status
        for status in set(Status) - STICKY
        if "restart the process" in cuda_error(status).hint
    ]


def test_every_error_of_the_driver_is_explained() -> None:
    assert set(map(int, Status)) == set(map(int, driver.CUresult)) - {0}


def test_observed_values_are_in_message() -> None:
    error = cuda_error(2, detail="8.0 GiB asked, 1.2 GiB free on cuda:0")

    assert str(error) == (
        "CUDA_ERROR_OUT_OF_MEMORY: the device does not have enough free memory: "
        "8.0 GiB asked, 1.2 GiB free on cuda:0"
    )


def test_unknown_code_has_text_of_driver() -> None:
    error = cuda_error(9915, name="CUDA_ERROR_NEW", text="something new", detail="cuda:0")

    assert (error.code, str(error)) == (9915, "CUDA_ERROR_NEW: something new: cuda:0")
    assert str(cuda_error(12345)) == "CUDA error 12345: no explanation"


def test_every_error_of_the_runtime_has_its_name_and_code() -> None:
    runtime_codes = {name: int(code) for name, code in runtime.cudaError_t.__members__.items()}
    our_names = {runtime_name(status): int(status) for status in Status if runtime_name(status)}
    our_names |= {name: code for code, (name, _, _) in RUNTIME_ONLY.items()}

    assert our_names.items() == runtime_codes.items() - {("cudaSuccess", 0)}
    unnamed = {int(status) for status in Status if not runtime_name(status)}
    assert not unnamed & set(runtime_codes.values())
