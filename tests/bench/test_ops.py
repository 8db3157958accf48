from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest

from cudakit.bench.case import Rule, Verification
from cudakit.bench.ops import TIMINGS, KernelLibrary, OpsSpec
from cudakit.bench.pipeline import run
from cudakit.bench.result import BenchResult
from cudakit.cli.bench.ops import PublicFunction
from cudakit.errors import EnvironmentUnusable, InputError
from cudakit.gpu.api import Gpu
from cudakit.gpu.api.arrays import ArrayView
from cudakit.gpu.api.gemm import OPERATIONS, Operation, OperationLibrary
from cudakit.gpu.array_libraries import open_array_library
from cudakit.gpu.sim import Sim
from cudakit.units import Unavailable

PUBLIC = {
    "add": partial(PublicFunction, operation="add"),
    "sum": partial(PublicFunction, operation="sum"),
}


class WrongLibrary(KernelLibrary):
    """A library that changes the first element of each output to 0.5."""

    def bind(
        self, operation: Operation, inputs: Sequence[ArrayView], output: ArrayView
    ) -> Callable[[], object]:
        call = super().bind(operation, inputs, output)

        def compute_and_spoil() -> None:
            call()
            self._gpu.fill(output.ptr, 0x3F, 4, self._stream)

        return compute_and_spoil


class DeviceWithTorch(Sim):
    """A simulated device that has a library under the name torch."""

    def __init__(self, library: Callable[[Gpu], OperationLibrary]) -> None:
        super().__init__()
        self._open_library = library

    def array_library(self, name: Any) -> OperationLibrary:  # noqa: ARG002
        return self._open_library(self)


def measure(gpu: Gpu, **options: Any) -> BenchResult:
    defaults = {"sizes": (1000,), "timings": ("eager",), "cache": "hot", "public_libraries": PUBLIC}
    return run(OpsSpec(**defaults | options), gpu)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("timing", TIMINGS)
def test_operation_is_verified_and_frees_memory(operation: Operation, timing: str) -> None:
    with closing(Sim()) as gpu:
        (case,) = measure(gpu, operations=(operation,), timings=(timing,)).results

        assert case.verified
        assert case.axes == {"operation": operation, "elements": 1000, "timing": timing}
        assert isinstance(case.verification, Verification)
        assert 0 <= case.verification.error <= case.verification.tolerance


@pytest.mark.parametrize(
    ("operation", "bytes_moved"),
    [("add", 12_000), ("matmul", 3 * 4 * 31 * 31), ("softmax", 8_000), ("sum", 4_004)],
)
def test_rate_counts_inputs_and_output_once(operation: Operation, bytes_moved: int) -> None:
    with closing(Sim()) as gpu:
        (case,) = measure(gpu, operations=(operation,), cache="rotate").results

    assert case.bytes_moved == bytes_moved
    assert case.operations == (2 * 31**3 if operation == "matmul" else 0)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_only_arithmetic_has_a_peak_if_data_stays_in_the_cache(operation: Operation) -> None:
    with closing(Sim()) as gpu:
        (case,) = measure(gpu, operations=(operation,), cache="rotate").results

    if operation == "matmul":
        assert not isinstance(case.limit, Unavailable)
        assert case.limit.bound == "arithmetic"
    else:
        assert isinstance(case.limit, Unavailable)
        assert "stays in the L2 cache" in case.limit.reason


def test_host_time_of_a_call_has_no_rate() -> None:
    with closing(Sim()) as gpu:
        (case,) = measure(gpu, operations=("add",), timings=("host-call",)).results

    assert case.amount == 0
    assert "cudakit.elementwise('z = x + y')" in str(case.settings["call"])


@pytest.mark.parametrize("operation", OPERATIONS)
def test_wrong_values_have_no_time(operation: Operation) -> None:
    with closing(DeviceWithTorch(WrongLibrary)) as gpu:
        cudakit, torch = measure(gpu, operations=(operation,), baselines=("torch",)).results

    assert cudakit.verified
    assert not torch.verified
    assert isinstance(torch.median_s, Unavailable)
    assert torch.median_s.reason.startswith("wrong results")


def test_output_that_is_not_written_is_wrong() -> None:
    class IdleLibrary(KernelLibrary):
        def bind(self, *_: object) -> Callable[[], object]:
            return lambda: None

    with closing(DeviceWithTorch(IdleLibrary)) as gpu:
        _, torch = measure(gpu, operations=("add",), baselines=("torch",)).results

    assert isinstance(torch.median_s, Unavailable)
    assert "1000 of 1000 values were never written" in torch.median_s.reason


