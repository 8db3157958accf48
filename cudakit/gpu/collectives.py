"""Libraries of collective operations on real devices: NCCL by its C functions, and torch.distributed.

NCCL's communicators are blocking ones: a non-blocking communicator starts a thread for every operation. A
rank never waits inside NCCL for its stream; ``synchronize`` polls instead, so that it can abort.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cudakit.errors import (
    CollectiveError,
    CudaError,
    EnvironmentUnusable,
    MissingDependency,
    Unsupported,
)
from cudakit.gpu.api import Ptr, Stream
from cudakit.gpu.api.collectives import (
    ROOT,
    Collective,
    CollectiveLibrary,
    CollectiveLibraryName,
)
from cudakit.gpu.vendor import TORCH_DTYPES, CudaDevice, DeviceBytes, cuda_major

LIBRARY_OVERRIDE = "CUDAKIT_NCCL_LIBRARY"
UNIQUE_ID_BYTES = 128

# Time in which ``synchronize`` polls NCCL without a pause. Afterwards it polls at intervals of _PAUSE_S.
_SPIN_S = 0.005
_PAUSE_S = 0.0002


def open_collectives(gpu: CudaDevice, library: CollectiveLibraryName = "nccl") -> CollectiveLibrary:
    """Open a library of collective operations. Raises MissingDependency with the package to install."""
    return TorchCollectives(gpu) if library == "torch" else Nccl(gpu)


# --- loading NCCL -------------------------------------------------------------------------------------------

_SONAME = "libnccl.so.2"
# Path of NCCL in the wheels nvidia-nccl-cu12 and nvidia-nccl-cu13, from which torch and JAX load NCCL.
_PATH_IN_PACKAGES = Path("nvidia", "nccl", "lib", _SONAME)
_RTLD_NOLOAD = 0x4  # Flag of dlopen in glibc.


class UniqueId(ctypes.Structure):
    """The type ncclUniqueId, which NCCL takes by value."""

    _fields_ = (("internal", ctypes.c_ubyte * UNIQUE_ID_BYTES),)


# The signatures of nccl.h, which have not changed since NCCL 2.7 added send and receive.
_INT, _SIZE, _POINTER = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p
_SIGNATURES = {
    "ncclGetVersion": (ctypes.POINTER(_INT),),
    "ncclGetUniqueId": (ctypes.POINTER(UniqueId),),
    "ncclCommInitRank": (ctypes.POINTER(_POINTER), _INT, UniqueId, _INT),
    "ncclCommDestroy": (_POINTER,),
    "ncclCommAbort": (_POINTER,),
    "ncclCommGetAsyncError": (_POINTER, ctypes.POINTER(_INT)),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    # Arguments: send buffer, receive buffer, count, data type, then reduction or root, communicator, stream.
    "ncclAllReduce": (_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
    "ncclReduceScatter": (_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
    "ncclAllGather": (_POINTER, _POINTER, _SIZE, _INT, _POINTER, _POINTER),
    "ncclBroadcast": (_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
    "ncclReduce": (_POINTER, _POINTER, _SIZE, _INT, _INT, _INT, _POINTER, _POINTER),
    # Arguments: buffer, count, data type, peer rank, communicator, stream.
    "ncclSend": (_POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
    "ncclRecv": (_POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER),
}


def load_nccl() -> tuple[ctypes.CDLL, str]:
    """Load NCCL, and return it with its path.

    A copy that the process has loaded already comes first, so that torch and cudakit share one copy; then the
    wheels on sys.path, then the search path of the system. The variable CUDAKIT_NCCL_LIBRARY names another
    file. Raises MissingDependency if no copy exists, EnvironmentUnusable if a file cannot be loaded.
    """
    if override_path := os.environ.get(LIBRARY_OVERRIDE):
        return _declare_functions(_open_library(override_path)), override_path
    try:
        return _declare_functions(
            ctypes.CDLL(_SONAME, mode=_RTLD_NOLOAD)
        ), f"{_SONAME} of this process"
    except OSError:
        pass  # The process has not loaded NCCL.
    for directory in sys.path:
        path = Path(directory) / _PATH_IN_PACKAGES
        if path.is_file():
            return _declare_functions(_open_library(str(path))), str(path)
    try:
        return _declare_functions(ctypes.CDLL(_SONAME)), f"{_SONAME} of the system"
    except OSError as error:
        raise MissingDependency(
            "NCCL", purpose="cudakit bench nccl", requirement=_missing_package()
        ) from error


def _open_library(path: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(path)
    except OSError as error:
        raise EnvironmentUnusable(
            f"NCCL cannot be loaded: {error}", hint=f"{LIBRARY_OVERRIDE}=FILE names another libnccl"
        ) from None


def _declare_functions(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the argument types of all functions. Raises EnvironmentUnusable if the library lacks one."""
    try:
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, _INT
        library.ncclGetErrorString.argtypes = (_INT,)
        library.ncclGetErrorString.restype = ctypes.c_char_p
    except AttributeError as error:
        raise EnvironmentUnusable(
            f"this NCCL is too old: {error}", hint=f"pip install '{_missing_package()}'"
        ) from None
    return library


