"""Names of kernels, streams and call sites."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudakit.core.sanitize.names import (
    BACKWARD_FRAME,
    MAX_KERNEL_NAME_LENGTH,
    call_site,
    call_site_index,
    short_kernel,
    stream_name,
)
from cudakit.document import Frame
from cudakit.trace.kinds import StreamFlag

COPY = (
    "at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)"
    "::{lambda()#3}::operator()() const::{lambda(float)#1}>(at::TensorIteratorBase&, int const&)"
    "::{lambda(int)#1}"
)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("triton_poi_fused_add_mul_relu_0", "triton_poi_fused_add_mul_relu_0"),
        ("add(float*, float*, int)", "add"),
        ("void fill<float>(float*)", "fill<float>"),
        ("void f<(Mode)2, true, 3ul, -1l>(int) [clone .kd]", "f<2, true, 3, -1>"),
        ("outer<int>::inner(int) const", "outer::inner"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
            "std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)",
            "at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float>, …>",
        ),
        (
            f"void at::native::elementwise_kernel<128, 4, {COPY}>(int, {COPY})",
            "elementwise_kernel<128, 4, gpu_kernel_impl_nocast<direct_copy_kernel_cuda>>",
        ),
        (
            "void at::native::(anonymous namespace)::Cat<at::native::(anonymous namespace)::Opaque<4u>, "
            "unsigned int>(float const*)",
            "at::native::Cat<Opaque<4>, unsigned int>",
        ),
        (
            "cudapy::__main__::add[abi:v1][abi:cw51cXTLSU](Array<float, 1, C, mutable, aligned>)",
            "cudapy::__main__::add",
        ),
    ],
)
def test_short_kernel_name_keeps_what_distinguishes_it(name: str, short: str) -> None:
    assert short_kernel(name) == short


@pytest.mark.parametrize(
    ("max_length", "short"),
    [
        (63, "library::with_a_name::kernel_of_many_types<int, float, double>"),
        (50, "library::with_a_name::kernel_of_many_types<int, …>"),
        (49, "kernel_of_many_types<int, …>"),
        (23, "kernel_of_many_types<…>"),
        (11, "kerne…es<…>"),
    ],
)
def test_short_kernel_name_has_fewer_details_in_less_width(max_length: int, short: str) -> None:
    name = "void library::with_a_name::kernel_of_many_types<int, float, double>(int)"

    assert short_kernel(name, max_length=max_length) == short


@pytest.mark.parametrize("name", ["a<b", "f(int))", "a>b<c", "(<)>", "void f<(1>2)>(int)"])
def test_kernel_name_with_unbalanced_brackets_is_kept(name: str) -> None:
    assert short_kernel(name) == name


@given(st.text(alphabet="ab:<>(){}[], &*#1uloperator "), st.integers(3, MAX_KERNEL_NAME_LENGTH))
def test_short_kernel_name_is_bounded_for_any_input(name: str, max_length: int) -> None:
    assert len(short_kernel(name, max_length=max_length)) <= max_length


@pytest.mark.parametrize(
    ("number", "flag", "name"),
    [
        (0, None, "the host"),
        (1, StreamFlag.LEGACY, "the legacy default stream"),
        (7, StreamFlag.NON_BLOCKING, "stream 7 (non-blocking)"),
        (9, StreamFlag.BLOCKING, "stream 9"),
        (11, StreamFlag.PER_THREAD, "per-thread default stream 11"),
        (13, None, "stream 13"),
    ],
)
def test_stream_name_uses_cuda_terms(number: int, flag: StreamFlag | None, name: str) -> None:
    assert stream_name(number, flag) == name


@pytest.mark.parametrize(
    "library",
    [
        "/venv/lib/python3.12/site-packages/torch/nn/modules/linear.py",
        "/usr/lib/python3/dist-packages/cupy/core.py",
        "/usr/lib/python3.12/threading.py",
        "/src/cudakit/gpu/sim/device.py",
        "<frozen importlib._bootstrap>",
        "",
    ],
)
def test_call_site_is_innermost_frame_outside_libraries(library: str) -> None:
    frames = (Frame("f", library, 3), Frame("step", "/home/u/train.py", 7), Frame("m", "/x.py", 1))

    assert call_site_index(frames) == 1
    assert call_site(frames) == "train.py:7"


@pytest.mark.parametrize("typed", ["<stdin>", "<string>", "<ipython-input-3>"])
def test_interactive_code_counts_as_program_code(typed: str) -> None:
    assert call_site_index((Frame("run", typed, 1), Frame("main", "/x.py", 2))) == 0


def test_call_site_of_library_only_stack_is_its_innermost_frame() -> None:
    frames = (Frame("f", "<generated>", 3), Frame("g", "/v/site-packages/a/b.py", 9))

    assert call_site_index(frames) == 0


def test_call_site_of_empty_stack_is_empty() -> None:
    assert (call_site_index(()), call_site(())) == (0, "")


def test_call_site_of_backward_pass_is_its_start() -> None:
    synthetic = Frame(BACKWARD_FRAME, "", 0)
    torch = Frame("backward", "/v/site-packages/torch/_tensor.py", 9)

    assert call_site((synthetic, torch, Frame("step", "/home/u/train.py", 7))) == "train.py:7"
    assert call_site((synthetic, torch)) == "_tensor.py:9"
    assert call_site_index((synthetic,)) == 0
