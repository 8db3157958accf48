typedef unsigned char u8;
typedef unsigned short u16;
typedef long long i64;

struct Counter { u64 position, sequence, seed; };
// A counter in device memory, and the number of CUDA blocks of the running kernel that have read it.
struct StoredCounter { Counter counter; u32 reader_blocks; };

// Returns the stored counter. The last CUDA block that reads it adds `draw_blocks` to its position.
__device__ inline Counter take_counter(StoredCounter* stored, u64 draw_blocks) {
    const Counter start = stored->counter;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        if (atomicInc(&stored->reader_blocks, gridDim.x - 1) == gridDim.x - 1) {
            __threadfence();
            stored->counter.position = start.position + draw_blocks;
        }
    }
    return start;
}

#ifdef STORED_COUNTER
#define START take_counter(stored, draw_blocks)
#else
#define START (Counter{position, sequence, seed})
#endif

// Returns a Philox block of a draw.
__device__ inline uint4 block_of(Counter start, u64 block) {
    return philox(start.position + block, start.sequence, start.seed);
}

extern "C" __global__ void cudakit_random_store_counter(
    StoredCounter* stored, u64 position, u64 sequence, u64 seed) {
    *stored = StoredCounter{{position, sequence, seed}, 0};
}

// These operations are never fused into multiply-add, so that numpy can repeat them.
__device__ inline float add(float a, float b) { return __fadd_rn(a, b); }
__device__ inline float mul(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double add(double a, double b) { return __dadd_rn(a, b); }
__device__ inline double mul(double a, double b) { return __dmul_rn(a, b); }
// A fused operation rounds as two operations if the product is exact, such as with a power of two.
__device__ inline float add_exact_product(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ inline double add_exact_product(double a, double b, double c) { return __fma_rn(a, b, c); }

// Evaluates a polynomial by Horner's rule, the coefficient of the highest power first.
template <typename T, int N>
__device__ inline T polynomial(T x, const T (&coefficients)[N]) {
    T value = coefficients[0];
    #pragma unroll
    for (int i = 1; i < N; ++i) value = add(mul(value, x), coefficients[i]);
    return value;
}

// bfloat16 and binary16 are stored as their bits, in types that select the rounding.
struct bf16 { u16 bits; };
struct fp16 { u16 bits; };

__device__ inline void round_to(float value, float* out) { *out = value; }
__device__ inline void round_to(double value, double* out) { *out = value; }
__device__ inline void round_to(float value, fp16* out) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out->bits) : "f"(value));
}
__device__ inline void round_to(float value, bf16* out) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out->bits) : "f"(value));
#else
    const u32 word = __float_as_uint(value);
    out->bits = (u16)((word + 0x7FFFu + (word >> 16 & 1u)) >> 16);
#endif
}

template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vector { T items[N]; };

// Writes elements as vectors of type G, of which each thread has COUNT, adjacent ones by adjacent threads.
template <typename G, int COUNT, typename T>
__device__ inline void store_adjacent(T* out, u64 count, u64 first, const T* values, int lane) {
    constexpr int PER_VECTOR = sizeof(G) / sizeof(T);
    if (first + WARP * COUNT * PER_VECTOR <= count) {
        G* const vectors = (G*)(out + first) + lane;
        #pragma unroll
        for (int i = 0; i < COUNT; ++i) vectors[i * WARP] = ((const G*)values)[i * WARP + lane];
        return;
    }
    for (int i = 0; i < COUNT; ++i) {
        const int index = (i * WARP + lane) * PER_VECTOR;
        if (first + index + PER_VECTOR <= count) {
            *(G*)(out + first + index) = *(const G*)(values + index);
            continue;
        }
        for (int k = 0; k < PER_VECTOR; ++k)
            if (first + index + k < count) out[first + index + k] = values[index + k];
    }
}