def test_each_buffer_set_is_verified() -> None:
    class LibraryWrongInOneSet(WrongLibrary):
        """A library whose second buffer set has wrong values."""

        def __init__(self, gpu: Gpu) -> None:
            super().__init__(gpu)
            self._bind_count = 0

        def bind(
            self, operation: Operation, inputs: Sequence[ArrayView], output: ArrayView
        ) -> Callable[[], object]:
            self._bind_count += 1
            if self._bind_count == 2:
                return super().bind(operation, inputs, output)
            return KernelLibrary.bind(self, operation, inputs, output)

    with closing(DeviceWithTorch(LibraryWrongInOneSet)) as gpu:
        _, torch = measure(
            gpu, operations=("add",), baselines=("torch",), sizes=(100_000,), cache="rotate"
        ).results

    assert isinstance(torch.median_s, Unavailable)


def test_library_that_fails_in_a_capture_is_left_out() -> None:
    class LibraryWithoutCapture(KernelLibrary):
        def bind(self, *arguments: Any) -> Callable[[], object]:
            call = super().bind(*arguments)

            def compute_outside_of_captures() -> None:
                if self._gpu.capture_id(self._stream) is not None:
                    raise NotImplementedError("no cuBLAS in a capture")
                call()

            return compute_outside_of_captures

    with closing(DeviceWithTorch(LibraryWithoutCapture)) as gpu:
        cudakit, torch = measure(
            gpu, operations=("matmul",), baselines=("torch",), timings=("graph",)
        ).results

    assert cudakit.verified
    assert torch.is_unsupported
    assert isinstance(torch.median_s, Unavailable)
    assert "no cuBLAS in a capture" in torch.median_s.reason


def test_torch_needs_a_real_device() -> None:
    with closing(Sim()) as gpu:
        cudakit, torch = measure(gpu, operations=("add",), baselines=("torch",)).results

    assert cudakit.verified
    assert torch.is_unsupported
    assert isinstance(torch.median_s, Unavailable)
    assert "torch needs a real GPU" in torch.median_s.reason


def test_missing_library_names_the_pip_command() -> None:
    if find_spec("cupy"):
        pytest.skip("CuPy is installed")
    with closing(Sim()) as gpu, pytest.raises(EnvironmentUnusable) as error:
        open_array_library(gpu, "cupy")  # type: ignore[arg-type]

    assert error.value.hint.startswith("pip install 'cupy-cuda")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"operations": ("divide",)}, "unknown operation 'divide'"),
        ({"timings": ("cpu",)}, "unknown timing 'cpu'"),
        ({"baselines": ("jax",)}, "unknown library 'jax'"),
        ({"sizes": (0,)}, "--sizes is 0"),
        ({"cache": "flush"}, "no --cache flush"),
    ],
)
def test_invalid_option_is_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        OpsSpec(**options)


@pytest.fixture
def real_device() -> Iterator[Gpu]:
    from cudakit.gpu.open import open_gpu

    with closing(open_gpu("cuda")) as gpu:
        yield gpu


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["torch", "cupy"])
def test_libraries_compute_the_same_values_on_gpu(real_device: Gpu, name: Any) -> None:
    pytest.importorskip(name)

    result = measure(
        real_device,
        baselines=(name,),
        sizes=(10_000,),
        timings=TIMINGS,
        warmup_s=0.0,
        rounds=1,
        rule=Rule(min_samples=5, min_time_s=0.01, timeout_s=0.2),
    )

    assert [case.library for case in result.results] == ["cudakit", name] * 12
    unverified_cases = [
        (case.library, case.axes["operation"], case.axes["timing"])
        for case in result.results
        if not case.verified
    ]
    # CuPy does not let cuBLAS run during a stream capture.
    assert unverified_cases == ([("cupy", "matmul", "graph")] if name == "cupy" else [])


@pytest.mark.gpu
def test_library_restores_the_current_stream_of_torch_on_gpu(real_device: Gpu) -> None:
    torch = pytest.importorskip("torch")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        library = real_device.array_library("torch")
        library.set_stream(real_device.stream(blocking=False))
        assert torch.cuda.current_stream() != stream
        library.close()

        assert torch.cuda.current_stream() == stream
