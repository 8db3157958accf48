"""Kernels that are compiled at run time: element-wise expressions, reductions and CUDA C++."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from cudakit.arrays.calls import (
    KernelCall,
    KernelsByDevice,
    bind_arguments,
    bind_outputs,
    choose_threads,
    stream_of,
)
from cudakit.arrays.elementwise import (
    ElementwiseProgram,
    Operand,
    ResultType,
)
from cudakit.arrays.launch import LaunchPlan
from cudakit.arrays.reduction import ReductionProgram
from cudakit.gpu.api.arrays import ArrayView
from cudakit.gpu.arrays import operand_of, shared_device
from cudakit.gpu.device_array import DeviceArray
from cudakit.gpu.device_array import to_device as copy_to_device
from cudakit.gpu.fast_call import FastCall

if TYPE_CHECKING:
    import numpy.typing as npt

    from cudakit.gpu.api import Gpu

__all__ = ["DeviceArray", "Elementwise", "Reduction", "elementwise", "reduction", "to_device"]

# Maximum number of stored launch plans per kernel. A program that needs more changes its shapes all the time.
_MAX_PLANS = 1024

_T = TypeVar("_T")


def to_device(
    values: npt.ArrayLike, device: int | str | Gpu | None = None, stream: object = None
) -> DeviceArray:
    """Copy a numpy array to a device, and return it as an array that all libraries of CUDA accept.

    ``device`` is a CUDA index (the current device by default), "sim" or "sim:MODEL" for the simulated device
    of this process, or an opened device of cudakit. The call waits for the copy. Raises UsageError for a
    dtype that is not numeric, CudaError if the memory does not suffice.

    >>> x = cudakit.to_device([1.0, 2.0], "sim")
    >>> x.copy_to_host()
    array([1., 2.])
    """
    gpu = open_device(device)
    return copy_to_device(values, gpu, stream_of(stream, gpu))


class Elementwise(FastCall):
    """A compiled expression, which ``cudakit.elementwise`` returns. Call it with arrays and numbers.

    Arguments are given in the order of ``inputs``, or by name. ``out`` is an array, or a tuple of arrays, for
    the outputs that the expression does not read; without ``out``, the call allocates these outputs.
    ``stream`` is a stream of any library or a handle; the default is the current stream of the first array's
    library. The kernel is enqueued, and the call returns the output, or a tuple of several.

    >>> sum_and_difference = cudakit.elementwise("s = x + y; d = x - y")
    >>> sum_and_difference.inputs, sum_and_difference.outputs
    (('x', 'y'), ('s', 'd'))
    >>> s, d = sum_and_difference(cudakit.to_device([1.0, 2.0], "sim"), y=1.0)
    >>> d.copy_to_host()
    array([0., 1.])
    """

    def __init__(self, text: str, outputs: Sequence[str] | None, *, tune: bool) -> None:
        self._program = ElementwiseProgram(text, outputs)
        self._tune = tune
        self._kernels = KernelsByDevice()
        self._plans = _ByLayout[LaunchPlan]()
        self._types_by_layout = _ByLayout[dict[str, ResultType]]()
        program = self._program.program
        self._configure(len(program.inputs), len(program.new_outputs))

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the arguments, in the order of a call."""
        return self._program.program.inputs

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the results, in the order of the returned tuple."""
        return self._program.program.outputs

    def _call(
        self,
        *arguments: object,
        out: object = None,
        stream: object = None,
        **named_arguments: object,
    ) -> Any:
        """Check the arguments, enqueue the kernel, and prepare the launch of equal calls."""
        program = self._program.program
        inputs = bind_arguments(program.inputs, arguments, named_arguments)
        outputs = bind_outputs(program.new_outputs, out)
        call = KernelCall({**inputs, **outputs}, stream)
        operands = {name: call.operands[name] for name in inputs}
        new_outputs = None
        if not outputs:
            types = self._types_by_layout.of(
                map(_layout_key, operands.values()), lambda: self._program.result_types(operands)
            )
            new_outputs = tuple(types.values()) or None
            outputs = {name: call.new_array(new.dtype, new.shape) for name, new in types.items()}
        views = {name: operand_of(array, name).view for name, array in outputs.items()}
        plan = self._plan(call, operands, views)
        self._program.check_overlaps(operands, views)
        names = [*inputs, *outputs]
        return call.run(
            self,
            self._kernels,
            plan,
            (*operands.values(), *views.values()),
            inputs=tuple(inputs.values()),
            outputs=tuple(outputs.values()),
            new_outputs=new_outputs,
            results=[names.index(name) for name in program.outputs],
        )

    def _plan(
        self, call: KernelCall, inputs: Mapping[str, Operand], outputs: Mapping[str, ArrayView]
    ) -> LaunchPlan:
        def make_plan() -> LaunchPlan:
            threads = None
            if self._tune:
                self._program.check_overlaps(inputs, outputs)
                call.wait_for_arrays()
                kernels = self._kernels.kernels_of(call.gpu)
                threads = choose_threads(call, kernels, self._program, inputs, outputs)
            return self._program.plan(inputs, outputs, threads)

        key = map(_layout_key, (*inputs.values(), *outputs.values()))
        # The fastest block size differs between devices.
        return self._plans.of((call.gpu, *key) if self._tune else key, make_plan)


def elementwise(
    expressions: str,
    *,
    outputs: Sequence[str] | None = None,
    tune: bool = False,
) -> Elementwise:
    """Return a function that computes expressions for each element of arrays, in one kernel.

    Expressions are Python assignments, one on each line or separated by semicolons. Names that are read
    before they are assigned are the arguments, in the order of first use: device arrays of any library
    (``__cuda_array_interface__`` or DLPack), which broadcast as in numpy, or numbers. Assigned names are
    the outputs; ``outputs`` names the outputs to store, if the others are only intermediate values. A name
    that is read and assigned, as in ``x += y``, is updated in place. New outputs are arrays of the first
    argument's library. With ``tune``, the first call with new dtypes or sizes measures several block sizes
    on copies of the arrays that it writes; the fastest one is stored in the kernel cache for this model of
    GPU.

    Operators are those of Python, with ``a if c else b``; functions are those of numpy, such as ``exp``,
    ``maximum``, ``where`` and ``isnan``, and conversions have the name of a dtype. Dtypes are promoted as in
    PyTorch; float16 and bfloat16 are computed in float32 and rounded when they are stored.

    The kernel is compiled by NVRTC at the first call with new dtypes, and stored in the kernel cache. Raises
    UsageError, before anything is changed, for an invalid expression (with its source line), arrays that are
    in host memory or on several devices, shapes that do not broadcast, and outputs that are read-only,
    misaligned or overlap an input in part.

    >>> scale_and_add = cudakit.elementwise("z = x * a + y")
    >>> x = cudakit.to_device([1.0, 2.0, 3.0], "sim")
    >>> scale_and_add(x, 10, x).copy_to_host()
    array([11., 22., 33.])
    """
    return Elementwise(expressions, outputs, tune=tune)


class Reduction(FastCall):
    """A compiled reduction, which ``cudakit.reduction`` returns. Call it with arrays and numbers.

    Arguments are given in the order of ``inputs``, or by name. ``out`` is an array for the results; without
    it, one is allocated. ``stream`` is a stream of any library or a handle; the default is the current stream
    of the first array's library. The kernel is enqueued, and the call returns the array of results.

    >>> largest = cudakit.reduction("max(x)")
    >>> float(largest(cudakit.to_device([1.0, 3.0, 2.0], "sim")).copy_to_host())
    3.0
    """

    def __init__(self, text: str, axis: int | Sequence[int] | None, *, keepdims: bool) -> None:
        self._program = ReductionProgram(text, axis, keepdims=keepdims)
        self._kernels = KernelsByDevice()
        self._plans = _ByLayout[LaunchPlan]()
        self._configure(len(self._program.inputs), 1)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the arguments, in the order of a call."""
        return self._program.inputs

    def _call(
        self,
        *arguments: object,
        out: object = None,
        stream: object = None,
        **named_arguments: object,
    ) -> Any:
        """Check the arguments, enqueue the kernel, and prepare the launch of equal calls."""
        program = self._program
        inputs = bind_arguments(program.inputs, arguments, named_arguments)
        call = KernelCall({**inputs, **bind_outputs(("out",), out)}, stream)
        operands = {name: call.operands[name] for name in inputs}
        new_outputs = None
        if out is None:
            result_type = program.result_type(operands)
            new_outputs = (result_type,)
            out = call.new_array(result_type.dtype, result_type.shape)
        output = operand_of(out, "out").view
        views = (*operands.values(), output)
        plan = self._plans.of(map(_layout_key, views), lambda: program.plan(operands, output))
        program.check_overlaps(operands, output)
        return call.run(
            self,
            self._kernels,
            plan,
            views,
            inputs=tuple(inputs.values()),
            outputs=(out,),
            new_outputs=new_outputs,
            results=[len(inputs)],
        )


