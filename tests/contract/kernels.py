"""The contract tests' kernels in CUDA C++, equivalent to those in tests/contract/host_kernels.py."""

from __future__ import annotations

SOURCE = r"""
typedef unsigned long long u64;

extern "C" __global__ void add(int* data, int count, int amount) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        data[i] += amount;
}

extern "C" __global__ void store(int* where, int value) { *where = value; }

extern "C" __global__ void move(int* to, const int* from) { *to = *from; }

extern "C" __global__ void gather(
    double* out, signed char a, short b, int c, long long d, float e, double f) {
    out[0] = a; out[1] = b; out[2] = c; out[3] = d; out[4] = e; out[5] = f;
}

extern "C" __global__ void spin(u64 nanoseconds) {
    u64 begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    while (now - begin < nanoseconds);
}
"""