def _missing_package() -> str:
    return "nvidia-nccl-cu12" if cuda_major() == 12 else "cudakit[nccl]"


# --- NCCL ---------------------------------------------------------------------------------------------------

# The values of ncclDataType_t by the name of the element type.
_DATA_TYPES = {
    "int8": 0,
    "int32": 2,
    "fp16": 6,
    "fp32": 7,
    "fp64": 8,
    "bf16": 9,
    "fp8_e4m3": 10,
    "fp8_e5m2": 11,
}
_SUM_OPERATION = 0  # The value of ncclSum in ncclRedOp_t.
# NCCL's function for each operation, and its arguments between the data type and the communicator (nccl.h).
_FUNCTIONS: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "all-reduce": ("ncclAllReduce", (_SUM_OPERATION,)),
    "all-gather": ("ncclAllGather", ()),
    "reduce-scatter": ("ncclReduceScatter", (_SUM_OPERATION,)),
    "broadcast": ("ncclBroadcast", (ROOT,)),
    "reduce": ("ncclReduce", (_SUM_OPERATION, ROOT)),
}
_SUCCESS, _IN_PROGRESS = 0, 7  # Values of ncclResult_t.
# Time in which ``synchronize`` polls without a pause. Afterwards it polls at intervals of _PAUSE_S.
_SPIN_S = 0.005
_PAUSE_S = 0.0002


class Nccl:
    """NCCL on one device."""

    def __init__(self, gpu: CudaDevice) -> None:
        self._gpu = gpu
        self._library, self.path = load_nccl()
        version_number = ctypes.c_int()
        self._check_status(self._library.ncclGetVersion(ctypes.byref(version_number)))
        self.version = format_version(version_number.value)

    def unique_id(self, host: str) -> bytes:  # noqa: ARG002 NCCL chooses its network interface itself
        """Return an id of ncclGetUniqueId."""
        unique_id = UniqueId()
        self._check_status(self._library.ncclGetUniqueId(ctypes.byref(unique_id)))
        return bytes(unique_id)

    def connect(self, unique_id: bytes, rank: int, rank_count: int) -> NcclCommunicator:
        """Join a group of ranks (ncclCommInitRank)."""
        handle = ctypes.c_void_p()
        id_value = UniqueId.from_buffer_copy(unique_id[:UNIQUE_ID_BYTES])
        self.call("ncclCommInitRank", ctypes.byref(handle), rank_count, id_value, rank)
        return NcclCommunicator(self, self._gpu, handle, rank, rank_count)

    def call(self, name: str, *args: object) -> None:
        """Call a function of NCCL with the device's context current. Raises CollectiveError."""
        self._check_status(self._gpu.in_context(getattr(self._library, name), *args), name)

    def _check_status(self, status: int, name: str = "NCCL") -> None:
        if status not in (_SUCCESS, _IN_PROGRESS):
            reason = self._library.ncclGetErrorString(status).decode()
            raise CollectiveError(
                f"{name} failed: {reason}", hint="NCCL_DEBUG=WARN makes NCCL print the reason"
            )


