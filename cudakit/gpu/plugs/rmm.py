"""An allocator in RMM, and so in cuDF, cuML and all else that takes its memory there."""

from __future__ import annotations

from typing import Any

from cudakit.errors import MissingDependency
from cudakit.gpu.api.allocator import Allocator


def resource(allocator: Allocator) -> Any:
    """Return a rmm.mr.CallbackMemoryResource. Raises MissingDependency without RMM."""
    try:
        import rmm.mr  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise MissingDependency(
            "rmm", purpose="a memory resource of RMM", requirement="rmm-cu13"
        ) from error
    return resource_of(rmm.mr, allocator)


def resource_of(mr: Any, allocator: Allocator) -> Any:
    """Make the resource from what ``rmm.mr`` has."""

    def allocate(size_bytes: int, stream: Any) -> int:
        # Of its MemoryError RMM makes a std::bad_alloc, which its adaptors and libcudf look for.
        return allocator.alloc(size_bytes, stream.__cuda_stream__()[1])

    def deallocate(ptr: int, size_bytes: int, stream: Any) -> None:  # noqa: ARG001
        allocator.free(ptr, stream.__cuda_stream__()[1])

    return mr.CallbackMemoryResource(allocate, deallocate)
