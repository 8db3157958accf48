typedef unsigned long long u64;

template <typename T, int N>
struct alignas(16) Vector { T items[N]; };

template <typename T>
__device__ inline void inspect(T bits, T exponent, T mantissa, u64& nans, u64& infinities) {
    if ((bits & exponent) != exponent) return;
    if (bits & mantissa) ++nans; else ++infinities;
}

// Adds the counts of a warp to a counter. Few warps find an element to count.
__device__ inline void add_of_warp(u64* counter, u64 count) {
    if (!__any_sync(0xFFFFFFFFu, count != 0)) return;
    for (int distance = 16; distance; distance /= 2)
        count += __shfl_down_sync(0xFFFFFFFFu, count, distance);
    if (threadIdx.x % 32 == 0) atomicAdd(counter, count);
}

// Reads vectors of 16 bytes, and the elements before and after them one by one.
template <typename T>
__device__ inline void count_nonfinite(u64* counters, const T* data, u64 count, T exponent, T mantissa) {
    constexpr int N = 16 / sizeof(T);
    const u64 thread = blockIdx.x * (u64)blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
    const u64 misaligned = (16 - (u64)data % 16) % 16 / sizeof(T);
    const u64 head = misaligned < count ? misaligned : count;
    const u64 vectors = (count - head) / N, tail = head + vectors * N;
    u64 nans = 0, infinities = 0;
    #pragma unroll 4
    for (u64 v = thread; v < vectors; v += threads) {
        const Vector<T, N> values = ((const Vector<T, N>*)(data + head))[v];
        #pragma unroll
        for (int i = 0; i < N; ++i) inspect(values.items[i], exponent, mantissa, nans, infinities);
    }
    if (thread < head) inspect(data[thread], exponent, mantissa, nans, infinities);
    if (tail + thread < count) inspect(data[tail + thread], exponent, mantissa, nans, infinities);
    add_of_warp(counters, nans);
    add_of_warp(counters + 1, infinities);
}
