"""The base class of callables that launch prepared kernels, in C."""

from collections.abc import Callable
from contextvars import ContextVar

class LaunchCounter:
    """The class whose Python implementation is ``cudakit.gpu.fast_call.SlowCounter``."""

    def read(self) -> tuple[int, int, int]: ...
    def replace(self, expected: tuple[int, int, int], words: tuple[int, int, int], /) -> bool: ...
    def freeze(self, expected: tuple[int, int, int], /) -> bool: ...

class StreamMemory:
    """Device memory, which is freed on the stream when the last reference is deleted."""

    ptr: int

    def __init__(self, context: int, size_bytes: int, stream: int, /) -> None: ...

class ArrayFactory:
    """A function of a stream that returns a tuple of new arrays of cudakit, one for each layout.

    A layout is a tuple of the device, its CUDA index, dtype, shape, strides and size in bytes.
    """

    def __init__(
        self,
        array_class: type,
        view_class: type,
        context: int,
        layouts: tuple[tuple[object, int, str, tuple[int, ...], tuple[int, ...], int], ...],
        /,
    ) -> None: ...
    def __call__(self, stream: int, /) -> tuple[object, ...]: ...

class StreamCall:
    """A call of a C function with 15 fixed arguments, whose last argument is a stream.

    The call returns the status of the function.
    """

    def __init__(self, function: int, arguments: tuple[int, ...], /) -> None: ...
    def __call__(self, stream: int, /) -> int: ...

class FastCall:
    """The class whose Python implementation is ``cudakit.gpu.fast_call.SlowCall``."""

    def __call__(self, *arguments: object, **named: object) -> object: ...
    def _configure(
        self, input_count: int, output_count: int, counter: LaunchCounter | None = None, /
    ) -> None: ...
    def _prepare(
        self,
        inputs: tuple[object, ...],
        outputs: tuple[object, ...],
        allocate: Callable[[int], tuple[object, ...]] | None,
        results: tuple[int, ...],
        parameters: tuple[tuple[str, int, bytes], ...],
        function: int,
        context: int,
        device: int,
        blocks: int,
        threads: int,
        stream: int,
        scratch: int,
        counter_step: int,
        /,
    ) -> bool: ...

def use_driver(
    launch: int,
    get_context: int,
    push_context: int,
    pop_context: int,
    is_capturing: int,
    allocate: int,
    free: int,
    device_type: int,
    /,
) -> None: ...
def use_array_class(
    array_class: type,
    kind: str,
    current_stream: Callable[[int], object] | ContextVar[int],
    dtypes: dict[object, int],
    /,
) -> None: ...
