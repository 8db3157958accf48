""""""

from __future__ import annotations

import ctypes
import gc
import pickle
import subprocess
import sys
import weakref
from collections import namedtuple
from collections.abc import Callable
from ctypes import string_at
from types import SimpleNamespace
from typing import Any

import pytest
from arrays.plugs.allocating import BASE, Allocating
from numba_ready import WHY_NOT, numba_is_ready

import cudakit
from cudakit.arrays.plugs.libraries import (
    UNUSED_STREAM,
    UPSTREAMS,
    AllocatorByDevice,
    cupy_function,
    native_library,
    numba_manager,
    rmm_resource,
    torch_pool,
    unpickle_handle,
)
from cudakit.errors import (
    CudaError,
    CudakitError,
    EnvironmentUnusable,
    MissingDependency,
    UsageError,
)
from cudakit.gpu.api import LEGACY


def test_allocators_are_found_by_device() -> None:
    first, second = Allocating(0), Allocating(1)

    devices = AllocatorByDevice([second, first])

    assert (devices[0], devices[1]) == (first, second)


def test_device_without_an_allocator_is_refused_with_a_hint() -> None:
    devices = AllocatorByDevice([Allocating(0), Allocating(2)])

    with pytest.raises(UsageError, match="cuda:1, only for cuda:0, cuda:2") as caught:
        devices[1]
    assert caught.value.hint == "add cudakit.CachingAllocator(1)"


def test_two_allocators_for_a_device_are_refused() -> None:
    with pytest.raises(UsageError, match="two allocators were given for cuda:1"):
        AllocatorByDevice([Allocating(1), Allocating(1)])


def test_missing_allocators_are_refused() -> None:
    with pytest.raises(UsageError, match="no allocator was given"):
        AllocatorByDevice([])


class Memory:
    """CuPy's memory object of one allocation, which frees it when deleted."""

    def __init__(self, ptr: int, device: int, free: Callable[[int, int], None]) -> None:
        self.ptr, self._device, self._free = ptr, device, free

    def __del__(self) -> None:
        if self.ptr:
            self._free(self.ptr, self._device)


class Cupy:
    """A fake of CuPy's allocation functions; ``device`` and ``stream`` are the current device and stream."""

    def __init__(self) -> None:
        self.device = 0
        self.stream = 0
        self.cuda = SimpleNamespace(
            get_current_stream=lambda: SimpleNamespace(ptr=self.stream),
            PythonFunctionAllocator=self._function_allocator,
        )

    def _function_allocator(self, malloc: Any, free: Any) -> Any:
        def allocate(size: int) -> Memory:
            ptr = malloc(size, self.device) if size else 0
            return Memory(ptr, self.device, free)

        return SimpleNamespace(malloc=allocate)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Cupy:
    fake = Cupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)  # type: ignore[arg-type]
    return fake


def test_cupy_memory_belongs_to_the_current_stream(cupy: Cupy) -> None:
    allocator = Allocating()
    malloc = cupy_function([allocator])

    cupy.stream = 0x1234
    memory = malloc(100)
    cupy.stream = 0
    ptr = memory.ptr
    del memory

    assert allocator.allocated == [(100, 0x1234)]
    assert allocator.freed == [(ptr, None)]


def test_cupy_memory_belongs_to_the_current_device(cupy: Cupy) -> None:
    first, second = Allocating(0), Allocating(1)
    malloc = cupy_function([first, second])

    cupy.device = 1
    memory = malloc(100)
    cupy.device = 0
    del memory

    assert (first.allocated, len(second.allocated), len(second.freed)) == ([], 1, 1)


def test_device_without_an_allocator_is_refused(cupy: Cupy) -> None:
    cupy.device = 1

    with pytest.raises(UsageError, match="no allocator was given for cuda:1"):
        cupy_function([Allocating(0)])(100)


