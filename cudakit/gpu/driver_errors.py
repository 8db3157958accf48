"""The error codes of the CUDA driver and runtime: meaning, usual causes and remedy.

The simulated device raises the same errors as the driver. Source of the codes and meanings: CUDA Driver
API, "Data types used by CUDA driver", CUresult; CUDA Runtime API, "Data types used by CUDA Runtime",
cudaError.
"""

from __future__ import annotations

from enum import IntEnum

from cudakit.errors import CudaError

_RESTART_PROCESS = "the CUDA context is lost and every later call fails: restart the process"
_SANITIZER = "run the program under compute-sanitizer: it prints the kernel and the source line"
_OUT_OF_BOUNDS = "an index out of bounds, a freed buffer, or a host pointer passed to a kernel"
_MPS_RESTART = "restart MPS: echo quit | nvidia-cuda-mps-control; nvidia-cuda-mps-control -d"
_CAPTURE_STREAM = "capture on a stream created by the program, not on the default stream"


class Status(IntEnum):
    """The values of CUresult, without the prefix CUDA_ERROR_: code, meaning, action, usual causes."""

    meaning: str
    action: str
    causes: str

    def __new__(cls, code: int, meaning: str = "", action: str = "", causes: str = "") -> Status:
        status = int.__new__(cls, code)
        status._value_ = code
        status.meaning, status.action, status.causes = meaning, action, causes
        return status

    INVALID_VALUE = 1, "an argument of the call is out of range", "", "a null pointer, size or flag"
    OUT_OF_MEMORY = (
        2,
        "the device does not have enough free memory",
        "free memory or allocate less; `cudakit memviz` shows the allocations of a snapshot, "
        "`cudakit devices -p` the processes on the GPU",
        "a batch that is too large, a leak, fragmentation, or another process on the same GPU",
    )
    NOT_INITIALIZED = (
        3,
        "CUDA is not initialized in this process",
        "start worker processes with spawn instead of fork",
        "a process forked after its parent used CUDA",
    )
    DEINITIALIZED = (
        4,
        "the driver is shutting down",
        "free CUDA resources before the interpreter exits",
        "a destructor or thread that calls CUDA while the process exits",
    )
    PROFILER_DISABLED = (
        5,
        "the profiler is not initialized for this run",
        "",
        "an external profiler",
    )
    PROFILER_NOT_INITIALIZED = 6, "the profiler is not initialized (not returned since CUDA 5.0)"
    PROFILER_ALREADY_STARTED = 7, "the profiler runs already (not returned since CUDA 5.0)"
    PROFILER_ALREADY_STOPPED = 8, "the profiler is stopped already (not returned since CUDA 5.0)"
    STUB_LIBRARY = (
        34,
        "the stub libcuda was loaded instead of the driver's",
        "remove the directory `stubs` from LD_LIBRARY_PATH (CK008)",
        "LD_LIBRARY_PATH contains the CUDA toolkit's lib64/stubs",
    )
    CALL_REQUIRES_NEWER_DRIVER = 36, "the call needs a newer driver", "update the driver (CK009)"
    DEVICE_UNAVAILABLE = (
        46,
        "the device is busy, or its compute mode forbids use",
        "find the process with `cudakit devices -p`; `sudo nvidia-smi -c DEFAULT` allows several processes",
        "another process on a GPU in exclusive-process mode (CK018)",
    )
    MULTICAST_RESOURCE_FULL = (
        47,
        "no hardware resource to bind memory to a multicast object is left",
    )
    NO_DEVICE = (
        100,
        "the driver found no CUDA device",
        "check device nodes (CK002), CUDA_VISIBLE_DEVICES (CK014), container (CK016) and MIG (CK017)",
        "CUDA_VISIBLE_DEVICES hides every GPU, a container without --gpus, a MIG GPU without instances",
    )
    INVALID_DEVICE = (
        101,
        "the device index is not valid",
        "list the devices with `cudakit devices`; restart a container that lost its device nodes",
        "an index beyond the visible devices, or device nodes that the container has lost",
    )
    DEVICE_NOT_LICENSED = 102, "the vGPU has no license", "start nvidia-gridd on this machine"
    INVALID_IMAGE = 200, "the kernel image is not a valid cubin, fatbin or PTX"
    INVALID_CONTEXT = (
        201,
        "the calling thread has no current CUDA context",
        "call cuCtxSetCurrent, or any runtime API function, in this thread first",
    )
    CONTEXT_ALREADY_CURRENT = 202, "the context is already current (not returned since CUDA 3.2)"
    MAP_FAILED = 205, "mapping memory failed"
    UNMAP_FAILED = 206, "unmapping memory failed"
    ARRAY_IS_MAPPED = 207, "the array is mapped and cannot be destroyed"
    ALREADY_MAPPED = 208, "the resource is already mapped"
    NO_BINARY_FOR_GPU = (
        209,
        "the image has no code for this device",
        "compile for the device's compute capability or include PTX; CK010 compares builds and GPUs",
        "a GPU that is newer or older than the build of the library",
    )
    ALREADY_ACQUIRED = 210, "the resource is already acquired"
    NOT_MAPPED = 211, "the resource is not mapped"
    NOT_MAPPED_AS_ARRAY = 212, "the resource is not mapped as an array"
    NOT_MAPPED_AS_POINTER = 213, "the resource is not mapped as a pointer"
    ECC_UNCORRECTABLE = (
        214,
        "the device detected a memory error that ECC cannot correct",
        "reset the GPU; replace it if the error returns (`nvidia-smi -q -d ECC,ROW_REMAPPER`)",
        "failing GPU memory (CK027, CK028, Xid 48)",
    )
    UNSUPPORTED_LIMIT = 215, "the device does not support this limit"
    CONTEXT_ALREADY_IN_USE = 216, "the context is already bound to another thread"
    PEER_ACCESS_UNSUPPORTED = (
        217,
        "one device cannot access the memory of the other",
        "copy between the devices instead; `cudakit devices -t` shows which pairs have peer access",
        "devices without a common PCIe root or NVLink, an IOMMU, or a virtual machine",
    )
    INVALID_PTX = 218, "compiling the PTX failed", "read the log of the PTX compiler"
    INVALID_GRAPHICS_CONTEXT = 219, "the OpenGL or Direct3D context is not valid"
    NVLINK_UNCORRECTABLE = (
        220,
        "the device detected an NVLink error that it cannot correct",
        "check the error counters: nvidia-smi nvlink -e",
        "a failing NVLink or NVSwitch (Xid 74)",
    )
    JIT_COMPILER_NOT_FOUND = 221, "libnvidia-ptxjitcompiler was not found", "reinstall the driver"
    UNSUPPORTED_PTX_VERSION = (
        222,
        "the driver cannot compile PTX of this version",
        "update the driver, or compile with an older CUDA or to machine code (CK009)",
        "NVRTC, nvcc or Triton of a newer CUDA than the driver's",
    )
    JIT_COMPILATION_DISABLED = 223, "PTX compilation is disabled", "unset CUDA_DISABLE_PTX_JIT"
    UNSUPPORTED_EXEC_AFFINITY = 224, "the device does not support this execution affinity"
    UNSUPPORTED_DEVSIDE_SYNC = 225, "the PTX calls cudaDeviceSynchronize on the device: unsupported"
    CONTAINED = (
        226,
        "an exception occurred, and the GPU's error containment limited its effects",
        "check the kernel log for Xid errors (CK033)",
        "an invalid access to another GPU's memory over NVLink, or a hardware error",
    )
    INSUFFICIENT_LOADER_VERSION = (
        227,
        "the loader is too old for the fatbin",
        "update the driver, or compile with an older CUDA (CK009)",
    )
    INVALID_SOURCE = 300, "the kernel source is not valid"
    FILE_NOT_FOUND = 301, "the file was not found"
    SHARED_OBJECT_SYMBOL_NOT_FOUND = 302, "a symbol of a shared library was not found"
    SHARED_OBJECT_INIT_FAILED = 303, "initializing a shared library failed"
    OPERATING_SYSTEM = (
        304,
        "a call to the operating system failed",
        "check the permissions of /dev/nvidia* (CK002), memory limits (CK035) and ulimit -n",
    )
    INVALID_HANDLE = (
        400,
        "the handle is not valid",
        "",
        "a stream, event or module that was destroyed",
    )
    ILLEGAL_STATE = 401, "the resource is not in a state that allows this operation"
    LOSSY_QUERY = 402, "the query would lose information about an object from a newer API"
    NOT_FOUND = 500, "the named symbol was not found", "", "a misspelled or mangled kernel name"
    NOT_READY = 600, "the work has not finished", "synchronize before this call"
    ILLEGAL_ADDRESS = (
        700,
        "a kernel accessed an invalid memory address",
        _SANITIZER,
        f"{_OUT_OF_BOUNDS}; the error is often reported by a call after the faulty kernel",
    )
    LAUNCH_OUT_OF_RESOURCES = (
        701,
        "the launch needs more registers or shared memory than an SM has",
        "launch fewer threads per block, or limit registers (__launch_bounds__, -maxrregcount)",
    )
    LAUNCH_TIMEOUT = (
        702,
        "a kernel ran longer than the display watchdog allows",
        "split the kernel, or use a GPU without a display",
    )
    LAUNCH_INCOMPATIBLE_TEXTURING = 703, "the launch uses an incompatible texture mode"
    PEER_ACCESS_ALREADY_ENABLED = 704, "peer access is already enabled"
    PEER_ACCESS_NOT_ENABLED = 705, "peer access is not enabled"
    PRIMARY_CONTEXT_ACTIVE = 708, "the device's primary context is already initialized"
    CONTEXT_IS_DESTROYED = 709, "the current context was destroyed or not yet initialized"
    ASSERT = (
        710,
        "an assertion in a kernel failed",
        "read stderr: it has the file and line of the assertion",
        "in PyTorch mostly an index out of bounds, such as a class label or token id",
    )
    TOO_MANY_PEERS = 711, "the device has reached its maximum number of peers"
    HOST_MEMORY_ALREADY_REGISTERED = 712, "the host memory is already registered (pinned)"
    HOST_MEMORY_NOT_REGISTERED = 713, "the host memory is not registered (pinned)"
    HARDWARE_STACK_ERROR = (
        714,
        "the stack of a kernel is corrupt or too small",
        _SANITIZER,
        "deep recursion, or a write past a local array",
    )
    ILLEGAL_INSTRUCTION = (
        715,
        "a kernel executed an illegal instruction",
        _SANITIZER,
        "code for another architecture, or a corrupt image",
    )
    MISALIGNED_ADDRESS = (
        716,
        "a kernel accessed a misaligned address",
        _SANITIZER,
        "a vector load (float4) from a pointer that is not a multiple of its size",
    )
    INVALID_ADDRESS_SPACE = (
        717,
        "an instruction got an address of the wrong memory space",
        _SANITIZER,
        "a shared-memory or local pointer passed to an instruction for global memory",
    )
    INVALID_PC = (
        718,
        "a kernel jumped outside of its code",
        _SANITIZER,
        "a corrupt function pointer",
    )
    LAUNCH_FAILED = (
        719,
        "a kernel failed while it ran",
        _SANITIZER,
        "an invalid pointer, or shared memory accessed out of bounds",
    )
    COOPERATIVE_LAUNCH_TOO_LARGE = (
        720,
        "the cooperative launch has more blocks than fit on the device at once",
        "launch at most cuOccupancyMaxActiveBlocksPerMultiprocessor times the number of SMs",
    )
    TENSOR_MEMORY_LEAK = 721, "a kernel ended without freeing its tensor memory"
    NOT_PERMITTED = 800, "the operation is not permitted"
    NOT_SUPPORTED = 801, "this device or driver does not support the operation"
    SYSTEM_NOT_READY = (
        802,
        "the system is not ready to run CUDA",
        "start nvidia-fabricmanager in exactly the driver's version (CK006)",
        "on machines with NVSwitch, the fabric manager is not running",
    )
    SYSTEM_DRIVER_MISMATCH = (
        803,
        "libcuda and the kernel module have different versions",
        "reboot after a driver update; remove cuda-compat from LD_LIBRARY_PATH (CK004, CK008)",
        "a driver update without a reboot, or an unsuitable cuda-compat package",
    )
    COMPAT_NOT_SUPPORTED_ON_DEVICE = (
        804,
        "the forward-compatibility libcuda does not support this device",
        "remove cuda-compat from LD_LIBRARY_PATH and update the driver instead (CK008)",
        "cuda-compat, which supports data-center GPUs only, on another GPU",
    )
    MPS_CONNECTION_FAILED = (
        805,
        "the MPS daemon does not answer",
        "start the daemon (nvidia-cuda-mps-control -d), or unset CUDA_MPS_PIPE_DIRECTORY (CK019)",
        "a leftover pipe directory, another user's daemon, or a container without this directory",
    )
    MPS_RPC_FAILURE = 806, "a call from the client to the MPS server failed", _MPS_RESTART
    MPS_SERVER_NOT_READY = 807, "the MPS server is starting or recovering", "try again"
    MPS_MAX_CLIENTS_REACHED = 808, "the MPS server has too many clients", "end a client"
    MPS_MAX_CONNECTIONS_REACHED = 809, "the MPS server has too many connections", "end a client"
    MPS_CLIENT_TERMINATED = (
        810,
        "the MPS server terminated this client",
        "",
        "a fatal error of another client of the same MPS server",
    )
    CDP_NOT_SUPPORTED = (
        811,
        "the module uses dynamic parallelism, which the configuration does not support",
        "",
        "MPS",
    )
    CDP_VERSION_MISMATCH = 812, "a module mixes incompatible versions of dynamic parallelism"
    STREAM_CAPTURE_UNSUPPORTED = (
        900,
        "the operation is not permitted while a stream is capturing",
        "move it out of the captured region",
        "a synchronization, cudaMalloc, or print of a tensor during graph capture",
    )
    STREAM_CAPTURE_INVALIDATED = (
        901,
        "an earlier error invalidated the capture",
        "find the first error",
    )
    STREAM_CAPTURE_MERGE = 902, "the operation would merge two independent captures"
    STREAM_CAPTURE_UNMATCHED = 903, "the capture did not begin on this stream"
    STREAM_CAPTURE_UNJOINED = (
        904,
        "a stream forked into the capture was not joined",
        "make the stream that began the capture wait for an event of the other stream",
    )
    STREAM_CAPTURE_ISOLATION = 905, "the work depends on work outside of the capture"
    STREAM_CAPTURE_IMPLICIT = (
        906,
        "the legacy default stream would have to wait for the capture",
        _CAPTURE_STREAM,
    )
    CAPTURED_EVENT = 907, "the event was last recorded in a capturing stream"
    STREAM_CAPTURE_WRONG_THREAD = 908, "another thread began the capture"
    TIMEOUT = 909, "the wait reached its timeout"
    GRAPH_EXEC_UPDATE_FAILURE = (
        910,
        "the executable graph cannot be updated from this graph and stays unchanged",
        "capture the same operations with other parameters, or instantiate a new graph",
    )
    EXTERNAL_DEVICE = 911, "a device outside of CUDA reported an error"
    INVALID_CLUSTER_SIZE = 912, "the cluster size of the launch is not valid"
    FUNCTION_NOT_LOADED = 913, "the function is not loaded"
    INVALID_RESOURCE_TYPE = 914, "the type of a resource is not valid for the operation"
    INVALID_RESOURCE_CONFIGURATION = 915, "the resources do not suit the operation"
    KEY_ROTATION = 916, "the key rotation of confidential computing failed"
    STREAM_DETACHED = 917, "the stream is detached", "", "its green context was destroyed"
    GRAPH_RECAPTURE_FAILURE = 918, "capturing into an existing graph failed and was stopped"
    FABRIC_NOT_READY = (
        919,
        "the GPU fabric (NVSwitch) was not ready in time",
        "try again; CUDA_FABRIC_INIT_TIMEOUT_MS sets the time limit; check the fabric manager (CK006)",
    )
    UNKNOWN = (
        999,
        "the driver gives no reason",
        "reload the UVM module: sudo rmmod nvidia_uvm; sudo modprobe nvidia_uvm",
        "a missing or broken /dev/nvidia-uvm (CK002), often after suspend, or a hardware error",
    )


