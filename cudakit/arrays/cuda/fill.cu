// Rounds to the nearest value of a narrow format, ties to even, and saturates at the largest value.
__device__ u32 round_to(float value, int width, int mantissa, int bias, float largest) {
    const u32 sign = __float_as_uint(value) >> 31;
    const float magnitude = fminf(fabsf(value), largest);
    int exponent = (int)(__float_as_uint(magnitude) >> 23) - 127;
    if (exponent < 1 - bias) exponent = 1 - bias;
    const u32 steps = (u32)rintf(ldexpf(magnitude, mantissa - exponent));
    return sign << (width - 1) | (((u32)(exponent + bias - 1) << mantissa) + steps);
}

__device__ int nearest(double value, double low, double high) {
    return (int)rint(fmin(fmax(value, low), high));
}

__device__ void store(void* out, u64 at, int type, double value) {
    const float single = (float)value;
    switch (type) {
        case 0: ((double*)out)[at] = value; break;
        case 1: ((float*)out)[at] = single; break;
        case 2: ((unsigned short*)out)[at] = round_to(single, 16, 10, 15, 65504.0f); break;
        case 3: ((unsigned short*)out)[at] = round_to(single, 16, 7, 127, 3.3895314e38f); break;
        case 4: ((unsigned char*)out)[at] = round_to(single, 8, 3, 7, 448.0f); break;
        case 5: ((unsigned char*)out)[at] = round_to(single, 8, 2, 15, 57344.0f); break;
        case 6: ((signed char*)out)[at] = nearest(value, -128.0, 127.0); break;
        case 7: ((int*)out)[at] = nearest(value, -2147483648.0, 2147483647.0); break;
    }
}

__device__ u64 wide(u32 low, u32 high) { return (u64)high << 32 | low; }

// Uniform in (-1, 1), symmetric about 0 and never 0.
__device__ double symmetric(u32 word) { return (((int)word >> 8) | 1) * 0x1p-23; }
__device__ double symmetric(u64 word) { return (((long long)word >> 11) | 1) * 0x1p-52; }

// Two normal values (Box and Muller, 1958) from a number in (0, 1] and one in [0, 1).
__device__ double2 normal(double positive, double angle) {
    double sine, cosine;
    const double radius = sqrt(-2.0 * log(positive));
    sincospi(2.0 * angle, &sine, &cosine);
    return make_double2(radius * cosine, radius * sine);
}

#define FOR_EACH_BLOCK(blocks) \
    for (u64 b = blockIdx.x * (u64)blockDim.x + threadIdx.x; b < (blocks); b += (u64)gridDim.x * blockDim.x)

extern "C" __global__ void cudakit_fill_bits(uint4* out, u64 count, u64 first, u64 sequence, u64 seed) {
    FOR_EACH_BLOCK(count) out[b] = philox(first + b, sequence, seed);
}

__device__ void put(void* out, u64 count, int type, u64 at, double value) {
    if (at < count) store(out, at, type, value);
}

extern "C" __global__ void cudakit_fill_uniform(
    void* out, u64 count, int type, double scale, u64 sequence, u64 seed) {
    const int per_block = type == 0 ? 2 : 4;
    FOR_EACH_BLOCK((count + per_block - 1) / per_block) {
        const uint4 w = philox(b, sequence, seed);
        const u64 at = b * per_block;
        if (type == 0) {
            put(out, count, type, at, scale * symmetric(wide(w.x, w.y)));
            put(out, count, type, at + 1, scale * symmetric(wide(w.z, w.w)));
        } else {
            put(out, count, type, at, scale * symmetric(w.x));
            put(out, count, type, at + 1, scale * symmetric(w.y));
            put(out, count, type, at + 2, scale * symmetric(w.z));
            put(out, count, type, at + 3, scale * symmetric(w.w));
        }
    }
}

extern "C" __global__ void cudakit_fill_normal(
    void* out, u64 count, int type, double scale, u64 sequence, u64 seed) {
    const int per_block = type == 0 ? 2 : 4;
    FOR_EACH_BLOCK((count + per_block - 1) / per_block) {
        const uint4 w = philox(b, sequence, seed);
        const u64 at = b * per_block;
        if (type == 0) {
            const double2 n = normal(
                ((wide(w.x, w.y) >> 11) + 1) * 0x1p-53, (wide(w.z, w.w) >> 11) * 0x1p-53);
            put(out, count, type, at, scale * n.x);
            put(out, count, type, at + 1, scale * n.y);
        } else {
            const double2 n = normal((w.x + 1.0) * 0x1p-32, w.y * 0x1p-32);
            const double2 m = normal((w.z + 1.0) * 0x1p-32, w.w * 0x1p-32);
            put(out, count, type, at, scale * n.x);
            put(out, count, type, at + 1, scale * n.y);
            put(out, count, type, at + 2, scale * m.x);
            put(out, count, type, at + 3, scale * m.y);
        }
    }
}

extern "C" __global__ void cudakit_fill_integers(
    void* out, u64 count, int type, long long low, u64 choices, u64 sequence, u64 seed) {
    FOR_EACH_BLOCK((count + 3) / 4) {
        const uint4 w = philox(b, sequence, seed);
        put(out, count, type, b * 4, low + (long long)(w.x * choices >> 32));
        put(out, count, type, b * 4 + 1, low + (long long)(w.y * choices >> 32));
        put(out, count, type, b * 4 + 2, low + (long long)(w.z * choices >> 32));
        put(out, count, type, b * 4 + 3, low + (long long)(w.w * choices >> 32));
    }
}

extern "C" __global__ void cudakit_fill_constant(void* out, u64 count, int type, double value) {
    FOR_EACH_BLOCK(count) store(out, b, type, value);
}
