"""Short forms of the names of kernels."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudakit.trace.names import MAX_KERNEL_NAME_LENGTH, short_kernel, short_kernels

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


def test_different_kernels_with_equal_short_names_are_numbered() -> None:
    names = ["f", *(f"void {'g' * 40}<{'h' * 40}, {i}>(int)" for i in (1, 2)), "f"]

    first, second = (short_kernels(names)[name] for name in names[1:3])
    assert short_kernels(names)["f"] == "f"
    assert first.removesuffix(" #1") == second.removesuffix(" #2") == short_kernel(names[1])


@pytest.mark.parametrize("name", ["a<b", "f(int))", "a>b<c", "(<)>", "void f<(1>2)>(int)"])
def test_kernel_name_with_unbalanced_brackets_is_kept(name: str) -> None:
    assert short_kernel(name) == name


@given(st.text(alphabet="ab:<>(){}[], &*#1uloperator "), st.integers(3, MAX_KERNEL_NAME_LENGTH))
def test_short_kernel_name_is_bounded_for_any_input(name: str, max_length: int) -> None:
    assert len(short_kernel(name, max_length=max_length)) <= max_length