class NcclCommunicator:
    """A blocking communicator of NCCL (ncclComm_t)."""

    def __init__(
        self, nccl: Nccl, gpu: CudaDevice, handle: ctypes.c_void_p, rank: int, rank_count: int
    ) -> None:
        self._nccl, self._gpu = nccl, gpu
        self._handle: ctypes.c_void_p | None = handle
        self._rank, self._rank_count = rank, rank_count
        self._abort_requested = threading.Event()

    def enqueue(
        self, collective: Collective, send_buffer: Ptr, receive_buffer: Ptr, stream: Stream
    ) -> None:
        """Enqueue an operation on a stream."""
        self._raise_if_aborted()
        stream_address, rank_count = self._gpu.stream_address(stream), self._rank_count
        if collective.operation == "all-to-all":  # as in nccl-tests (src/alltoall.cu)
            offsets = [rank * collective.chunk_bytes for rank in range(rank_count)]
            sends = [(Ptr(send_buffer + offset), rank) for rank, offset in enumerate(offsets)]
            receives = [(Ptr(receive_buffer + offset), rank) for rank, offset in enumerate(offsets)]
            self._exchange(collective, sends, receives, stream_address)
        elif collective.operation == "send-receive":  # as in nccl-tests (src/sendrecv.cu)
            sends = [(send_buffer, (self._rank + 1) % rank_count)]
            receives = [(receive_buffer, (self._rank - 1) % rank_count)]
            self._exchange(collective, sends, receives, stream_address)
        else:
            function, arguments = _FUNCTIONS[collective.operation]
            data_type = _DATA_TYPES[collective.element.name]
            buffers = (send_buffer, receive_buffer, collective.count, data_type)
            self._nccl.call(function, *buffers, *arguments, self._handle, stream_address)

    def synchronize(self, stream: Stream) -> None:
        """Poll a stream until its work has completed."""
        begin_s = time.perf_counter()
        while not self._gpu.query_stream(stream):
            self._raise_if_aborted()
            if time.perf_counter() - begin_s < _SPIN_S:
                time.sleep(0)  # Lets threads of other ranks run.
            else:
                self._raise_async_error()
                time.sleep(_PAUSE_S)
        self._raise_if_aborted()

    def abort(self) -> None:
        """End the wait in ``synchronize``; ``close`` then aborts the communicator."""
        self._abort_requested.set()

    def close(self) -> None:
        """Destroy the communicator, or abort it after a call of ``abort``. A second call has no effect.

        NCCL waits until all graphs with its operations are destroyed, also before it aborts.
        """
        handle, self._handle = self._handle, None
        if handle:
            is_aborted = self._abort_requested.is_set()
            with suppress(CollectiveError, CudaError):  # The context may have a sticky error.
                self._nccl.call("ncclCommAbort" if is_aborted else "ncclCommDestroy", handle)

    def _raise_if_aborted(self) -> None:
        if self._abort_requested.is_set() or self._handle is None:
            raise CollectiveError("the collective operation was aborted")

    def _raise_async_error(self) -> None:
        status = ctypes.c_int()
        self._nccl.call("ncclCommGetAsyncError", self._handle, ctypes.byref(status))
        if status.value not in (_SUCCESS, _IN_PROGRESS):
            self.abort()
            raise CollectiveError("NCCL reports that another rank failed")

    def _exchange(
        self,
        collective: Collective,
        sends: list[tuple[Ptr, int]],
        receives: list[tuple[Ptr, int]],
        stream: int,
    ) -> None:
        """Perform sends to and receives from the given ranks at the same time."""
        count, data_type = collective.count, _DATA_TYPES[collective.element.name]
        self._nccl.call("ncclGroupStart")
        try:
            for function, buffers in (("ncclSend", sends), ("ncclRecv", receives)):
                for ptr, peer in buffers:
                    self._nccl.call(function, ptr, count, data_type, peer, self._handle, stream)
        finally:
            self._nccl.call("ncclGroupEnd")


def format_version(version_number: int) -> str:
    """Format the number of ncclGetVersion: 22809 is 2.28.9 (NCCL_VERSION in nccl.h)."""
    major, minor_and_patch = (
        divmod(version_number, 10_000)
        if version_number >= 10_000
        else divmod(version_number, 1_000)
    )
    return f"{major}.{minor_and_patch // 100}.{minor_and_patch % 100}"