def reduction(
    expression: str, *, axis: int | Sequence[int] | None = None, keepdims: bool = False
) -> Reduction:
    """Return a function that reduces an expression of arrays over all axes or over some, in one kernel.

    The expression contains one call of ``sum``, ``prod``, ``mean``, ``min``, ``max``, ``any`` or ``all`` of
    an element-wise expression, as in ``sum(x * y)`` or ``sqrt(sum(x * x))``; arguments, operators, functions
    and errors are those of ``cudakit.elementwise``. ``axis`` and ``keepdims`` are those of numpy. Integers
    are added in 64 bits, float16 and bfloat16 in float32. The result is the same in every run.

    Raises UsageError, before anything is changed, for an expression without exactly one reduction, an axis
    that does not exist, and the minimum or maximum of no elements.

    >>> norm = cudakit.reduction("sqrt(sum(x * x))", axis=1)
    >>> norm(cudakit.to_device([[3.0, 4.0], [6.0, 8.0]], "sim")).copy_to_host()
    array([ 5., 10.])
    """
    return Reduction(expression, axis, keepdims=keepdims)


class _ByLayout(dict[tuple[object, ...], _T]):
    """What was computed for the layouts of operands."""

    def of(self, layouts: Iterable[object], compute: Callable[[], _T]) -> _T:
        """Return the value for layouts, computed at the first call."""
        key = tuple(layouts)
        value = self.get(key)
        if value is None:
            if len(self) >= _MAX_PLANS:
                self.clear()
            value = self[key] = compute()
        return value


def _layout_key(value: Operand) -> object:
    """Return the properties of an operand on which the launch plan depends."""
    if isinstance(value, ArrayView):
        return (value.dtype, value.shape, value.strides, value.ptr % 16, value.read_only)
    return value.dtype if isinstance(value, np.generic) else type(value)


@cache
def _open_by_name(name: str) -> Gpu:
    """Return the device with a name. All calls return one object, so that their arrays can be combined."""
    from cudakit.gpu.open import open_gpu

    return open_gpu(name)


def open_device(device: int | str | Gpu | None) -> Gpu:
    """Return the device for the argument ``device`` of a public function."""
    if isinstance(device, str):
        return _open_by_name(device)
    if device is None:
        from cudakit.gpu.cuda.current import current_device

        return shared_device(current_device())
    return shared_device(device) if isinstance(device, int) else device
