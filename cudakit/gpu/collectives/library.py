"""Finds and loads NCCL's shared library, and declares the functions that cudakit calls.

The signatures are those of nccl.h. They have not changed since NCCL 2.7, which added send and receive.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Protocol, TypeVar

from cudakit.errors import EnvironmentUnusable, MissingDependency
from cudakit.gpu.api import Memory, Stream, Streams

_T = TypeVar("_T")

LIBRARY_OVERRIDE = "CUDAKIT_NCCL_LIBRARY"
UNIQUE_ID_BYTES = 128

_SONAME = "libnccl.so.2"
# Path of NCCL in the wheels nvidia-nccl-cu12 and nvidia-nccl-cu13, from which torch and JAX load NCCL.
_PATH_IN_PACKAGES = Path("nvidia", "nccl", "lib", _SONAME)
_RTLD_NOLOAD = 0x4  # Flag of dlopen in glibc.


class CollectiveDevice(Memory, Streams, Protocol):
    """The methods of a real device that collective libraries call."""

    @property
    def ordinal(self) -> int:
        """The CUDA device index."""

    def in_context(self, function: Callable[..., _T], *args: object) -> _T:
        """Call a function with the device's context current in this thread."""

    def stream_address(self, stream: Stream) -> int:
        """Return the driver handle of a stream as an int."""


class UniqueId(ctypes.Structure):
    """The type ncclUniqueId, which NCCL takes by value."""

    _fields_ = (("internal", ctypes.c_ubyte * UNIQUE_ID_BYTES),)


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
    cuda_major = int(version("cuda-bindings").partition(".")[0])
    return "nvidia-nccl-cu12" if cuda_major == 12 else "cudakit[nccl]"