// Writes the values of one Philox block of each thread of a warp. If a thread has more than one vector, or
// the address is misaligned, the values pass through shared memory, so that adjacent threads write adjacent
// addresses.
template <typename T, int N>
__device__ inline void store(T* out, u64 count, u64 block, const Vector<T, N>& values) {
    constexpr int VECTOR_BYTES = sizeof(T) * N < 16 ? sizeof(T) * N : 16;
    constexpr int VECTORS = sizeof(T) * N / VECTOR_BYTES;
    const bool is_aligned = (u64)out % VECTOR_BYTES == 0;
    if (VECTORS == 1 && is_aligned && block * N + N <= count) {
        *(Vector<T, N>*)(out + block * N) = values;
        return;
    }
    if (VECTORS == 1 && is_aligned) {
        #pragma unroll
        for (int i = 0; i < N; ++i)
            if (block * N + i < count) out[block * N + i] = values.items[i];
        return;
    }
    __shared__ Vector<T, N> staged[THREADS];
    const int lane = threadIdx.x % WARP;
    Vector<T, N>* const of_warp = staged + (threadIdx.x - lane);
    __syncwarp();
    of_warp[lane] = values;
    __syncwarp();
    const u64 first = (block - lane) * N;
    if (is_aligned)
        store_adjacent<Vector<T, N / VECTORS>, VECTORS>(out, count, first, of_warp->items, lane);
    else
        store_adjacent<T, N>(out, count, first, of_warp->items, lane);
}

// Strides over the Philox blocks of a draw; all threads of a warp iterate equally often.
#define FOR_EACH_BLOCK(count, per_block) \
    for (u64 b = blockIdx.x * (u64)blockDim.x + threadIdx.x; \
         b - threadIdx.x % WARP < ((count) + (per_block) - 1) / (per_block); b += (u64)gridDim.x * blockDim.x)

// The 53-bit integer that curand_uniform2_double composes of two words.
__device__ inline u64 wide53(u32 x, u32 y) { return (u64)x ^ ((u64)y << 21); }

__device__ inline void unit(uint4 w, float (&to)[4]) {
    const u32 words[4] = {w.x, w.y, w.z, w.w};
    #pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = mul(__uint2float_rn(words[i] >> 8), 0x1p-24f);
}
__device__ inline void unit(uint4 w, double (&to)[2]) {
    to[0] = mul(__ull2double_rn(wide53(w.x, w.y)), 0x1p-53);
    to[1] = mul(__ull2double_rn(wide53(w.z, w.w)), 0x1p-53);
}
template <int SHIFT>
__device__ inline void unit16(uint4 w, float (&to)[8]) {
    const u32 words[4] = {w.x, w.y, w.z, w.w};
    const float step = SHIFT == 5 ? 0x1p-11f : 0x1p-8f;
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
        to[2 * i] = mul(__uint2float_rn((words[i] & 0xFFFFu) >> SHIFT), step);
        to[2 * i + 1] = mul(__uint2float_rn(words[i] >> (16 + SHIFT)), step);
    }
}
__device__ inline void unit_of(uint4 w, float (&to)[4], float*) { unit(w, to); }
__device__ inline void unit_of(uint4 w, double (&to)[2], double*) { unit(w, to); }
__device__ inline void unit_of(uint4 w, float (&to)[8], fp16*) { unit16<5>(w, to); }
__device__ inline void unit_of(uint4 w, float (&to)[8], bf16*) { unit16<8>(w, to); }

template <typename T, typename S, int N>
__device__ inline void fill_uniform(
    T* out, u64 count, Counter start, S low, S span, S largest) {
    FOR_EACH_BLOCK(count, N) {
        S units[N];
        Vector<T, N> values;
        unit_of(block_of(start, b), units, (T*)0);
        #pragma unroll
        for (int i = 0; i < N; ++i) {
            const S value = add(low, mul(span, units[i]));
            round_to(value < largest ? value : largest, &values.items[i]);
        }
        store(out, count, b, values);
    }
}

