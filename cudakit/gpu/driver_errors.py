"""The error codes of the CUDA driver, with their meaning and remedy; the simulated device raises the same.

Source of the codes: CUDA Driver API, Data types used by CUDA driver, CUresult.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import NamedTuple

from cudakit.errors import CudaError


class Status(IntEnum):
    """The common values of CUresult, without the prefix CUDA_ERROR_ of their names."""

    INVALID_VALUE = 1
    OUT_OF_MEMORY = 2
    NOT_INITIALIZED = 3
    DEINITIALIZED = 4
    STUB_LIBRARY = 34
    DEVICE_UNAVAILABLE = 46
    NO_DEVICE = 100
    INVALID_DEVICE = 101
    INVALID_IMAGE = 200
    INVALID_CONTEXT = 201
    MAP_FAILED = 205
    NO_BINARY_FOR_GPU = 209
    ECC_UNCORRECTABLE = 214
    UNSUPPORTED_LIMIT = 215
    PEER_ACCESS_UNSUPPORTED = 217
    INVALID_PTX = 218
    NVLINK_UNCORRECTABLE = 220
    UNSUPPORTED_PTX_VERSION = 222
    CONTAINED = 226
    OPERATING_SYSTEM = 304
    INVALID_HANDLE = 400
    ILLEGAL_STATE = 401
    NOT_FOUND = 500
    NOT_READY = 600
    ILLEGAL_ADDRESS = 700
    LAUNCH_OUT_OF_RESOURCES = 701
    LAUNCH_TIMEOUT = 702
    CONTEXT_IS_DESTROYED = 709
    ASSERT = 710
    TOO_MANY_PEERS = 711
    HARDWARE_STACK_ERROR = 714
    ILLEGAL_INSTRUCTION = 715
    MISALIGNED_ADDRESS = 716
    INVALID_ADDRESS_SPACE = 717
    INVALID_PC = 718
    LAUNCH_FAILED = 719
    TENSOR_MEMORY_LEAK = 721
    NOT_PERMITTED = 800
    NOT_SUPPORTED = 801
    SYSTEM_NOT_READY = 802
    SYSTEM_DRIVER_MISMATCH = 803
    COMPAT_NOT_SUPPORTED_ON_DEVICE = 804
    MPS_CONNECTION_FAILED = 805
    MPS_CLIENT_TERMINATED = 810
    STREAM_CAPTURE_UNSUPPORTED = 900
    STREAM_CAPTURE_INVALIDATED = 901
    STREAM_CAPTURE_UNMATCHED = 903
    STREAM_CAPTURE_UNJOINED = 904
    STREAM_CAPTURE_ISOLATION = 905
    STREAM_CAPTURE_IMPLICIT = 906
    CAPTURED_EVENT = 907
    STREAM_CAPTURE_WRONG_THREAD = 908
    GRAPH_EXEC_UPDATE_FAILURE = 910
    EXTERNAL_DEVICE = 911
    UNKNOWN = 999


# After these the context is lost: CUresult's text says that the process must be ended and relaunched.
STICKY = frozenset(
    {
        Status.ECC_UNCORRECTABLE,
        Status.NVLINK_UNCORRECTABLE,
        Status.CONTAINED,
        Status.ILLEGAL_ADDRESS,
        Status.LAUNCH_TIMEOUT,
        Status.ASSERT,
        Status.HARDWARE_STACK_ERROR,
        Status.ILLEGAL_INSTRUCTION,
        Status.MISALIGNED_ADDRESS,
        Status.INVALID_ADDRESS_SPACE,
        Status.INVALID_PC,
        Status.LAUNCH_FAILED,
        Status.TENSOR_MEMORY_LEAK,
        Status.MPS_CLIENT_TERMINATED,
        Status.EXTERNAL_DEVICE,
    }
)

_END_PROCESS = (
    "the context is lost, and every later call will fail: end this process and start it again"
)
_SANITIZER = "compute-sanitizer shows the kernel and the line"


class _Words(NamedTuple):
    why: str
    hint: str = ""


_WORDS: Mapping[int, _Words] = MappingProxyType(
    {
        Status.INVALID_VALUE: _Words("an argument is outside of what the call takes"),
        Status.OUT_OF_MEMORY: _Words(
            "the device has not enough free memory",
            "free memory, or ask for less; `cudakit memviz` shows who holds it, "
            "`nvidia-smi` which process",
        ),
        Status.NOT_INITIALIZED: _Words(
            "CUDA is not initialized in this process",
            "a forked child cannot use CUDA once its parent has: start it with spawn",
        ),
        Status.DEINITIALIZED: _Words("the driver is shutting down with this process"),
        Status.STUB_LIBRARY: _Words(
            "the stub of libcuda was loaded in place of the driver's",
            "take the directory `stubs` off LD_LIBRARY_PATH",
        ),
        Status.DEVICE_UNAVAILABLE: _Words(
            "the device is busy or not to be used",
            "another process may hold it exclusively: `nvidia-smi -q -d COMPUTE`",
        ),
        Status.NO_DEVICE: _Words(
            "the driver sees no device that can run CUDA",
            "look at CUDA_VISIBLE_DEVICES, and in a container at --gpus; `cudakit doctor` looks further",
        ),
        Status.INVALID_DEVICE: _Words("there is no such device"),
        Status.INVALID_IMAGE: _Words(
            "the kernel image cannot be read: it is no cubin, fatbin or PTX"
        ),
        Status.INVALID_CONTEXT: _Words("no context is current in this thread"),
        Status.MAP_FAILED: _Words("memory could not be mapped"),
        Status.NO_BINARY_FOR_GPU: _Words(
            "the image has no code for this device",
            "compile for its compute capability, or add PTX",
        ),
        Status.ECC_UNCORRECTABLE: _Words(
            "the device found a memory error that it could not correct",
            "the device may need a reset or replacement: `nvidia-smi -q -d ECC,ROW_REMAPPER`",
        ),
        Status.UNSUPPORTED_LIMIT: _Words("the device has no such limit"),
        Status.PEER_ACCESS_UNSUPPORTED: _Words(
            "one device cannot use the memory of the other",
            "copy between them instead; `nvidia-smi topo -p2p r` shows which pairs can",
        ),
        Status.INVALID_PTX: _Words("the PTX does not compile"),
        Status.NVLINK_UNCORRECTABLE: _Words(
            "an NVLink found an error that it could not correct",
            "`nvidia-smi nvlink -e` counts them",
        ),
        Status.UNSUPPORTED_PTX_VERSION: _Words(
            "the PTX is newer than this driver reads",
            "update the driver, or compile with an older CUDA or to a cubin",
        ),
        Status.CONTAINED: _Words("the device contained a hardware error"),
        Status.OPERATING_SYSTEM: _Words(
            "a call to the operating system failed",
            "look at the permissions of /dev/nvidia* and at the limits of the process",
        ),
        Status.INVALID_HANDLE: _Words("not a handle that is valid here"),
        Status.ILLEGAL_STATE: _Words("the resource is not in a state that permits this"),
        Status.NOT_FOUND: _Words("there is no such name"),
        Status.NOT_READY: _Words("the work has not finished yet", "synchronize before this call"),
        Status.ILLEGAL_ADDRESS: _Words("a kernel used an address that it may not", _SANITIZER),
        Status.LAUNCH_OUT_OF_RESOURCES: _Words(
            "the launch needs more registers or shared memory than a multiprocessor has",
            "launch fewer threads per block, or compile with a bound on registers",
        ),
        Status.LAUNCH_TIMEOUT: _Words(
            "a kernel ran longer than the display's watchdog allows",
            "split the kernel, or use a device without a display",
        ),
        Status.CONTEXT_IS_DESTROYED: _Words("the context is no longer there"),
        Status.ASSERT: _Words("an assert in a kernel failed", "stderr names the file and the line"),
        Status.TOO_MANY_PEERS: _Words("the device has all the peers that it can have"),
        Status.HARDWARE_STACK_ERROR: _Words("the stack of a kernel is damaged or too small"),
        Status.ILLEGAL_INSTRUCTION: _Words(
            "a kernel reached an instruction that the device has not"
        ),
        Status.MISALIGNED_ADDRESS: _Words(
            "a kernel used an address that is not aligned", _SANITIZER
        ),
        Status.INVALID_ADDRESS_SPACE: _Words(
            "a kernel used an address in the wrong kind of memory", _SANITIZER
        ),
        Status.INVALID_PC: _Words("a kernel ran out of its code"),
        Status.LAUNCH_FAILED: _Words("a kernel failed while it ran", _SANITIZER),
        Status.TENSOR_MEMORY_LEAK: _Words("a kernel ended without freeing its tensor memory"),
        Status.NOT_PERMITTED: _Words("this is not permitted here"),
        Status.NOT_SUPPORTED: _Words("this device or driver does not support it"),
        Status.SYSTEM_NOT_READY: _Words(
            "the system is not ready for CUDA",
            "with NVSwitch, nvidia-fabricmanager of the driver's version must be running; "
            "`cudakit doctor` looks further",
        ),
        Status.SYSTEM_DRIVER_MISMATCH: _Words(
            "libcuda and the kernel module are of different drivers",
            "reboot after an update of the driver, and take cuda-compat off LD_LIBRARY_PATH",
        ),
        Status.COMPAT_NOT_SUPPORTED_ON_DEVICE: _Words(
            "the forward-compatibility libcuda does not support this device",
            "take cuda-compat off LD_LIBRARY_PATH, and update the driver instead",
        ),
        Status.MPS_CONNECTION_FAILED: _Words(
            "no answer from the MPS daemon", "start nvidia-cuda-mps-control, or unset CUDA_MPS_*"
        ),
        Status.MPS_CLIENT_TERMINATED: _Words("the MPS server ended this client"),
        Status.STREAM_CAPTURE_UNSUPPORTED: _Words(
            "this is not permitted while a stream is capturing"
        ),
        Status.STREAM_CAPTURE_INVALIDATED: _Words("an earlier error has spoiled the capture"),
        Status.STREAM_CAPTURE_UNMATCHED: _Words("the capture did not begin in this stream"),
        Status.STREAM_CAPTURE_UNJOINED: _Words(
            "a stream that the capture forked into was not joined",
            "let the stream where the capture began wait on an event of the other",
        ),
        Status.STREAM_CAPTURE_ISOLATION: _Words("the work depends on work outside of the capture"),
        Status.STREAM_CAPTURE_IMPLICIT: _Words(
            "the legacy default stream would have to wait for the capture",
            "use a stream of your own, or capture in a non-blocking stream",
        ),
        Status.CAPTURED_EVENT: _Words("the event was last recorded inside a capture"),
        Status.STREAM_CAPTURE_WRONG_THREAD: _Words("another thread began the capture"),
        Status.GRAPH_EXEC_UPDATE_FAILURE: _Words(
            "the executable graph cannot become what the graph is, and stays as it was",
            "capture the same work with other parameters, or instantiate the graph anew",
        ),
        Status.EXTERNAL_DEVICE: _Words("a device outside of CUDA signalled an error"),
        Status.UNKNOWN: _Words(
            "the driver does not say why", "the kernel's log may: dmesg | grep -i nvrm"
        ),
    }
)


def cuda_error(code: int, *, seen: str = "", name: str = "", text: str = "") -> CudaError:
    """Return the CudaError of a CUresult; ``seen`` are values to append to its message.

    ``name`` and ``text`` are the driver's own, used for codes that are not in this module.
    """
    if code not in _WORDS:
        return CudaError(code, name or f"CUDA error {code}", _with(text or "no explanation", seen))
    status, words = Status(code), _WORDS[code]
    hints = (_END_PROCESS if status in STICKY else "", words.hint)
    return CudaError(
        code,
        f"CUDA_ERROR_{status.name}",
        _with(words.why, seen),
        hint="; ".join(filter(None, hints)),
    )


def _with(why: str, seen: str) -> str:
    return f"{why}: {seen}" if seen else why
