"""PyTorch MemPools that get their segments from the driver, because PyTorch cannot use a Python allocator."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from cudakit.errors import EnvironmentUnusable, MissingDependency, UsageError

# The driver function that allocates the segments of a pool, by the value of ``upstream``.
UPSTREAMS = {
    "driver": "cuMemAlloc, which PyTorch uses by default",
    "managed": "cuMemAllocManaged: migrates between host and device, may exceed the device's memory",
    "async": "cuMemAllocAsync: the driver's pool, shared by the process",
}
_DEADLOCK_REASON = (
    "PyTorch calls it while holding its own lock, and a thread that waits for that lock may hold the GIL:"
    " a deadlock"
)


def pool(upstream: object, options: dict[str, bool]) -> Any:
    """Return a torch.cuda.MemPool whose segments come from the driver; see ``cudakit.torch_pool``."""
    upstream_kind = upstream_name(upstream)
    library_path = native_library()
    try:
        import torch  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise MissingDependency("torch", purpose="a MemPool") from error
    return pool_of(torch, library_path, upstream_kind, options)


def upstream_name(upstream: object) -> str:
    """Return the name of a source of segments. Raises UsageError with the reason for anything else."""
    if isinstance(upstream, str) and upstream in UPSTREAMS:
        return upstream
    upstream_names = ", ".join(UPSTREAMS)
    if isinstance(upstream, str):
        raise UsageError(f"no upstream is named {upstream!r}", hint=f"one of {upstream_names}")
    raise UsageError(
        f"torch cannot use {type(upstream).__name__} as an allocator: {_DEADLOCK_REASON}",
        hint=f"give an upstream that runs without Python: {upstream_names}",
    )


def native_library() -> str:
    """Return the path of the C functions. Raises EnvironmentUnusable if they were not compiled."""
    spec = find_spec("cudakit.arrays.plugs._torch_pool")
    if spec is None or spec.origin is None:
        raise EnvironmentUnusable(
            "cudakit was installed without its C extensions, which torch needs",
            hint="install a C compiler, then: pip install --force-reinstall --no-deps cudakit",
        )
    return spec.origin


def pool_of(torch: Any, library_path: str, upstream_kind: str, options: dict[str, bool]) -> Any:
    """Return the MemPool, given the module ``torch``. Raises UsageError for an option that torch lacks."""
    cuda = torch.cuda
    functions = (f"cudakit_{upstream_kind}_alloc", f"cudakit_{upstream_kind}_free")
    allocator = cuda.memory.CUDAPluggableAllocator(library_path, *functions)
    try:
        # Options that are off are not passed, because older versions of torch lack them.
        return cuda.MemPool(
            allocator.allocator(), **{name: True for name, is_on in options.items() if is_on}
        )
    except TypeError as error:
        raise UsageError(
            f"torch {torch.__version__} cannot create this MemPool: {error}",
            hint="omit the option, or install a newer torch",
        ) from error
