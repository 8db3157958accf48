"""``cudakit bench ops``: benchmark operations on arrays by cudakit, torch and CuPy."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from cudakit.cli.bench.measure import FORMATS, measure_spec
from cudakit.cli.bench.options import (
    HELP_BY_TITLE,
    Effort,
    effort_options,
    name_list,
    parse_elements,
    passed_options,
)
from cudakit.cli.options import Command, Value, gpu_option, option, output_options
from cudakit.cli.output import OutputOptions
from cudakit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cudakit.bench.spec import OpenLibrary
    from cudakit.cli.failure import ExitCode
    from cudakit.gpu.api import Gpu, Stream
    from cudakit.gpu.api.arrays import ArrayView
    from cudakit.gpu.api.operations import Operation
    from cudakit.gpu.device_array import DeviceArray

# Public function of cudakit for each operation that has one.
_PUBLIC_CALLS: dict[Operation, str] = {
    "add": "cudakit.elementwise('z = x + y')",
    "softmax": "cudakit.softmax",
    "sum": "cudakit.reduction('sum(x)')",
}


@click.command(
    cls=Command,
    help_by_title=HELP_BY_TITLE,
    short_help="Add, matmul, softmax and sum of arrays, compared with torch and CuPy.",
)
@option(
    "--operations",
    type=name_list("cudakit.gpu.api.operations:OPERATIONS"),
    metavar="NAME,...",
    help="Operations: add, matmul, softmax, sum.  [default: all]",
)
@option(
    "--sizes",
    type=Value((), parse_elements),
    metavar="N,...",
    help="Elements of each input: a list (10K,1M) or a range that grows by a factor (10K..10M:10); K and M "
    "are 1000 and 1000000.  [default: add 1M, matmul 1024x1024, softmax 10K, sum 1M; with --gpu sim 100K, "
    "and matmul 256x256]",
)
@option(
    "--timings",
    type=name_list("cudakit.bench.spec:TIMINGS"),
    metavar="NAME,...",
    help="Timings: host-call, eager, graph.  [default: all]",
)
@option(
    "--vs",
    "baselines",
    type=name_list("cudakit.gpu.api.operations:ARRAY_LIBRARIES"),
    metavar="NAME,...",
    help="Libraries to compare with: torch, cupy; none for no comparison.  [default: those installed]",
)
@option(
    "--cache",
    type=click.Choice(["rotate", "hot"]),
    metavar="STATE",
    help="L2 state of eager and graph: rotate (cycle through buffers) or hot.  [default: rotate]",
)
@gpu_option
@effort_options
@output_options(FORMATS)
def ops(
    *,
    baselines: tuple[Any, ...] | None,
    effort: Effort,
    gpu: str,
    output: OutputOptions,
    **options: Any,
) -> ExitCode:
    """Measure add, matmul, softmax and sum of float32 arrays by cudakit, torch and CuPy.

    Samples of the libraries alternate, on equal data. All results are verified in float64. The timings:

    \b
    host-call  the host time of a call, on tensors if torch is installed:
               cudakit.elementwise for add, cudakit.reduction for sum,
               cudakit.softmax for softmax; the call of cuBLASLt for
               matmul, for which cudakit has no public function
    eager      the GPU time of one execution
    graph      the GPU time of one execution in a CUDA graph of many

    matmul is computed by cuBLASLt (pip install 'cudakit[bench]') on square matrices of about N elements.
    softmax has rows of about 10,000 elements, or one row if there are fewer. If torch is measured too, on
    a real GPU at the default sizes, the report shows how many
    times as fast as torch cudakit is, and the target for each operation.

    \b
    cudakit bench ops
    cudakit bench ops --sizes 10K..10M:10 -o ops.html
    cudakit bench ops --operations add,sum --timings host-call --vs torch
    """
    from cudakit.bench.spec import OpsSpec
    from cudakit.gpu.api.operations import ARRAY_LIBRARIES
    from cudakit.gpu.array_libraries import has_array_library

    is_simulated = gpu.startswith("sim")
    if baselines is None:
        baselines = () if is_simulated else tuple(filter(has_array_library, ARRAY_LIBRARIES))
    elif "none" in baselines:
        if len(baselines) > 1:
            raise UsageError("--vs none excludes other libraries", hint="remove none")
        baselines = ()
    public_libraries: dict[Operation, OpenLibrary] = {
        operation: partial(PublicFunction, operation=operation) for operation in _PUBLIC_CALLS
    }
    spec = OpsSpec(
        baselines=baselines,
        public_libraries=public_libraries,
        **passed_options(**options),
        **effort.arguments(OpsSpec),
    )
    return measure_spec(spec, gpu, output)


class PublicFunction:
    """A public function of cudakit, called on tensors of torch if it is installed, else on DeviceArrays."""

    name = "cudakit"
    version = ""

    def __init__(self, gpu: Gpu, operation: Operation) -> None:
        from cudakit.gpu.array_libraries import has_array_library

        self._gpu = gpu
        self._function = _public_function(operation)
        # The library whose current stream the function uses; None without torch.
        self._torch: Any = (
            gpu.array_library("torch") if not gpu.simulated and has_array_library("torch") else None
        )
        # DeviceArrays of the calls, and the stream argument of the calls; both are empty if torch is used.
        self._device_arrays: list[DeviceArray] = []
        self._stream_argument: dict[str, Stream] = {}

    def describe(self, operation: Operation) -> str:
        """Return the call of the public function, and the kind of its arguments."""
        array_kind = "tensors" if self._torch else "DeviceArrays"
        return f"{_PUBLIC_CALLS[operation]} of {array_kind}"

    def bind(
        self,
        operation: Operation,  # noqa: ARG002
        inputs: Sequence[ArrayView],
        output: ArrayView,
    ) -> Callable[[], object]:
        """Return a function that calls the public function on the memory of the views."""
        from cudakit.gpu.device_array import array_over

        if self._torch:
            tensors = [self._torch.array(view) for view in inputs]
            return partial(self._function, *tensors, out=self._torch.array(output))
        *arrays, result = (array_over(self._gpu, view) for view in (*inputs, output))
        self._device_arrays += [*arrays, result]
        return lambda: self._function(*arrays, out=result, **self._stream_argument)

    def set_stream(self, stream: Stream) -> None:
        """Choose the stream of later calls: torch's current stream, or an argument of the call."""
        if self._torch:
            self._torch.set_stream(stream)
        else:
            self._stream_argument["stream"] = stream
            for array in self._device_arrays:
                array.stream = stream

    def close(self) -> None:
        """Restore the current stream of torch."""
        if self._torch:
            self._torch.close()


def _public_function(operation: Operation) -> Any:
    """Return the function of _PUBLIC_CALLS that computes an operation."""
    from cudakit.arrays.kernels import elementwise, reduction
    from cudakit.arrays.softmax import softmax

    match operation:
        case "add":
            return elementwise("z = x + y")
        case "softmax":
            return softmax
    return reduction("sum(x)")