@pytest.mark.usefixtures("cupy")
def test_cupy_zero_bytes_call_no_allocator() -> None:
    allocator = Allocating()

    assert cupy_function([allocator])(0).ptr == 0
    assert (allocator.allocated, allocator.freed) == ([], [])


@pytest.mark.usefixtures("cupy")
def test_free_uses_the_current_method_of_the_allocator() -> None:
    allocator, ignored = Allocating(), []
    memory = cupy_function([allocator])(100)

    allocator.free = lambda *arguments: ignored.append(arguments)  # type: ignore[method-assign]
    ptr = memory.ptr
    del memory

    assert (allocator.freed, ignored) == ([], [(ptr,)])


def test_without_cupy_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)

    with pytest.raises(MissingDependency) as caught:
        cupy_function([Allocating()])
    assert caught.value.hint == "pip install 'cupy-cuda13x'"


class Stream:
    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def callbacks(allocator: Allocating) -> Any:
    """Return a fake of RMM's resource, which exposes its two functions."""

    def make(allocate: Any, deallocate: Any) -> Any:
        return SimpleNamespace(allocate=allocate, deallocate=deallocate)

    with pytest.MonkeyPatch.context() as patch:
        mr = SimpleNamespace(CallbackMemoryResource=make)
        patch.setitem(sys.modules, "rmm", SimpleNamespace(mr=mr))  # type: ignore[arg-type]
        return rmm_resource(allocator)


def test_rmm_streams_are_passed_on() -> None:
    allocator = Allocating()
    resource = callbacks(allocator)

    ptr = resource.allocate(100, Stream(5))
    resource.deallocate(ptr, 100, Stream(6))

    assert allocator.allocated == [(100, 5)]
    assert allocator.freed == [(ptr, 6)]


def test_out_of_memory_is_a_memory_error_for_rmm() -> None:
    allocator = Allocating()
    allocator.refuses = cudakit.OutOfMemory("1 GiB asked")

    with pytest.raises(MemoryError, match="1 GiB asked"):
        callbacks(allocator).allocate(1 << 30, Stream(0))


def test_other_errors_are_raised_unchanged() -> None:
    allocator = Allocating()
    allocator.refuses = CudaError(700, "CUDA_ERROR_ILLEGAL_ADDRESS", "lost")

    with pytest.raises(CudaError, match="ILLEGAL_ADDRESS"):
        callbacks(allocator).allocate(100, Stream(0))


def test_without_rmm_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rmm", None)

    with pytest.raises(MissingDependency) as caught:
        rmm_resource(Allocating())
    assert caught.value.hint == "pip install 'rmm-cu13'"


MemoryInfo = namedtuple("MemoryInfo", "free, total")


class Manager:
    """A fake of Numba's base class for memory managers."""

    def __init__(self, context: Any) -> None:
        self.context = context


class Pointer:
    """A fake of Numba's memory object, whose finalizer runs when it is garbage-collected."""

    def __init__(
        self, context: Any, pointer: Any, size: int, finalizer: Callable[[], None]
    ) -> None:
        self.context, self.ptr, self.size = context, pointer.value, size
        self.device_pointer_value = pointer.value or None
        weakref.finalize(self, finalizer)


class Handle:
    """A fake of Numba's IPC handle."""

    def __init__(
        self, base: Any, handle: Any, size: int, source_info: Any = None, offset: int = 0
    ) -> None:
        self.base, self.handle, self.size = base, handle, size
        self.source_info, self.offset = source_info, offset


class Context:
    def __init__(self, device: int) -> None:
        identity = {"pci_bus_id": 7}
        self.device = SimpleNamespace(id=device, get_device_identity=lambda: identity)


CUDA = SimpleNamespace(
    HostOnlyCUDAMemoryManager=Manager,
    MemoryPointer=Pointer,
    MemoryInfo=MemoryInfo,
    IpcHandle=Handle,
)


@pytest.fixture
def _fake_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", SimpleNamespace(cuda=CUDA))  # type: ignore[arg-type]