# Errors that leave the CUDA context unusable. CUresult documents this for all except 214 and 220.
STICKY = frozenset(
    map(Status, (214, 220, 226, 700, 702, 710, *range(714, 720), 721, 810, 911)),
)

# Names of cudaError values that cannot be derived from the name of the CUresult, by code.
_RUNTIME_NAMES = {
    2: "MemoryAllocation",
    3: "InitializationError",
    4: "CudartUnloading",
    46: "DevicesUnavailable",
    200: "InvalidKernelImage",
    201: "DeviceUninitialized",
    205: "MapBufferObjectFailed",
    206: "UnmapBufferObjectFailed",
    209: "NoKernelImageForDevice",
    214: "ECCUncorrectable",
    216: "DeviceAlreadyInUse",
    225: "UnsupportedDevSideSync",
    400: "InvalidResourceHandle",
    500: "SymbolNotFound",
    708: "SetOnActiveProcess",
    719: "LaunchFailure",
}
# Codes of CUresult that have no cudaError.
_DRIVER_ONLY = (47, 202, 916)

# Name, meaning and action of the cudaError values that have no CUresult, by code.
# Deprecated errors name the CUDA version since which the runtime does not return them.
RUNTIME_ONLY: dict[int, tuple[str, str, str]] = {
    9: (
        "cudaErrorInvalidConfiguration",
        "the launch configuration is not valid for the device",
        "check the grid and block sizes: at most 1024 threads per block, no dimension of 0",
    ),
    10: (
        "cudaErrorVersionTranslation",
        "the runtime does not know the parameters of a graph node that a newer driver returned",
        "update the CUDA runtime",
    ),
    12: (
        "cudaErrorInvalidPitchValue",
        "the pitch of a copy or array is out of range",
        "use a pitch of at least the width of a row in bytes, as cudaMallocPitch returns it",
    ),
    13: (
        "cudaErrorInvalidSymbol",
        "the symbol is not a variable of the device code",
        "pass the __device__ or __constant__ variable, not its name as a string or a pointer to it",
    ),
    16: (
        "cudaErrorInvalidHostPointer",
        "a host pointer is not valid (not returned since CUDA 10.1)",
        "",
    ),
    17: (
        "cudaErrorInvalidDevicePointer",
        "a device pointer is not valid (not returned since CUDA 10.1)",
        "",
    ),
    18: ("cudaErrorInvalidTexture", "the texture is not valid", ""),
    19: (
        "cudaErrorInvalidTextureBinding",
        "the texture is not bound, or not to this memory",
        "bind the texture before cudaGetTextureAlignmentOffset, or use texture objects",
    ),
    20: (
        "cudaErrorInvalidChannelDescriptor",
        "the channel descriptor has an invalid format or size",
        "create the descriptor with cudaCreateChannelDesc",
    ),
    21: (
        "cudaErrorInvalidMemcpyDirection",
        "the direction of a copy is not a value of cudaMemcpyKind",
        "pass cudaMemcpyDefault: CUDA then finds the direction from the pointers",
    ),
    22: (
        "cudaErrorAddressOfConstant",
        "the program took the address of a constant variable (not returned since CUDA 3.1)",
        "",
    ),
    23: (
        "cudaErrorTextureFetchFailed",
        "a texture could not be fetched (not returned since CUDA 3.1)",
        "",
    ),
    24: (
        "cudaErrorTextureNotBound",
        "a texture was not bound (not returned since CUDA 3.1)",
        "",
    ),
    25: (
        "cudaErrorSynchronizationError",
        "a synchronization failed (not returned since CUDA 3.1)",
        "",
    ),
    26: (
        "cudaErrorInvalidFilterSetting",
        "a texture of integers is read with linear filtering",
        "use cudaFilterModePoint, or read the texture as normalized floats",
    ),
    27: (
        "cudaErrorInvalidNormSetting",
        "a texture of this type cannot be read as normalized floats",
        "use cudaReadModeElementType, or a texture of 8-bit or 16-bit integers",
    ),
    28: (
        "cudaErrorMixedDeviceExecution",
        "device code and emulated device code were mixed (not returned since CUDA 3.1)",
        "",
    ),
    31: (
        "cudaErrorNotYetImplemented",
        "the call is not implemented (not returned since CUDA 4.1)",
        "",
    ),
    32: (
        "cudaErrorMemoryValueTooLarge",
        "an emulated device pointer is too large (not returned since CUDA 3.1)",
        "",
    ),
    35: (
        "cudaErrorInsufficientDriver",
        "the driver is older than the CUDA runtime needs",
        "update the driver, or install a build for the driver's CUDA version (CK009)",
    ),
    37: ("cudaErrorInvalidSurface", "the surface is not valid", ""),
    43: (
        "cudaErrorDuplicateVariableName",
        "two global or constant variables have the same name",
        "rename a variable, or make it static",
    ),
    44: (
        "cudaErrorDuplicateTextureName",
        "two textures have the same name",
        "rename a texture, or use texture objects",
    ),
    45: (
        "cudaErrorDuplicateSurfaceName",
        "two surfaces have the same name",
        "rename a surface, or use surface objects",
    ),
    49: (
        "cudaErrorIncompatibleDriverContext",
        "the runtime cannot use the current context",
        "use the primary context of the device (cuDevicePrimaryCtxRetain), and set its flags first",
    ),
    52: (
        "cudaErrorMissingConfiguration",
        "a kernel was launched without grid and block sizes",
        "launch it with kernel<<<grid, block>>>() or cudaLaunchKernel",
    ),
    53: (
        "cudaErrorPriorLaunchFailure",
        "an earlier launch failed (not returned since CUDA 3.1)",
        "",
    ),
    65: (
        "cudaErrorLaunchMaxDepthExceeded",
        "kernels that launch kernels are nested too deeply",
        "launch fewer levels of kernels from the device",
    ),
    66: (
        "cudaErrorLaunchFileScopedTex",
        "a kernel that uses a texture of file scope was launched from the device",
        "use texture objects",
    ),
    67: (
        "cudaErrorLaunchFileScopedSurf",
        "a kernel that uses a surface of file scope was launched from the device",
        "use surface objects",
    ),
    68: (
        "cudaErrorSyncDepthExceeded",
        "cudaDeviceSynchronize was called on the device at a nesting level above the limit",
        "raise the limit with cudaDeviceSetLimit(cudaLimitDevRuntimeSyncDepth, ...)",
    ),
    69: (
        "cudaErrorLaunchPendingCountExceeded",
        "too many launches from the device wait for their start",
        "raise the limit with cudaDeviceSetLimit(cudaLimitDevRuntimePendingLaunchCount, ...)",
    ),
    98: (
        "cudaErrorInvalidDeviceFunction",
        "the function does not exist on the device, or was compiled for another architecture",
        "compile for the device's compute capability (CK010)",
    ),
    103: (
        "cudaErrorSoftwareValidityNotEstablished",
        "a self-test of the runtime failed, or could not run",
        "reinstall the driver and the runtime",
    ),
    127: ("cudaErrorStartupFailure", "the CUDA runtime failed to start", ""),
    10000: (
        "cudaErrorApiFailureBase",
        "errors of the driver were returned as 10000 plus their code (not since CUDA 4.1)",
        "",
    ),
}


