typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ u64 raw(const void* from, u64 at, int size) {
    switch (size) {
        case 1: return ((const u8*)from)[at];
        case 2: return ((const u16*)from)[at];
        case 4: return ((const u32*)from)[at];
        default: return ((const u64*)from)[at];
    }
}

// Matrices are one pitch apart. Counts poison in columns, and padding without poison.
extern "C" __global__ void cudakit_count_poison(
    u64* found, const void* matrices, u64 pattern, u64 rows, u64 leading, u64 elements, u64 pitch, u64 count,
    int size) {
    u64 unwritten = 0, overwritten = 0;
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += (u64)gridDim.x * blockDim.x) {
        const bool poison = raw(matrices, i, size) == pattern;
        const u64 at = i % pitch;
        if (at < elements && at % leading < rows) unwritten += poison; else overwritten += !poison;
    }
    if (unwritten) atomicAdd(found, unwritten);
    if (overwritten) atomicAdd(found + 1, overwritten);
}
