from __future__ import annotations

import pytest

from cudakit.arrays.graph import capture_failure, status_of
from cudakit.gpu.driver_errors import Status, cuda_error

SPOILED = cuda_error(Status.STREAM_CAPTURE_INVALIDATED)


class OfNumba(Exception):
    code = 900


class OfCuPy(RuntimeError):
    status = 906


@pytest.mark.parametrize(
    ("raised_error", "status"),
    [
        (cuda_error(Status.STREAM_CAPTURE_ISOLATION), Status.STREAM_CAPTURE_ISOLATION),
        (OfNumba("[900] Call to cuMemAlloc"), Status.STREAM_CAPTURE_UNSUPPORTED),
        (OfCuPy("cudaErrorStreamCaptureImplicit"), Status.STREAM_CAPTURE_IMPLICIT),
        (
            RuntimeError("CUDA error: operation not permitted when stream is capturing\nCompile"),
            Status.STREAM_CAPTURE_UNSUPPORTED,
        ),
        (RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED"), Status.STREAM_CAPTURE_INVALIDATED),
        (
            RuntimeError(
                "the current stream is capturing, so synchronous API calls are disallowed"
            ),
            Status.STREAM_CAPTURE_UNSUPPORTED,
        ),
        (SPOILED, Status.STREAM_CAPTURE_INVALIDATED),
    ],
)
def test_capture_error_of_any_library_becomes_cuda_error(
    raised_error: Exception, status: Status
) -> None:
    found = capture_failure(raised_error, SPOILED)

    assert (found.code, found.name) == (status, f"CUDA_ERROR_{status.name}")
    assert str(raised_error).partition("\n")[0] in found.message
    assert "\n" not in found.message
    assert found.hint


def test_other_errors_are_not_capture_errors() -> None:
    class Exit(Exception):
        code = 3

    for error in (ValueError("the stream is dry"), Exit(), cuda_error(Status.OUT_OF_MEMORY)):
        assert status_of(error) is None
    assert status_of(OfNumba()) is Status.STREAM_CAPTURE_UNSUPPORTED
