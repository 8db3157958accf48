"""Pools of torch that take memory from the driver; why torch cannot use an allocator written in Python."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from cudakit.errors import EnvironmentUnusable, MissingDependency, UsageError

# The driver call of each kind.
UPSTREAMS = {
    "driver": "cuMemAlloc: what torch itself uses",
    "managed": "cuMemAllocManaged: moves between host and device, and may be more than the device has",
    "async": "cuMemAllocAsync: the driver's own pool, shared with all else in the process that uses it",
}
_REASON = (
    "torch calls it inside the lock of its own allocator, where Python must not run: a thread that waits"
    " for that lock may hold the interpreter's"
)


def pool(upstream: object, options: dict[str, bool]) -> Any:
    """Return a torch.cuda.MemPool whose segments come from the driver; see ``cudakit.torch_pool``."""
    kind = checked(upstream)
    library = native_library()
    try:
        import torch  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise MissingDependency("torch", purpose="a pool of its memory") from error
    return pool_of(torch, library, kind, options)


def checked(upstream: object) -> str:
    """Return the name of an upstream. Raises UsageError with the reason for anything else."""
    if isinstance(upstream, str) and upstream in UPSTREAMS:
        return upstream
    known = ", ".join(UPSTREAMS)
    if isinstance(upstream, str):
        raise UsageError(f"no upstream is named {upstream!r}", hint=f"one of {known}")
    raise UsageError(
        f"torch cannot allocate by {type(upstream).__name__}: {_REASON}",
        hint=f"name an upstream that runs without Python: {known}",
    )


def native_library() -> str:
    """Return the path of the C functions. Raises EnvironmentUnusable where they were not built."""
    found = find_spec("cudakit.gpu.plugs._native")
    if found is None or found.origin is None:
        raise EnvironmentUnusable(
            "cudakit was installed without its C extensions, which torch needs",
            hint="install a C compiler, then: pip install --force-reinstall --no-deps cudakit",
        )
    return found.origin


def pool_of(torch: Any, library: str, kind: str, options: dict[str, bool]) -> Any:
    """Make the pool from the module ``torch``. Raises UsageError for an option it does not know."""
    cuda = torch.cuda
    functions = (f"cudakit_{kind}_alloc", f"cudakit_{kind}_free")
    allocator = cuda.memory.CUDAPluggableAllocator(library, *functions)
    try:
        # Options that are off are left out: an older torch does not know them.
        return cuda.MemPool(
            allocator.allocator(), **{name: True for name, on in options.items() if on}
        )
    except TypeError as error:
        raise UsageError(
            f"torch {torch.__version__} has no such pool: {error}",
            hint="leave the option out, or install a newer torch",
        ) from error
