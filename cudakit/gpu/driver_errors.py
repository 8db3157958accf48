"""The error codes of the CUDA driver, with their meaning and remedy; the simulated device raises the same.

Source of the codes: CUDA Driver API, Data types used by CUDA driver, CUresult.
"""

from __future__ import annotations

from enum import IntEnum

from cudakit.errors import CudaError

_END_PROCESS = (
    "the context is lost, and every later call will fail: end this process and start it again"
)
_SANITIZER = "compute-sanitizer shows the kernel and the line"


class Status(IntEnum):
    """The common values of CUresult, without the prefix CUDA_ERROR_: code, meaning and remedy."""

    why: str
    hint: str

    def __new__(cls, code: int, why: str = "", hint: str = "") -> Status:
        member = int.__new__(cls, code)
        member._value_ = code
        member.why, member.hint = why, hint
        return member

    INVALID_VALUE = 1, "an argument is outside of what the call takes"
    OUT_OF_MEMORY = (
        2,
        "the device has not enough free memory",
        "free memory, or ask for less; `cudakit memviz` shows who holds it, "
        "`nvidia-smi` which process",
    )
    NOT_INITIALIZED = (
        3,
        "CUDA is not initialized in this process",
        "a forked child cannot use CUDA once its parent has: start it with spawn",
    )
    DEINITIALIZED = 4, "the driver is shutting down with this process"
    STUB_LIBRARY = (
        34,
        "the stub of libcuda was loaded in place of the driver's",
        "take the directory `stubs` off LD_LIBRARY_PATH",
    )
    DEVICE_UNAVAILABLE = (
        46,
        "the device is busy or not to be used",
        "another process may hold it exclusively: `nvidia-smi -q -d COMPUTE`",
    )
    NO_DEVICE = (
        100,
        "the driver sees no device that can run CUDA",
        "look at CUDA_VISIBLE_DEVICES, and in a container at --gpus; `cudakit doctor` looks further",
    )
    INVALID_DEVICE = 101, "there is no such device"
    INVALID_IMAGE = 200, "the kernel image cannot be read: it is no cubin, fatbin or PTX"
    INVALID_CONTEXT = 201, "no context is current in this thread"
    MAP_FAILED = 205, "memory could not be mapped"
    NO_BINARY_FOR_GPU = (
        209,
        "the image has no code for this device",
        "compile for its compute capability, or add PTX",
    )
    ECC_UNCORRECTABLE = (
        214,
        "the device found a memory error that it could not correct",
        "the device may need a reset or replacement: `nvidia-smi -q -d ECC,ROW_REMAPPER`",
    )
    UNSUPPORTED_LIMIT = 215, "the device has no such limit"
    PEER_ACCESS_UNSUPPORTED = (
        217,
        "one device cannot use the memory of the other",
        "copy between them instead; `nvidia-smi topo -p2p r` shows which pairs can",
    )
    INVALID_PTX = 218, "the PTX does not compile"
    NVLINK_UNCORRECTABLE = (
        220,
        "an NVLink found an error that it could not correct",
        "`nvidia-smi nvlink -e` counts them",
    )
    UNSUPPORTED_PTX_VERSION = (
        222,
        "the PTX is newer than this driver reads",
        "update the driver, or compile with an older CUDA or to a cubin",
    )
    CONTAINED = 226, "the device contained a hardware error"
    OPERATING_SYSTEM = (
        304,
        "a call to the operating system failed",
        "look at the permissions of /dev/nvidia* and at the limits of the process",
    )
    INVALID_HANDLE = 400, "not a handle that is valid here"
    ILLEGAL_STATE = 401, "the resource is not in a state that permits this"
    NOT_FOUND = 500, "there is no such name"
    NOT_READY = 600, "the work has not finished yet", "synchronize before this call"
    ILLEGAL_ADDRESS = 700, "a kernel used an address that it may not", _SANITIZER
    LAUNCH_OUT_OF_RESOURCES = (
        701,
        "the launch needs more registers or shared memory than a multiprocessor has",
        "launch fewer threads per block, or compile with a bound on registers",
    )
    LAUNCH_TIMEOUT = (
        702,
        "a kernel ran longer than the display's watchdog allows",
        "split the kernel, or use a device without a display",
    )
    CONTEXT_IS_DESTROYED = 709, "the context is no longer there"
    ASSERT = 710, "an assert in a kernel failed", "stderr names the file and the line"
    TOO_MANY_PEERS = 711, "the device has all the peers that it can have"
    HARDWARE_STACK_ERROR = 714, "the stack of a kernel is damaged or too small"
    ILLEGAL_INSTRUCTION = 715, "a kernel reached an instruction that the device has not"
    MISALIGNED_ADDRESS = 716, "a kernel used an address that is not aligned", _SANITIZER
    INVALID_ADDRESS_SPACE = 717, "a kernel used an address in the wrong kind of memory", _SANITIZER
    INVALID_PC = 718, "a kernel ran out of its code"
    LAUNCH_FAILED = 719, "a kernel failed while it ran", _SANITIZER
    TENSOR_MEMORY_LEAK = 721, "a kernel ended without freeing its tensor memory"
    NOT_PERMITTED = 800, "this is not permitted here"
    NOT_SUPPORTED = 801, "this device or driver does not support it"
    SYSTEM_NOT_READY = (
        802,
        "the system is not ready for CUDA",
        "with NVSwitch, nvidia-fabricmanager of the driver's version must be running; "
        "`cudakit doctor` looks further",
    )
    SYSTEM_DRIVER_MISMATCH = (
        803,
        "libcuda and the kernel module are of different drivers",
        "reboot after an update of the driver, and take cuda-compat off LD_LIBRARY_PATH",
    )
    COMPAT_NOT_SUPPORTED_ON_DEVICE = (
        804,
        "the forward-compatibility libcuda does not support this device",
        "take cuda-compat off LD_LIBRARY_PATH, and update the driver instead",
    )
    MPS_CONNECTION_FAILED = (
        805,
        "no answer from the MPS daemon",
        "start nvidia-cuda-mps-control, or unset CUDA_MPS_*",
    )
    MPS_CLIENT_TERMINATED = 810, "the MPS server ended this client"
    STREAM_CAPTURE_UNSUPPORTED = 900, "this is not permitted while a stream is capturing"
    STREAM_CAPTURE_INVALIDATED = 901, "an earlier error has spoiled the capture"
    STREAM_CAPTURE_UNMATCHED = 903, "the capture did not begin in this stream"
    STREAM_CAPTURE_UNJOINED = (
        904,
        "a stream that the capture forked into was not joined",
        "let the stream where the capture began wait on an event of the other",
    )
    STREAM_CAPTURE_ISOLATION = 905, "the work depends on work outside of the capture"
    STREAM_CAPTURE_IMPLICIT = (
        906,
        "the legacy default stream would have to wait for the capture",
        "use a stream of your own, or capture in a non-blocking stream",
    )
    CAPTURED_EVENT = 907, "the event was last recorded inside a capture"
    STREAM_CAPTURE_WRONG_THREAD = 908, "another thread began the capture"
    GRAPH_EXEC_UPDATE_FAILURE = (
        910,
        "the executable graph cannot become what the graph is, and stays as it was",
        "capture the same work with other parameters, or instantiate the graph anew",
    )
    EXTERNAL_DEVICE = 911, "a device outside of CUDA signalled an error"
    UNKNOWN = 999, "the driver does not say why", "the kernel's log may: dmesg | grep -i nvrm"


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


_BY_CODE = {int(status): status for status in Status}


def cuda_error(code: int, *, seen: str = "", name: str = "", text: str = "") -> CudaError:
    """Return the CudaError of a CUresult; ``seen`` are values to append to its message.

    ``name`` and ``text`` are the driver's own, used for codes that are not in this module.
    """
    if code not in _BY_CODE:
        return CudaError(code, name or f"CUDA error {code}", _with(text or "no explanation", seen))
    status = _BY_CODE[code]
    hints = (_END_PROCESS if status in STICKY else "", status.hint)
    return CudaError(
        code,
        f"CUDA_ERROR_{status.name}",
        _with(status.why, seen),
        hint="; ".join(filter(None, hints)),
    )


def _with(why: str, seen: str) -> str:
    return f"{why}: {seen}" if seen else why