# --- torch.distributed's NCCL backend, on memory that cudakit allocated -------------------------------------
#
# cudakit creates the backend object itself instead of calling ``init_process_group``. One process can then
# have several ranks, one per thread.

_TIMEOUT = timedelta(seconds=60)
# Operations that torch performs in place only: its functions take one tensor.
_IN_PLACE_ONLY = ("all-reduce", "broadcast", "reduce")


# Names that cudakit uses. torch.distributed has some of them, its module distributed_c10d the others.
_DISTRIBUTED_NAMES = (
    "TCPStore",
    "ProcessGroupNCCL",
    "AllreduceOptions",
    "AllgatherOptions",
    "ReduceScatterOptions",
    "BroadcastOptions",
    "ReduceOptions",
    "AllToAllOptions",
    "is_nccl_available",
)


class TorchCollectives:
    """torch.distributed on one device."""

    def __init__(self, gpu: CudaDevice) -> None:
        self._gpu = gpu
        try:
            self._torch = import_module("torch")
            self._distributed = _load_distributed()
        except ImportError as error:
            raise MissingDependency("torch", purpose="--vs torch") from error
        if not self._distributed.is_nccl_available():
            raise EnvironmentUnusable(
                f"torch {self._torch.__version__} was built without NCCL",
                hint="pip install torch from an index of builds with CUDA",
            )
        nccl_version = ".".join(map(str, self._torch.cuda.nccl.version()))
        self.version = f"{self._torch.__version__}, NCCL {nccl_version}"
        self.path = "torch.distributed"
        self._server_store: Any = None  # Keeps the server of the store alive.

    def unique_id(self, host: str) -> bytes:
        """Start a TCPStore on a free port, and return its address."""
        self._server_store = self._distributed.TCPStore(
            host, 0, is_master=True, timeout=_TIMEOUT, wait_for_workers=False
        )
        return f"{host} {self._server_store.port}".encode()

    def connect(self, unique_id: bytes, rank: int, rank_count: int) -> TorchCommunicator:
        """Create a ProcessGroupNCCL. torch connects to the other ranks at the first operation."""
        torch, distributed = self._torch, self._distributed
        host, port = unique_id.decode().split()
        device = torch.device("cuda", self._gpu.ordinal)
        torch.cuda.set_device(device)
        store = distributed.TCPStore(
            host, int(port), is_master=False, timeout=_TIMEOUT, wait_for_workers=False
        )
        options = distributed.ProcessGroupNCCL.Options()
        backend = distributed.ProcessGroupNCCL(store, rank, rank_count, options)
        return TorchCommunicator(torch, distributed, self._gpu, backend, rank, rank_count)


