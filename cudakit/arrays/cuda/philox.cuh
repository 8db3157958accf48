typedef unsigned int u32;
typedef unsigned long long u64;

// Returns the low and the high half of a 64-bit product. The assembly text keeps the compiler from adding an
// instruction that has no effect after each multiplication (NVRTC 13.5 for sm_90).
__device__ inline uint2 multiply_wide(u32 a, u32 b) {
#ifdef __CUDA_ARCH__
    uint2 halves;
    asm("{ .reg .u64 product; mul.wide.u32 product, %2, %3; mov.b64 {%0, %1}, product; }"
        : "=r"(halves.x), "=r"(halves.y) : "r"(a), "r"(b));
    return halves;
#else
    const u64 product = (u64)a * b;
    return {(u32)product, (u32)(product >> 32)};
#endif
}

// Returns the block of four words at a position of a sequence.
__device__ uint4 philox(u64 position, u64 sequence, u64 key) {
    uint4 at = make_uint4((u32)position, (u32)(position >> 32), (u32)sequence, (u32)(sequence >> 32));
    u32 first = (u32)key, second = (u32)(key >> 32);
    #pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint2 a = multiply_wide(at.x, 0xD2511F53u), b = multiply_wide(at.z, 0xCD9E8D57u);
        at = make_uint4(b.y ^ at.y ^ first, b.x, a.y ^ at.w ^ second, a.x);
        first += 0x9E3779B9u;
        second += 0xBB67AE85u;
    }
    return at;
}