def manager(*allocators: Allocating, device: int = 0, default_stream_only: bool = False) -> Any:
    find_allocator = AllocatorByDevice(allocators).__getitem__
    manager_class = numba_manager(find_allocator, default_stream_only=default_stream_only)
    context = Context(device)
    memory_manager = manager_class(context=context)
    memory_manager.kept = context  # Numba keeps the context alive
    return memory_manager


@pytest.mark.usefixtures("_fake_numba")
def test_numba_free_is_a_use_by_the_default_stream() -> None:
    allocator = Allocating()

    memory = manager(allocator).memalloc(100)
    ptr = memory.ptr
    del memory
    gc.collect()

    assert allocator.allocated == [(100, UNUSED_STREAM)]
    assert allocator.freed == [(ptr, LEGACY)]


@pytest.mark.usefixtures("_fake_numba")
def test_memory_is_reused_at_once_with_default_stream_only() -> None:
    allocator = Allocating()

    memory = manager(allocator, default_stream_only=True).memalloc(100)
    ptr = memory.ptr
    del memory
    gc.collect()

    assert allocator.allocated == [(100, 0)]
    assert allocator.freed == [(ptr, None)]


@pytest.mark.usefixtures("_fake_numba")
def test_manager_uses_the_allocator_of_its_context() -> None:
    first, second = Allocating(0), Allocating(1)

    assert manager(first, second, device=1).allocator is second
    with pytest.raises(UsageError, match="no allocator was given for cuda:2"):
        manager(first, second, device=2).memalloc(1)


@pytest.mark.usefixtures("_fake_numba")
def test_manager_without_a_context_reports_its_version() -> None:
    def source(device: int) -> Allocating:
        raise AssertionError(device)

    manager_class = numba_manager(source, default_stream_only=False)

    assert manager_class(context=None).interface_version == 1


@pytest.mark.usefixtures("_fake_numba")
def test_manager_reports_memory_info_of_the_device() -> None:
    assert manager(Allocating()).get_memory_info() == (1 << 30, 2 << 30)


@pytest.mark.usefixtures("_fake_numba")
def test_ipc_handle_has_the_segment_and_the_offset() -> None:
    memory_manager = manager(Allocating())
    memory = memory_manager.memalloc(100)
    handle = memory_manager.get_ipc_handle(memory)

    assert handle.base is memory
    assert (handle.size, handle.offset) == (100, memory.ptr - BASE)
    assert handle.source_info == {"pci_bus_id": 7}
    assert string_at(handle.handle.getPtr(), 64) == b"a handle".ljust(64)


@pytest.mark.usefixtures("_fake_numba")
def test_ipc_handle_is_pickled_by_its_bytes() -> None:
    memory_manager = manager(Allocating())
    rebuild, (data, size, source, offset) = memory_manager.get_ipc_handle(
        memory_manager.memalloc(100)
    ).__reduce__()

    assert rebuild is unpickle_handle
    assert (data, size, source) == (b"a handle".ljust(64), 100, {"pci_bus_id": 7})
    assert offset > 0


@pytest.mark.usefixtures("_fake_numba")
def test_unsupported_ipc_handle_raises_error_of_the_allocator() -> None:
    allocator = Allocating()
    memory_manager = manager(allocator)
    memory = memory_manager.memalloc(100)
    allocator.refuses = CudakitError("it has no handle of")

    with pytest.raises(CudakitError, match="no handle of"):
        memory_manager.get_ipc_handle(memory)


@pytest.mark.skipif(not numba_is_ready(), reason=WHY_NOT)
def test_numba_handle_survives_pickling() -> None:
    from numba import cuda

    handle = unpickle_handle(bytes(range(64)), 10, {"pci_bus_id": 1}, 512)
    unpickled = pickle.loads(pickle.dumps(handle))  # noqa: S301  written right here

    assert isinstance(unpickled, cuda.IpcHandle)
    assert (unpickled.base, unpickled.size, unpickled.offset) == (None, 10, 512)
    assert string_at(unpickled.handle.getPtr(), 64) == bytes(range(64))


