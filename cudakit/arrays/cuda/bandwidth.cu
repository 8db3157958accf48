typedef unsigned int u32;
typedef unsigned long long u64;

#define INDEX_OF_THREAD const u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; if (i >= count) return;

extern "C" __global__ void cudakit_copy(uint4* to, const uint4* from, u64 count) {
    INDEX_OF_THREAD
    __stcs(to + i, __ldcs(from + i));
}

// The sentinel is unlikely to occur elsewhere, and the compiler must keep all reads to find it.
extern "C" __global__ void cudakit_read(u32* sink, const uint4* from, u32 sentinel, u64 count) {
    INDEX_OF_THREAD
    const uint4 v = __ldcs(from + i);
    if ((v.x ^ v.y ^ v.z ^ v.w) == sentinel) *sink = sentinel;
}

extern "C" __global__ void cudakit_write(uint4* to, u32 word, u64 count) {
    INDEX_OF_THREAD
    __stcs(to + i, make_uint4(word, word, word, word));
}

extern "C" __global__ void cudakit_scale(float4* to, const float4* from, float factor, u64 count) {
    INDEX_OF_THREAD
    const float4 v = __ldcs(from + i);
    __stcs(to + i, make_float4(factor * v.x, factor * v.y, factor * v.z, factor * v.w));
}

extern "C" __global__ void cudakit_triad(
    float4* to, const float4* b, const float4* c, float factor, u64 count) {
    INDEX_OF_THREAD
    const float4 v = __ldcs(b + i), w = __ldcs(c + i);
    __stcs(to + i, make_float4(fmaf(factor, w.x, v.x), fmaf(factor, w.y, v.y),
                               fmaf(factor, w.z, v.z), fmaf(factor, w.w, v.w)));
}