// The natural logarithm of a normal positive number.
__device__ inline float natural_log(float value) {
    const int bits = __float_as_int(value), exponent = (bits - SQRT_HALF_FP32) >> 23;
    const float f = add(__int_as_float(bits - (exponent << 23)), -1.0f);
    const float e = __int2float_rn(exponent), square = mul(f, f);
    const float correction = add(mul(mul(polynomial(f, LOG_FP32), square), f), mul(e, LN2_FP32[1]));
    return add_exact_product(e, LN2_FP32[0], add(add_exact_product(-0.5f, square, correction), f));
}
__device__ inline double natural_log(double value) {
    const i64 bits = __double_as_longlong(value), exponent = (bits - SQRT_HALF_FP64) >> 52;
    const double f = add(__longlong_as_double(bits - (exponent << 52)), -1.0);
    const double e = __ll2double_rn(exponent), square = mul(f, f);
    const double ratio = __ddiv_rn(polynomial(f, LOG_P_FP64), polynomial(f, LOG_Q_FP64));
    const double correction = add(mul(mul(ratio, square), f), mul(e, LN2_FP64[1]));
    return add_exact_product(e, LN2_FP64[0], add(add_exact_product(-0.5, square, correction), f));
}

// Writes radius * sin and radius * cos of an angle after a turn by quadrants.
template <typename S, int N, int M>
__device__ inline void rotate(
    S radius, S angle, int quadrant, const S (&sine_terms)[N], const S (&cosine_terms)[M], S* to) {
    const S square = mul(angle, angle);
    const S sine = add(mul(mul(polynomial(square, sine_terms), square), angle), angle);
    const S fourth_order = mul(mul(polynomial(square, cosine_terms), square), square);
    const S cosine = add(add_exact_product((S)-0.5, square, fourth_order), (S)1);
    const S signed_radius = quadrant & 2 ? -radius : radius;
    to[0] = mul(signed_radius, quadrant & 1 ? cosine : sine);
    to[1] = mul(signed_radius, quadrant & 1 ? -sine : cosine);
}

// Two normal values from two words (Box and Muller, 1958).
__device__ inline void normal_pair(u32 x, u32 y, float* to) {
    const float fraction = add_exact_product(__uint2float_rn(x), 0x1p-32f, 0x1p-33f);
    const float radius = __fsqrt_rn(mul(-2.0f, natural_log(fraction)));
    const u32 quadrant = (y + (1u << 29)) >> 30;
    const float offset = __int2float_rn(2 * (int)(y - (quadrant << 30)) + 1);
    rotate(radius, mul(offset, RADIANS_FP32[0]), (int)quadrant, SIN_FP32, COS_FP32, to);
}
__device__ inline void normal_pair(u64 x, u64 y, double* to) {
    const double fraction = add_exact_product(__ull2double_rn(x), 0x1p-53, 0x1p-54);
    const double radius = __dsqrt_rn(mul(-2.0, natural_log(fraction)));
    const u64 quadrant = (y + (1ull << 50)) >> 51;
    const double offset = __ll2double_rn(2 * (i64)(y - (quadrant << 51)) + 1);
    rotate(radius, mul(offset, RADIANS_FP64[0]), (int)quadrant, SIN_FP64, COS_FP64, to);
}
__device__ inline void normals(uint4 w, float (&to)[4]) {
    normal_pair(w.x, w.y, to);
    normal_pair(w.z, w.w, to + 2);
}
__device__ inline void normals(uint4 w, double (&to)[2]) {
    normal_pair(wide53(w.x, w.y), wide53(w.z, w.w), to);
}

template <typename T, typename S, int N>
__device__ inline void fill_normal(
    T* out, u64 count, Counter start, S mean, S deviation) {
    FOR_EACH_BLOCK(count, N) {
        S pairs[N];
        Vector<T, N> values;
        normals(block_of(start, b), pairs);
        #pragma unroll
        for (int i = 0; i < N; ++i) round_to(add(mean, mul(deviation, pairs[i])), &values.items[i]);
        store(out, count, b, values);
    }
}

__device__ inline u32 word_of(uint4 w, int lane) {
    return lane == 0 ? w.x : lane == 1 ? w.y : lane == 2 ? w.z : w.w;
}

