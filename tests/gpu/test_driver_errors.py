"""The table of CUDA errors against the enumerations of CUDA, and the errors made from it."""

from __future__ import annotations

from cuda.bindings import driver, runtime

from cudakit.gpu.driver_errors import Status, cuda_error, known_errors

ERRORS = known_errors()


def test_every_error_of_the_driver_has_its_name_and_code() -> None:
    codes = {f"{code.name}": int(code) for code in driver.CUresult if int(code)}

    names = {error.name: error.code for error in ERRORS.values()}
    assert codes.items() <= names.items()
    assert {f"CUDA_ERROR_{status.name}": int(status) for status in Status}.items() <= codes.items()


def test_every_error_of_the_runtime_has_its_name_and_code() -> None:
    codes = {name: int(code) for name, code in runtime.cudaError_t.__members__.items() if int(code)}

    names = {error.runtime or error.name: error.code for error in ERRORS.values()}
    driver_only = {name for name in names if name.startswith("CUDA_ERROR_")}
    assert {name: code for name, code in names.items() if name not in driver_only} == codes
    assert not {names[name] for name in driver_only} & set(codes.values())


def test_every_error_has_a_meaning_of_one_line() -> None:
    assert [error.name for error in ERRORS.values() if not 0 < len(error.meaning) < 100] == []
    assert len({error.name for error in ERRORS.values()}) == len(ERRORS)


def test_only_errors_that_lose_the_context_advise_to_restart_the_process() -> None:
    assert {code for code, error in ERRORS.items() if "restart the process" in error.remedy} == {
        *(214, 220, 226, 700, 702, 710, 721, 810, 911),
        *range(714, 720),
    }


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
