"""Why a function cannot be captured, in one line, with the driver's name of it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from cudakit.errors import CudaError
from cudakit.gpu.explain import Status

_HOST = (
    "leave out of the function what waits for the device, asks the driver for memory, or copies from and to "
    "the host; what is made at the first call only is made by warmup=1 or more"
)
_STREAM = "enqueue on the stream that is current inside, or take a parameter named `stream` and enqueue there"

_HINTS: Mapping[Status, str] = MappingProxyType(
    {
        Status.STREAM_CAPTURE_UNSUPPORTED: _HOST,
        Status.STREAM_CAPTURE_INVALIDATED: f"{_HOST}; and {_STREAM}",
        Status.STREAM_CAPTURE_UNJOINED: "let the stream of the capture wait for the other ones at the end",
        Status.STREAM_CAPTURE_ISOLATION: "wait for no event from before the function inside of it",
        Status.STREAM_CAPTURE_IMPLICIT: f"it used the legacy default stream: {_STREAM}",
        Status.CAPTURED_EVENT: "ask or wait for no event at the host inside the function",
    }
)
# What cudaGetErrorString says of them, and CuPy where it does not even try: libraries pass on nothing else.
_SAID: Mapping[str, Status] = MappingProxyType(
    {
        "stream is capturing": Status.STREAM_CAPTURE_UNSUPPORTED,
        "legacy stream depend on a capturing blocking stream": Status.STREAM_CAPTURE_IMPLICIT,
        "dependency created on uncaptured work": Status.STREAM_CAPTURE_ISOLATION,
        "event last recorded in a capturing stream": Status.CAPTURED_EVENT,
    }
)
EMPTY = "the function enqueued nothing on the stream that was captured"
EMPTY_HINT = _STREAM


def is_refusal(error: BaseException) -> bool:
    """Say whether an error is one of capturing, and not the function's own."""
    return _status(error) is not None


def refusal(error: BaseException, ended: BaseException | None = None) -> CudaError:
    """Explain what spoiled a capture; ``ended`` is what the capture itself ended with, if with an error."""
    status = _status(error) or _status(ended) or Status.STREAM_CAPTURE_INVALIDATED
    said = str(error).strip().partition("\n")[0]
    return CudaError(
        status,
        f"CUDA_ERROR_{status.name}",
        f"the function cannot be captured: {said}",
        hint=_HINTS.get(status, _HOST),
    )


def _status(error: BaseException | None) -> Status | None:
    """Find the driver's error in that of any library: its number, or the words for it."""
    # Ours and Numba's, CuPy's, torch's.
    for name in ("code", "status", "error_code"):
        code = getattr(error, name, None)
        if isinstance(code, int) and code in _HINTS:
            return Status(code)
    text = str(error)
    return next((status for words, status in _SAID.items() if words in text), None)
