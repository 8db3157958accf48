"""The caching allocator for cuda.core."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from cudakit.api.allocator import CachingAllocator
from cudakit.errors import MissingDependency
from cudakit.gpu.api import Allocator, Gpu

if TYPE_CHECKING:
    from cudakit.arrays.plugs.cuda_core import AllocatorResource
else:
    try:
        from cudakit.arrays.plugs.cuda_core import AllocatorResource
    except MissingDependency as error:
        _import_error = error

        class AllocatorResource:
            """The base class if cuda.core is missing: creating an instance raises MissingDependency."""

            def __new__(cls, *_: object, **__: object) -> NoReturn:
                raise _import_error


class CachingMemoryResource(AllocatorResource):
    """The caching allocator as a MemoryResource of cuda.core, to be set as ``Device.memory_resource``.

    The resource uses ``allocator``, or creates a ``CachingAllocator`` with ``device`` and ``settings``.
    ``resource.allocator`` is the allocator. Raises MissingDependency without cuda.core.

    >>> resource = cudakit.CachingMemoryResource(0)  # doctest: +SKIP
    >>> with resource.allocate(1 << 20, stream=stream) as buffer:  # doctest: +SKIP
    ...     launch(stream, config, kernel, buffer)
    """

    def __init__(
        self,
        device: int | str | Gpu | None = None,
        *,
        settings: str | None = None,
        allocator: Allocator | None = None,
    ) -> None:
        super().__init__(allocator or CachingAllocator(device, settings=settings))