// Integers of [low, low + span) without bias (D. Lemire, 2019): a word whose product with the span has a low
// half below 2^32 mod span is drawn again, from the same block and lane of a later sequence.
template <typename T>
__device__ inline void fill_integers(
    T* out, u64 count, Counter start, u64 low, u64 span, u32 limit) {
    FOR_EACH_BLOCK(count, 4) {
        const uint4 block = block_of(start, b);
        Vector<T, 4> values;
        #pragma unroll
        for (int lane = 0; lane < 4; ++lane) {
            u64 product = word_of(block, lane) * span, later = start.sequence;
            while ((u32)product < limit) {
                later += 1ull << ATTEMPT_SHIFT;
                product = word_of(philox(start.position + b, later, start.seed), lane) * span;
            }
            values.items[lane] = (T)(low + (product >> 32));
        }
        store(out, count, b, values);
    }
}

__device__ inline u64 wide_word(uint4 w, int lane) {
    return lane == 0 ? (u64)w.y << 32 | w.x : (u64)w.w << 32 | w.z;
}

// Rounds of the finalizer of MurmurHash3 (A. Appleby).
__device__ inline u32 mix(u32 word) {
    word = (word ^ word >> 16) * 0x85EBCA6Bu;
    word = (word ^ word >> 13) * 0xC2B2AE35u;
    return word ^ word >> 16;
}

// A permutation of [0, size): a Feistel network permutes a domain of 2^(left_bits + right_bits) numbers, and
// is applied again while the result is not below the size. The swap of 0 and 1 makes odd permutations as
// likely as even ones.
template <typename T>
__device__ inline void fill_permutation(
    T* out, u64 count, Counter start, u64 size, int left_bits, int right_bits) {
    __shared__ u32 keys[4 * PERMUTATION_BLOCKS];
    if (threadIdx.x < PERMUTATION_BLOCKS) {
        const uint4 w = block_of(start, threadIdx.x);
        #pragma unroll
        for (int lane = 0; lane < 4; ++lane) keys[4 * threadIdx.x + lane] = word_of(w, lane);
    }
    __syncthreads();
    const u32 left_mask = (u32)((1ull << left_bits) - 1), right_mask = (u32)((1ull << right_bits) - 1);
    const u64 swap = size > 1 ? keys[ROUNDS] & 1 : 0;
    FOR_EACH_BLOCK(count, 4) {
        Vector<T, 4> values;
        for (int i = 0; i < 4; ++i) {
            u64 value = 4 * b + i;
            if (value >= size) break;
            do {
                u32 left = (u32)(value >> right_bits), right = (u32)value & right_mask;
                #pragma unroll
                for (int round = 0; round < ROUNDS; round += 2) {
                    left ^= mix(right ^ keys[round]) & left_mask;
                    right ^= mix(left ^ keys[round + 1]) & right_mask;
                }
                value = (u64)left << right_bits | right;
            } while (value >= size);
            values.items[i] = (T)(value < 2 ? value ^ swap : value);
        }
        store(out, count, b, values);
    }
}

extern "C" __global__ void cudakit_random_bits(u8* out, FILL_PARAMETERS) {
    const Counter start = START;
    FOR_EACH_BLOCK(count, 16) {
        const uint4 words = block_of(start, b);
        // A vector of bytes would be composed byte by byte.
        if ((u64)out % 16 == 0 && 16 * b + 16 <= count) {
            ((uint4*)out)[b] = words;
            continue;
        }
        Vector<u8, 16> values;
        memcpy(&values, &words, sizeof values);
        store(out, count, b, values);
    }
}

extern "C" __global__ void cudakit_random_wide_integers(
    u64* out, FILL_PARAMETERS, u64 low, u64 span, u64 limit) {
    const Counter start = START;
    FOR_EACH_BLOCK(count, 2) {
        const uint4 block = block_of(start, b);
        Vector<u64, 2> values;
        #pragma unroll
        for (int lane = 0; lane < 2; ++lane) {
            u64 word = wide_word(block, lane), later = start.sequence;
            while (span && word * span < limit) {
                later += 1ull << ATTEMPT_SHIFT;
                word = wide_word(philox(start.position + b, later, start.seed), lane);
            }
            values.items[lane] = low + (span ? __umul64hi(word, span) : word);
        }
        store(out, count, b, values);
    }
}
