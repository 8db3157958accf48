"""Record the memory pools of CuPy, Numba and RMM by hooks, and the arrays of JAX by its memory profile.

The agent of ``cudakit run`` loads this file by path, into programs that may not have cudakit installed. Like
the agent, this file imports only modules that Python itself has already imported. It never imports one of
these libraries: ``watch`` waits until the program has imported the library.
"""

import os
import sys
import time

TYPE_CHECKING = False  # has the meaning of typing.TYPE_CHECKING, without importing typing
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeAlias

    Attempt: TypeAlias = Callable[[Callable[[], None]], None]
    AfterImport: TypeAlias = Callable[[str, Callable[[], None]], None]

# Number of innermost frames that the recorder leaves out of a call stack: one function of this file.
_HOOK_FRAMES = 1
# Number of innermost frames that the recorder leaves out of the call stack of a failed allocation: the hook,
# ``attempt``, a lambda and ``report_failure``.
_FAILURE_FRAMES = 4
_JAX_POLL_SECONDS = 0.1
# JAX's arrays are profiled if their memory exceeds the maximum so far by this factor.
_JAX_GROWTH = 1.05


class PoolHooks:
    """Passes the blocks of pools to the native recorder.

    If ``driver_is_recorded`` is true, the recorder itself observes allocations from the driver. ``attempt``
    runs a function and reports its failure. ``report_jax`` receives a profile of JAX as JSON text.
    """

    def __init__(
        self,
        recorder: "Any",
        attempt: "Attempt",
        report_jax: "Callable[[str], None]",
        *,
        driver_is_recorded: bool,
    ) -> None:
        self._recorder = recorder
        self._attempt = attempt
        self._report_jax = report_jax
        self._driver_is_recorded = driver_is_recorded

    def watch(self, after_import: "AfterImport") -> None:
        """Install the hook of each library after the program has imported it."""
        hook_installers = {
            "cupy": self._watch_cupy,
            "numba.cuda.cudadrv.driver": self._watch_numba,
            "rmm": self._watch_rmm,
            "jax": self._watch_jax,
        }
        for name, install_hook in hook_installers.items():
            after_import(name, lambda install_hook=install_hook: self._attempt(install_hook))  # type: ignore[misc]

    # --- CuPy

    def _watch_cupy(self) -> None:
        """Install a MemoryHook in this thread and in all threads that the program starts later."""
        cupy: Any = sys.modules["cupy"]
        alloc, free = self._recorder.alloc, self._recorder.free
        attempt, driver_is_recorded = self._attempt, self._driver_is_recorded

        def report_failure(device_id: int, mem_size: int) -> None:
            free_bytes = cupy.cuda.runtime.memGetInfo()[0]
            self._recorder.out_of_memory("cupy", device_id, mem_size, free_bytes, _FAILURE_FRAMES)

        class Hook(cupy.cuda.MemoryHook):  # type: ignore[misc,name-defined,unused-ignore]
            """Reports an allocation after CuPy has made it, and a free before CuPy can reuse the block."""

            name = "cudakit"

            def alloc_postprocess(self, device_id: int, mem_size: int, mem_ptr: int) -> None:
                if mem_ptr and not driver_is_recorded:
                    alloc("cupy", device_id, mem_ptr, mem_size, 0, True, _HOOK_FRAMES)

            def malloc_postprocess(
                self, device_id: int, size: int, mem_size: int, mem_ptr: int, **_: object
            ) -> None:
                if mem_ptr and mem_size:
                    alloc("cupy", device_id, mem_ptr, mem_size, size, False, _HOOK_FRAMES)
                elif mem_size:
                    attempt(lambda: report_failure(device_id, mem_size))

            def free_preprocess(
                self, device_id: int, mem_size: int, mem_ptr: int, **_: object
            ) -> None:
                free("cupy", device_id, mem_ptr, mem_size, 0, False, _HOOK_FRAMES)

        hook = Hook()
        hook.__enter__()
        thread_class = sys.modules["threading"].Thread
        run_thread = thread_class._bootstrap_inner

        def _bootstrap_inner(thread: "Any") -> None:
            attempt(hook.__enter__)
            run_thread(thread)

        thread_class._bootstrap_inner = _bootstrap_inner  # a hook applies to one thread only

    # --- Numba

    def _watch_numba(self) -> None:
        """Report each MemoryPointer with a finalizer, which memory managers of the EMM interface create.

        Numba frees memory some time after the finalizer has run (``_PendingDeallocs``). Until then the memory
        is reserved, but not in use.
        """
        driver = sys.modules["numba.cuda.cudadrv.driver"]
        alloc, free = self._recorder.alloc, self._recorder.free
        initialize_pointer = driver.MemoryPointer.__init__

        def __init__(  # noqa: N807
            self: "Any",
            context: "Any",
            pointer: "Any",
            size: int,
            owner: "Any" = None,
            finalizer: "Any" = None,
        ) -> None:
            if finalizer is None or not size or isinstance(self, driver.MappedMemory):
                initialize_pointer(self, context, pointer, size, owner, finalizer)
                return
            block: list[Any] = []  # arguments of the recorder; empty until the block is allocated

            def finalize() -> None:
                if block:
                    free(*block, 0, False, _HOOK_FRAMES)
                finalizer()

            initialize_pointer(self, context, pointer, size, owner, finalize)
            block += ("numba", context.device.id, int(self.device_pointer_value or 0), size)
            alloc(*block, size, False, _HOOK_FRAMES)

        driver.MemoryPointer.__init__ = __init__

    # --- RMM

    def _watch_rmm(self) -> None:
        """Wrap each memory resource that the program sets, as rmm.statistics does.

        RMM's default resource, which calls the driver for each block, is not a pool and is not wrapped.
        """
        rmm: Any = sys.modules["rmm"]
        names = ("set_per_device_resource", "get_per_device_resource")
        set_resource, get_resource = (getattr(rmm.mr, name) for name in names)
        current_device = self._rmm_current_device
        # (program's resource, wrapper) by the id() of the wrapper
        upstreams: dict[int, Any] = {}

        def set_per_device_resource(device: int, mr: "Any") -> None:
            wrapped_resource = self._rmm_resource(rmm.mr, device, mr)
            upstreams[id(wrapped_resource)] = (mr, wrapped_resource)
            set_resource(device, wrapped_resource)

        def get_per_device_resource(device: int) -> "Any":
            mr = get_resource(device)
            return upstreams[id(mr)][0] if id(mr) in upstreams else mr

        replacements = {
            "set_per_device_resource": set_per_device_resource,
            "get_per_device_resource": get_per_device_resource,
            "set_current_device_resource": lambda mr: set_per_device_resource(current_device(), mr),
            "get_current_device_resource": lambda: get_per_device_resource(current_device()),
        }
        for module in (rmm.mr, sys.modules.get("rmm.pylibrmm.memory_resource")):
            for name, function in replacements.items():
                if hasattr(module, name):
                    setattr(module, name, function)
        reinitialize = rmm.reinitialize

        def reinitialize_and_wrap(*args: "Any", **options: "Any") -> None:
            reinitialize(*args, **options)
            devices = options.get("devices", args[4] if len(args) > 4 else 0)
            for device in (devices,) if isinstance(devices, int) else devices or (0,):
                set_per_device_resource(device, get_resource(device))

        rmm.reinitialize = reinitialize_and_wrap

    def _rmm_resource(self, mr: "Any", device: int, upstream: "Any") -> "Any":
        """Return a memory resource that calls ``upstream`` and reports its blocks; ``mr`` is ``rmm.mr``."""
        alloc, free = self._recorder.alloc, self._recorder.free

        def allocate(size: int, stream: "Any") -> int:
            address: int = upstream.allocate(size, stream)
            if address:
                alloc("rmm", device, address, size, size, False, _HOOK_FRAMES)
            return address

        def deallocate(address: int, size: int, stream: "Any") -> None:
            free("rmm", device, address, size, 0, False, _HOOK_FRAMES)
            upstream.deallocate(address, size, stream)

        return mr.CallbackMemoryResource(allocate, deallocate)

    def _rmm_current_device(self) -> int:
        import rmm._cuda.gpu  # type: ignore[import-not-found,unused-ignore]

        return int(rmm._cuda.gpu.getDevice())

    # --- JAX

    def _watch_jax(self) -> None:
        """Profile the arrays of JAX at exit, and whenever their memory reaches a new maximum.

        This exit handler runs before the handler of JAX, which deletes the arrays: JAX has registered its
        handler earlier.
        """
        import atexit
        import threading

        exit_event = threading.Event()

        def at_exit() -> None:
            exit_event.set()
            self._attempt(self.profile_jax)

        atexit.register(at_exit)
        pid = os.getpid()

        def poll() -> None:
            highest_bytes = 0.0
            while not exit_event.wait(_JAX_POLL_SECONDS) and os.getpid() == pid:
                statistics = [device.memory_stats() or {} for device in self._jax_devices()]
                bytes_in_use = sum(int(values.get("bytes_in_use", 0)) for values in statistics)
                if bytes_in_use > highest_bytes * _JAX_GROWTH:
                    highest_bytes = bytes_in_use
                    self._attempt(self.profile_jax)

        threading.Thread(target=poll, name="cudakit-jax", daemon=True).start()

    def _jax_devices(self) -> "list[Any]":
        """Return the GPUs of JAX, or an empty list if the program has not initialized JAX."""
        bridge = sys.modules.get("jax._src.xla_bridge")
        if bridge is None or not bridge.backends_are_initialized():
            return []
        devices: list[Any] = sys.modules["jax"].local_devices()
        return [device for device in devices if device.platform in ("gpu", "cuda")]

    def profile_jax(self) -> None:
        """Report the profile of JAX and the buffers of its arrays; do nothing if JAX uses no GPU."""
        devices = self._jax_devices()
        if not devices:
            return
        from base64 import b64encode
        from json import dumps

        jax = sys.modules["jax"]
        cuda_indices = {device.id: device.local_hardware_id or 0 for device in devices}
        buffers = {}  # buffers by device and address, because several arrays can share a buffer
        time_ns = time.monotonic_ns()
        for array in jax.live_arrays():
            # Reading the address of an array that is being computed would block until the array is ready.
            is_usable = not array.is_deleted() and array.is_ready()
            for shard in array.addressable_shards if is_usable else ():
                if shard.device.id in cuda_indices and shard.data.nbytes:
                    device = cuda_indices[shard.device.id]
                    address = shard.data.unsafe_buffer_pointer()
                    buffers[device, address] = [device, address, shard.data.nbytes]
        message = {
            "time_ns": time_ns,
            "profile": b64encode(jax.profiler.device_memory_profile()).decode(),
            "buffers": list(buffers.values()),
            "devices": cuda_indices,
        }
        self._report_jax(dumps(message))
