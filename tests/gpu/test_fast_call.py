"""Calls of prepared kernels in C, with tensors in host memory and a driver that records launches."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
from gpu.launch_recorder import CONTEXT, FUNCTION, STREAM, Driver, recording_driver

from cudakit.gpu.api import LEGACY

torch = pytest.importorskip("torch")
fast_call = pytest.importorskip("cudakit.gpu._fast_call")
if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
    pytest.skip("needs PyTorch 2.10", allow_module_level=True)


@pytest.fixture
def driver() -> Iterator[Driver]:
    with recording_driver() as driver:
        yield driver


class Adder(fast_call.FastCall):
    """A kernel of two arrays with one output, which counts the calls that run in Python."""

    def __init__(self, driver: Driver, *, scratch: int = 0) -> None:
        self.driver, self.scratch = driver, scratch
        self.python_calls = 0
        self.stream = STREAM
        self._configure(2, 1)

    def _call(self, x: Any, y: Any, *, out: Any = None, stream: Any = None) -> Any:  # noqa: ARG002
        self.python_calls += 1
        result = torch.empty_like(x) if out is None else out
        parameters = (
            ("c", 0, b"12345678"),
            ("a", 0, b""),
            ("a", 1, b""),
            ("a", 2, b""),
            ("s", 0, b""),
        )
        if isinstance(y, float):
            parameters = (("a", 0, b""), ("f", 1, b""), ("a", 2, b""))
        self.driver.parameter_count = len(parameters)
        kernel = (FUNCTION, CONTEXT, 0, 7, 256, self.stream, self.scratch, 0)
        allocate = None if out is not None else empty_tensors
        self._prepare((x, y), (result,), allocate, (2,), parameters, *kernel)
        return result


def empty_tensors(stream: int) -> tuple[Any, ...]:
    raise AssertionError(f"the exchange API allocates tensors, also on stream {stream}")


def tensors(count: int, *shape: int) -> list[Any]:
    return [torch.zeros(shape or (64,)) for _ in range(count)]


def test_equal_call_is_launched_without_python(driver: Driver) -> None:
    add = Adder(driver)
    x, y, out = tensors(3)
    assert add(x, y, out=out) is out
    x, y, out = tensors(3)

    assert add(x, y, out=out, stream=STREAM) is out

    assert add.python_calls == 1
    (function, grid, block, stream, words) = driver.launches[0]
    assert (function, grid, block, stream) == (FUNCTION, 7, 256, STREAM)
    assert words[0] == int.from_bytes(b"12345678", "little")
    assert words[1:4] == [x.data_ptr(), y.data_ptr(), out.data_ptr()]


def test_output_is_allocated_as_a_tensor_of_the_prepared_shape(driver: Driver) -> None:
    add = Adder(driver)
    x, y = tensors(2, 3, 5)
    add(x, y)

    result = add(x, y)

    assert add.python_calls == 1
    assert type(result) is torch.Tensor
    assert result.shape == (3, 5)
    assert result.dtype == torch.float32
    assert driver.launches[0][4][3] == result.data_ptr()


def test_number_is_passed_in_the_type_of_the_parameter(driver: Driver) -> None:
    add = Adder(driver)
    (x,) = tensors(1)
    add(x, 1.5)
    add(x, 2.5)

    assert add.python_calls == 1
    words = driver.launches[0][4]
    assert words[1] & 0xFFFFFFFF == int.from_bytes(ctypes.c_float(2.5), "little")
    add(x, 3)
    assert add.python_calls == 2


@pytest.mark.parametrize(
    "changed",
    [
        lambda x: x[:32],
        lambda x: x.reshape(8, 8),
        lambda x: x.to(torch.float64),
        lambda x: x[::2],
        lambda x: torch.cat([x, x])[1:65],
        lambda x: x.to(torch.complex64),
        lambda x: x.numpy(),
    ],
)
def test_call_with_another_layout_runs_in_python(driver: Driver, changed: Any) -> None:
    add = Adder(driver)
    x, y, out = tensors(3)
    add(x, y, out=out)

    add(changed(x), y, out=out)

    assert add.python_calls == 2
    assert driver.launches == []


def test_output_that_overlaps_an_input_in_part_runs_in_python(driver: Driver) -> None:
    add = Adder(driver)
    x, y, out = tensors(3)
    add(x, y, out=out)
    memory = torch.zeros(200)

    add(memory[:64], y, out=memory[32:96])
    assert add.python_calls == 2
    add(x, y, out=x)
    assert add.python_calls == 2
    assert driver.launches[0][4][3] == x.data_ptr()


def test_output_that_requires_a_gradient_runs_in_python(driver: Driver) -> None:
    add = Adder(driver)
    x, y, out = tensors(3)
    add(x, y, out=out)

    add(x, y, out=out.requires_grad_())

    assert add.python_calls == 2


def test_lazy_negation_runs_in_python(driver: Driver) -> None:
    add = Adder(driver)
    y, out = tensors(2)
    imaginary = torch.zeros(64, dtype=torch.complex64).conj().imag
    plain = torch.zeros(64, dtype=torch.complex64).imag
    add(plain, y, out=out)
    add(plain, y, out=out)
    assert add.python_calls == 1

    add(imaginary, y, out=out)

    assert add.python_calls == 2


def test_scratch_memory_is_that_of_the_stream(driver: Driver) -> None:
    add = Adder(driver, scratch=0x5000)
    x, y, out = tensors(3)
    add(x, y, out=out, stream=STREAM)
    add(x, y, out=out, stream=STREAM)
    assert driver.launches[0][4][4] == 0x5000

    add(x, y, out=out, stream=STREAM + 1)
    assert add.python_calls == 2
    driver.capturing = 1
    add(x, y, out=out, stream=STREAM)
    assert add.python_calls == 3


def test_default_stream_has_scratch_memory(driver: Driver) -> None:
    add = Adder(driver, scratch=0x5000)
    add.stream = LEGACY
    x, y, out = tensors(3)
    for stream in (None, 0, LEGACY):
        add(x, y, out=out, stream=stream)

    assert add.python_calls == 1
    assert [launch[3] for launch in driver.launches] == [LEGACY, LEGACY]


def test_failed_launch_is_repeated_in_python(driver: Driver) -> None:
    add = Adder(driver)
    x, y, out = tensors(3)
    add(x, y, out=out)
    driver.status = 400

    add(x, y, out=out)

    assert add.python_calls == 2


def test_plans_of_many_shapes_are_bounded(driver: Driver) -> None:
    add = Adder(driver)
    for size in range(1, 400):
        x, y, out = tensors(3, size)
        add(x, y, out=out)
        add(x, y, out=out)

    assert add.python_calls == 399
    assert len(driver.launches) == 399


def test_unusual_arguments_run_in_python(driver: Driver) -> None:
    add = Adder(driver)
    x, y, out = tensors(3)
    add(x, y, out=out)
    with pytest.raises(TypeError):
        add(x)
    with pytest.raises(TypeError):
        add(x, y, other=3)
    add(x, y=y, out=out)
    add(x, y, out=out, stream="text")
    assert add.python_calls == 3
