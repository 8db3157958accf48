"""The devices of this machine, those that CUDA shows to this process, and the one that is current.

Whatever torch, CuPy or the CUDA runtime make current in a thread is current here, and the other way round.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from cudakit.core.devices import query
from cudakit.core.devices.result import DevicesResult
from cudakit.gpu.api import MemoryInfo
from cudakit.gpu.architectures import Capability
from cudakit.gpu.cuda import current
from cudakit.gpu.cuda import driver as cuda_driver
from cudakit.gpu.machine import open_machine


def devices(*, gpu: str = "auto", processes: bool = False, topology: bool = False) -> DevicesResult:
    """Look at the GPUs of this machine: what ``cudakit devices --json`` prints, as an object.

    ``gpu`` is "auto", or "sim" or "sim:MODEL" for a simulated machine. NVML is asked here and the CUDA
    driver in a child process: no context is made, and the caller can still fork. Raises
    EnvironmentUnusable where no GPU can be seen, UsageError for another ``gpu``.

    >>> for device in devices(gpu="sim:h200x2").visible:
    ...     print(device.cuda_index, device.name, device.field("multiprocessor_count"))
    0 NVIDIA H200 132
    1 NVIDIA H200 132
    """
    return query.devices(open_machine(gpu), processes=processes, topology=topology)


def is_available() -> bool:
    """Say whether CUDA shows at least one device here; asks as ``device_count`` does, and never raises.

    >>> import cudakit
    >>> cudakit.is_available()  # doctest: +SKIP
    True
    """
    return device_count() > 0


def device_count() -> int:
    """Count the devices that CUDA_VISIBLE_DEVICES leaves; 0 without a driver.

    Makes no context. Where CUDA is not initialized in this process, the driver is asked in a child
    process, so that this one can still fork.

    >>> import cudakit
    >>> cudakit.device_count() >= 1  # doctest: +SKIP
    True
    """
    return current.device_count()


def is_initialized() -> bool:
    """Say whether CUDA is initialized in this process, by anyone; initializes nothing.

    >>> import cudakit
    >>> cudakit.synchronize()  # doctest: +SKIP
    >>> cudakit.is_initialized()  # doctest: +SKIP
    True
    """
    return cuda_driver.is_initialized()


def set_device(device: int) -> None:
    """Make a device the current one of this thread. Raises CudaError where there is no such device.

    >>> import cudakit
    >>> cudakit.set_device(0)  # doctest: +SKIP
    """
    current.set_device(device)


def current_device() -> int:
    """Return the number of the device that is current in this thread: 0 until one is set.

    >>> import cudakit
    >>> cudakit.current_device()  # doctest: +SKIP
    0
    """
    return current.current_device()


def device(device: int) -> AbstractContextManager[int]:
    """Make a device the current one of this thread within a ``with`` block.

    >>> import cudakit
    >>> with cudakit.device(0):  # doctest: +SKIP
    ...     cudakit.synchronize()
    """
    return current.device(device)


def stream(stream: object) -> AbstractContextManager[int]:
    """Make a stream, and its device, the current ones of this thread within a ``with`` block.

    What cudakit itself enqueues there goes to that stream; the current streams of other libraries stay
    what they are. ``stream`` is one of torch, CuPy, Numba or cuda.core, or the driver's handle of one,
    which must be alive: the driver cannot tell. Raises UsageError for anything else.

    >>> import cudakit
    >>> with cudakit.stream(2):  # CU_STREAM_PER_THREAD
    ...     cudakit.current_stream()
    2
    """
    return current.stream(stream)


def current_stream() -> int:
    """Return the driver's handle of the stream that is current in this thread for cudakit.

    >>> import cudakit
    >>> cudakit.current_stream()  # CU_STREAM_LEGACY
    1
    """
    return current.current_stream()


def device_name(device: int | None = None) -> str:
    """Return the name of a device, or of the current one. Raises CudaError where there is none.

    >>> import cudakit
    >>> cudakit.device_name().startswith("NVIDIA")  # doctest: +SKIP
    True
    """
    return current.device_name(device)


def capability(device: int | None = None) -> Capability:
    """Return the compute capability of a device, or of the current one, with its architecture's name.

    >>> import cudakit
    >>> cudakit.capability() >= (7, 5)  # doctest: +SKIP
    True
    >>> cudakit.capability().architecture != "Volta"  # doctest: +SKIP
    True
    """
    return current.capability(device)


def synchronize(device: int | None = None) -> None:
    """Wait until a device, or the current one, has done all its work. Raises CudaError for what failed.

    >>> import cudakit
    >>> cudakit.synchronize()  # doctest: +SKIP
    """
    current.synchronize(device)


def mem_get_info(device: int | None = None) -> MemoryInfo:
    """Return the bytes of a device that are free, and all that it has; makes its context if need be.

    >>> import cudakit
    >>> info = cudakit.mem_get_info()  # doctest: +SKIP
    >>> 0 < info.free_bytes < info.total_bytes  # doctest: +SKIP
    True
    """
    return current.memory_info(device)


def can_access_peer(device: int, peer: int) -> bool:
    """Say whether kernels on a device can use the memory of another; of itself, never.

    >>> import cudakit
    >>> cudakit.can_access_peer(0, 0)  # doctest: +SKIP
    False
    """
    return current.can_access_peer(device, peer)
