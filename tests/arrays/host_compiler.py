"""Random kernels compiled for the CPU: the device functions run without a GPU.

Every intrinsic that the source uses is defined by the operation that its documentation names, and
``-ffp-contract=off`` keeps the compiler from fusing operations. A launch has one thread.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cudakit.arrays.random import SOURCE, Draw
from cudakit.arrays.random_values import Counter

COMPILER = shutil.which("g++")

_PREFIX = r"""
#include <cmath>
#include <cstring>
#define __device__
#define __global__
#define __shared__ static
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct Index { unsigned x; };
static Index blockIdx{0}, threadIdx{0}, blockDim{1}, gridDim{1};
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline void __syncthreads() { threadIdx.x = 0; }
static inline void __syncwarp() {}
static inline void __threadfence() {}
static inline unsigned atomicInc(unsigned* counter, unsigned largest) {
    const unsigned old = *counter;
    *counter = old >= largest ? 0 : old + 1;
    return old;
}
static inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
static inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __ddiv_rn(double a, double b) { return a / b; }
static inline float __fsqrt_rn(float a) { return std::sqrt(a); }
static inline double __dsqrt_rn(double a) { return std::sqrt(a); }
static inline float __uint2float_rn(unsigned a) { return (float)a; }
static inline float __int2float_rn(int a) { return (float)a; }
static inline double __ull2double_rn(unsigned long long a) { return (double)a; }
static inline double __ll2double_rn(long long a) { return (double)a; }
template <typename To, typename From> static inline To same_bits(From from) {
    To to;
    static_assert(sizeof to == sizeof from, "");
    std::memcpy(&to, &from, sizeof to);
    return to;
}
static inline int __float_as_int(float a) { return same_bits<int>(a); }
static inline unsigned __float_as_uint(float a) { return same_bits<unsigned>(a); }
static inline float __int_as_float(int a) { return same_bits<float>(a); }
static inline long long __double_as_longlong(double a) { return same_bits<long long>(a); }
static inline double __longlong_as_double(long long a) { return same_bits<double>(a); }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
"""
# Parts of the source that only a GPU can run, and their replacements for one thread of the CPU.
_REPLACEMENTS = (
    ("#define WARP 32", "#define WARP 1"),
    (r"asm\(\"cvt\.rn\.f16\.f32[^;]*;[^;]*;", "out->bits = same_bits<u16>((_Float16)value);"),
    (
        r"if \(threadIdx\.x < PERMUTATION_BLOCKS\)",
        "for (; threadIdx.x < PERMUTATION_BLOCKS; ++threadIdx.x)",
    ),
)


def compile_random_kernels(folder: Path, kernel_source: str = SOURCE) -> ctypes.CDLL:
    """Compile a source of the random kernels as a library for the CPU."""
    text = _PREFIX + kernel_source
    for pattern, replacement in _REPLACEMENTS:
        text, replaced = re.subn(pattern, replacement, text)
        assert replaced == 1, pattern
    source, library = folder / "random.cpp", folder / "random.so"
    source.write_text(text)
    options = ["-std=c++17", "-O2", "-ffp-contract=off", "-w", "-shared", "-fPIC"]
    subprocess.run([str(COMPILER), *options, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def fill(
    library: ctypes.CDLL, draw: Draw, start: Counter, *, offset: int = 0, stored_counter: int = 0
) -> npt.NDArray[Any]:
    """Return the elements that a kernel writes to an address ``offset`` elements after an aligned one.

    ``stored_counter`` is the address of the counter for kernels of STORED_COUNTER_SOURCE.
    """
    elements = np.zeros(draw.count + offset + 4, draw.storage)
    kernel = getattr(library, f"cudakit_random_{draw.kernel}")
    address = elements.ctypes.data + offset * elements.itemsize
    counter = (start.position, start.sequence, start.seed)
    values = (address, draw.count, *counter, stored_counter, draw.blocks)
    words = [ctypes.c_uint64(value) for value in values]
    kernel(*words, *map(_argument, draw.parameters))
    assert not elements[:offset].any()
    assert not elements[offset + draw.count :].any()
    return elements[offset : offset + draw.count]


def _argument(parameter: np.generic) -> Any:
    types = {"f8": ctypes.c_double, "f4": ctypes.c_float, "u8": ctypes.c_uint64}
    types |= {"u4": ctypes.c_uint32, "i4": ctypes.c_int32}
    return types[parameter.dtype.str[1:]](parameter.item())
