"""The base class of callables that launch prepared kernels, in C."""

class FastCall:
    """The class whose Python implementation is ``cudakit.gpu.fast_call.SlowCall``."""

    def __call__(self, *arguments: object, **named: object) -> object: ...
    def _configure(self, input_count: int, output_count: int, /) -> None: ...
    def _prepare(
        self,
        inputs: tuple[object, ...],
        outputs: tuple[object, ...],
        allocates: bool,
        results: tuple[int, ...],
        parameters: tuple[tuple[str, int, bytes], ...],
        function: int,
        context: int,
        device: int,
        blocks: int,
        threads: int,
        stream: int,
        scratch: int,
        /,
    ) -> bool: ...

def use_driver(
    launch: int,
    get_context: int,
    push_context: int,
    pop_context: int,
    is_capturing: int,
    device_type: int,
    /,
) -> None: ...