def runtime_name(status: Status) -> str:
    """Return the name of the same error in the runtime API, "" if that API has no such error."""
    if status in _DRIVER_ONLY:
        return ""
    camel = "".join(word.capitalize() for word in status.name.split("_"))
    return f"cudaError{_RUNTIME_NAMES.get(int(status), camel)}"


def remedy(status: Status) -> str:
    """Return the advice for an error, "" if there is none."""
    return "; ".join(filter(None, (_RESTART_PROCESS if status in STICKY else "", status.action)))


_BY_CODE = {int(status): status for status in Status}


def remedy_of(code: int) -> str:
    """Return the advice for the code of a CUresult, "" if there is none."""
    return remedy(_BY_CODE[code]) if code in _BY_CODE else ""


def cuda_error(code: int, *, detail: str = "", name: str = "", text: str = "") -> CudaError:
    """Return the CudaError for a CUresult. ``detail`` is appended to its message.

    ``name`` and ``text`` come from the driver, and are used for codes that are not in this module.
    """
    if code not in _BY_CODE:
        return CudaError(
            code, name or f"CUDA error {code}", _with_detail(text or "no explanation", detail)
        )
    status = _BY_CODE[code]
    message = _with_detail(status.meaning, detail)
    return CudaError(code, f"CUDA_ERROR_{status.name}", message, hint=remedy(status))


def _with_detail(meaning: str, detail: str) -> str:
    return f"{meaning}: {detail}" if detail else meaning
