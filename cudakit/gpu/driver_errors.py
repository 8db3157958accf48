"""The error codes of the CUDA driver and runtime, from the table cuda_errors.toml.

The simulated device raises the same errors as the driver.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from importlib.resources import files

from cudakit.errors import CudaError

_RESTART_PROCESS = "the CUDA context is lost and every later call fails: restart the process"


class Status(IntEnum):
    """The values of CUresult that cudakit itself raises or handles, without the prefix CUDA_ERROR_."""

    INVALID_VALUE = 1
    OUT_OF_MEMORY = 2
    INVALID_DEVICE = 101
    INVALID_IMAGE = 200
    INVALID_CONTEXT = 201
    ECC_UNCORRECTABLE = 214
    PEER_ACCESS_UNSUPPORTED = 217
    INVALID_HANDLE = 400
    ILLEGAL_STATE = 401
    NOT_FOUND = 500
    NOT_READY = 600
    ILLEGAL_ADDRESS = 700
    CONTEXT_IS_DESTROYED = 709
    HOST_MEMORY_ALREADY_REGISTERED = 712
    MISALIGNED_ADDRESS = 716
    LAUNCH_FAILED = 719
    NOT_PERMITTED = 800
    NOT_SUPPORTED = 801
    STREAM_CAPTURE_UNSUPPORTED = 900
    STREAM_CAPTURE_INVALIDATED = 901
    STREAM_CAPTURE_MERGE = 902
    STREAM_CAPTURE_UNMATCHED = 903
    STREAM_CAPTURE_UNJOINED = 904
    STREAM_CAPTURE_ISOLATION = 905
    STREAM_CAPTURE_IMPLICIT = 906
    CAPTURED_EVENT = 907
    STREAM_CAPTURE_WRONG_THREAD = 908
    GRAPH_EXEC_UPDATE_FAILURE = 910
    UNKNOWN = 999


@dataclass(frozen=True, slots=True)
class KnownError:
    """A row of the table."""

    code: int  # value of CUresult, or of cudaError if the driver has no such error
    name: str  # CUDA_ERROR_OUT_OF_MEMORY, or cudaErrorInvalidSymbol if the driver has no such error
    meaning: str
    action: str = ""
    causes: str = ""
    runtime: str = ""  # name of the same error in the runtime API
    lost: bool = False  # whether the CUDA context is unusable afterwards

    @property
    def remedy(self) -> str:
        """The advice for the error, "" if there is none."""
        return "; ".join(filter(None, (_RESTART_PROCESS if self.lost else "", self.action)))


@cache
def known_errors() -> Mapping[int, KnownError]:
    """Return the table by code."""
    table = tomllib.loads(files("cudakit.gpu").joinpath("cuda_errors.toml").read_text("utf-8"))
    return {row["code"]: KnownError(name=name, **row) for name, row in table.items()}


def remedy_of(code: int) -> str:
    """Return the advice for the code of a CUresult, "" if there is none."""
    known = known_errors().get(code)
    return known.remedy if known else ""


def cuda_error(code: int, *, detail: str = "", name: str = "", text: str = "") -> CudaError:
    """Return the CudaError for a CUresult. ``detail`` is appended to its message.

    ``name`` and ``text`` come from the driver, and are used for codes that are not in the table.
    """
    known = known_errors().get(code) or KnownError(
        code, name or f"CUDA error {code}", text or "no explanation"
    )
    message = f"{known.meaning}: {detail}" if detail else known.meaning
    return CudaError(code, known.name, message, hint=known.remedy)