class TorchCommunicator:
    """A ProcessGroupNCCL, and tensors of the buffers that cudakit passes to it."""

    def __init__(
        self,
        torch: Any,
        distributed: Any,
        gpu: CudaDevice,
        backend: Any,
        rank: int,
        rank_count: int,
    ) -> None:
        self._torch, self._distributed, self._gpu, self._backend = torch, distributed, gpu, backend
        self._rank, self._rank_count = rank, rank_count
        self._device = torch.device("cuda", gpu.ordinal)
        self._streams: dict[int, Any] = {}
        self._tensors: dict[tuple[int, int, str], Any] = {}
        self._abort_requested = threading.Event()

    def enqueue(
        self, collective: Collective, send_buffer: Ptr, receive_buffer: Ptr, stream: Stream
    ) -> None:
        """Enqueue an operation on a stream. Raises Unsupported with torch's reason if the call fails."""
        operation, torch = collective.operation, self._torch
        if operation in _IN_PLACE_ONLY and send_buffer != receive_buffer:
            raise Unsupported(f"torch performs {operation} in place only")
        inputs = self._tensor(collective, send_buffer, collective.send_chunks(self._rank_count))
        outputs = self._tensor(
            collective, receive_buffer, collective.receive_chunks(self._rank_count)
        )
        try:
            with torch.cuda.stream(self._stream(stream)):
                if operation == "send-receive":
                    self._send_receive(inputs, outputs)
                else:
                    self._call(operation, inputs, outputs)
        except (AttributeError, RuntimeError, ValueError, TypeError) as error:
            reason = str(error).partition("\n")[0]
            raise Unsupported(f"torch's {operation} failed: {reason}") from error

    def synchronize(self, stream: Stream) -> None:
        """Poll a stream until its work has completed."""
        while not self._gpu.query_stream(stream):
            if self._abort_requested.is_set():
                raise CollectiveError("the collective operation was aborted")
            time.sleep(_PAUSE_S)

    def abort(self) -> None:
        """End the wait in ``synchronize``; ``close`` then aborts the backend."""
        self._abort_requested.set()

    def close(self) -> None:
        """Shut the backend down, or abort it after a call of ``abort``. A second call has no effect."""
        backend, self._backend = self._backend, None
        self._tensors.clear()
        if backend is None:
            return
        with suppress(RuntimeError):  # The context may have a sticky error.
            if self._abort_requested.is_set():
                backend.abort()
            else:
                # torch 2.8 renamed the method.
                (getattr(backend, "shutdown", None) or backend._shutdown)()

    def _call(self, operation: str, inputs: Any, outputs: Any) -> None:
        """Call the function of an operation, in the current stream instead of a stream of the backend."""
        distributed, backend = self._distributed, self._backend
        match operation:
            case "all-reduce":
                self._wait(
                    backend.allreduce([outputs], _backend_options(distributed.AllreduceOptions()))
                )
            case "all-gather":
                options = _backend_options(distributed.AllgatherOptions())
                self._wait(backend._allgather_base(outputs, inputs, options))
            case "reduce-scatter":
                options = _backend_options(distributed.ReduceScatterOptions())
                self._wait(backend._reduce_scatter_base(outputs, inputs, options))
            case "broadcast":
                options = _backend_options(distributed.BroadcastOptions())
                options.rootRank, options.rootTensor = ROOT, 0
                self._wait(backend.broadcast([outputs], options))
            case "reduce":
                options = _backend_options(distributed.ReduceOptions())
                options.rootRank, options.rootTensor = ROOT, 0
                self._wait(backend.reduce([outputs], options))
            case "all-to-all":
                options = _backend_options(distributed.AllToAllOptions())
                self._wait(backend.alltoall_base(outputs, inputs, [], [], options))

    def _send_receive(self, inputs: Any, outputs: Any) -> None:
        """Send to the next rank and receive from the previous one (batch_isend_irecv)."""
        next_rank, previous_rank = (
            (self._rank + 1) % self._rank_count,
            (self._rank - 1) % self._rank_count,
        )
        self._backend._start_coalescing()
        self._backend.send([inputs], next_rank, 0)
        self._backend.recv([outputs], previous_rank, 0)
        self._wait(self._backend._end_coalescing())

    def _wait(self, work: Any) -> None:
        """Make the current stream wait for work that runs in another stream."""
        if work is not None:
            work.wait()

    def _stream(self, stream: Stream) -> Any:
        handle = self._gpu.stream_address(stream)
        if handle not in self._streams:
            self._streams[handle] = self._torch.cuda.ExternalStream(handle, device=self._device)
        return self._streams[handle]

    def _tensor(self, collective: Collective, ptr: Ptr, chunk_count: int) -> Any:
        """Return a tensor of a buffer, without a copy."""
        size_bytes = chunk_count * collective.chunk_bytes
        dtype_name = TORCH_DTYPES[collective.element.name]
        key = (ptr, size_bytes, dtype_name)
        if key not in self._tensors:
            byte_array = self._torch.as_tensor(DeviceBytes(ptr, size_bytes), device=self._device)
            self._tensors[key] = byte_array.view(getattr(self._torch, dtype_name))
        return self._tensors[key]


def _load_distributed() -> SimpleNamespace:
    """Return the functions and classes of torch.distributed that exist, by their names."""
    modules = [
        import_module(name) for name in ("torch.distributed", "torch.distributed.distributed_c10d")
    ]
    return SimpleNamespace(
        **{
            name: getattr(module, name)
            for module in modules
            for name in _DISTRIBUTED_NAMES
            if hasattr(module, name)
        }
    )


def _backend_options(options: Any) -> Any:
    """Select the current stream: by default torch enqueues in a stream of its own."""
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
    return options