def test_without_numba_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)

    with pytest.raises(MissingDependency) as caught:
        numba_manager(lambda _: Allocating(), default_stream_only=False)
    assert caught.value.hint == "pip install 'numba-cuda[cu13]'"


def library() -> str:
    try:
        return native_library()
    except EnvironmentUnusable:
        pytest.skip("installed without a compiler")


def fake_torch(**attributes: type) -> Any:
    """Return a fake of torch's memory pools; ``attributes`` are the options that a pool accepts."""

    def mem_pool(allocator: object, **options: bool) -> object:
        if unknown := options.keys() - attributes:
            raise TypeError(f"MemPool got an unexpected argument {min(unknown)!r}")
        return allocator, options

    def pluggable(*arguments: str) -> Any:
        return SimpleNamespace(allocator=lambda: arguments)

    memory = SimpleNamespace(CUDAPluggableAllocator=pluggable)
    return SimpleNamespace(__version__="2.7", cuda=SimpleNamespace(memory=memory, MemPool=mem_pool))


def pool_of(torch: Any, upstream: str, options: dict[str, bool]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch", torch)
        return torch_pool(upstream, options)


def test_torch_pool_uses_two_c_functions() -> None:
    path = library()
    pool = pool_of(fake_torch(), "managed", {"no_split": False})

    assert pool == ((path, "cudakit_managed_alloc", "cudakit_managed_free"), {})


def test_torch_pool_passes_enabled_options() -> None:
    library()
    _, options = pool_of(
        fake_torch(no_split=bool), "async", {"no_split": True, "use_on_oom": False}
    )

    assert options == {"no_split": True}


def test_unknown_torch_option_is_refused() -> None:
    library()
    with pytest.raises(UsageError, match=r"torch 2\.7 cannot create this MemPool: .*'no_split'"):
        pool_of(fake_torch(), "async", {"no_split": True})


def test_python_allocator_is_refused_with_the_reason() -> None:
    with pytest.raises(
        UsageError, match=r"cannot use Allocating .* holding its own lock"
    ) as caught:
        torch_pool(Allocating(), {})
    assert caught.value.hint.endswith("driver, managed, async")


def test_unknown_upstream_is_refused_with_the_known_names() -> None:
    with pytest.raises(UsageError, match="no upstream is named 'pinned'") as caught:
        torch_pool("pinned", {})
    assert caught.value.hint == "one of driver, managed, async"


def test_without_torch_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    library()
    monkeypatch.setitem(sys.modules, "torch", None)

    with pytest.raises(MissingDependency) as caught:
        torch_pool("managed", {})
    assert caught.value.hint == "pip install 'torch'"


@pytest.mark.parametrize("kind", UPSTREAMS)
def test_library_exports_the_functions_of_every_kind(kind: str) -> None:
    opened = ctypes.CDLL(library())

    assert getattr(opened, f"cudakit_{kind}_alloc")
    assert getattr(opened, f"cudakit_{kind}_free")


# Run in a separate process, so that a crash does not end the tests.
WITHOUT_DEVICE = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
for kind in sys.argv[2:]:
    alloc, free = (getattr(library, f"cudakit_{kind}_{name}") for name in ("alloc", "free"))
    alloc.restype = ctypes.c_void_p
    alloc.argtypes = (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
    free.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    free.restype = None
    print([alloc(size, 999, None) for size in (100, 0, -1)])
    free(4096, 100, 999, None)
    free(None, 0, 0, None)
"""


def test_functions_return_null_for_a_missing_device() -> None:
    command = [sys.executable, "-P", "-c", WITHOUT_DEVICE, library(), *UPSTREAMS]
    result = subprocess.run(command, check=True, capture_output=True, text=True)

    assert result.stdout.splitlines() == ["[None, None, None]"] * len(UPSTREAMS)
