// Exchanges values of any size between the lanes of a warp.
template <class T> __device__ T shuffle(T value, int lane_distance) {
    union { T value; u32 words[(sizeof(T) + 3) / 4]; } bits;
    bits.words[0] = 0;
    bits.value = value;
    for (int k = 0; k < (sizeof(T) + 3) / 4; ++k)
        bits.words[k] = __shfl_down_sync(0xFFFFFFFFu, bits.words[k], lane_distance);
    return bits.value;
}

typedef ACCUMULATOR Accumulator;
enum { COLUMNS = COLUMN_COUNT, ROWS = THREAD_COUNT / COLUMNS, WARPS = THREAD_COUNT / 32 };
// Whether adjacent threads have adjacent outputs, not adjacent elements of one output.
enum { IS_ADJACENT = ARE_OUTPUTS_ADJACENT };
enum { VECTOR = VECTOR_WIDTH, UNROLLED = 4 };

struct Layout {
    i64 outputs, count, chunk, splits;
    i64 output_sizes[OUTPUT_DIMENSIONS], reduced_sizes[REDUCED_DIMENSIONS];
    i64 strides[OPERAND_COUNT][DIMENSIONS];
};

// Combines the values of a block's threads for each output. The thread in row 0 returns the total.
__device__ Accumulator combine_rows(Accumulator total, int row, int column) {
    if (ROWS == 1) return total;
    if (!IS_ADJACENT) {
        for (int distance = 16; distance; distance /= 2)
            total = COMBINE(total, shuffle(total, distance));
        if (ROWS == 32) return total;
    }
    // One value of each output and warp remains; the warps exchange them in shared memory.
    __shared__ Accumulator values[WARPS][IS_ADJACENT ? COLUMNS : 1];
    __syncthreads();  // an earlier call may still read the values
    if (IS_ADJACENT || threadIdx.x % 32 == 0) values[threadIdx.x / 32][column] = total;
    __syncthreads();
    if (row == 0)
        for (int warp = 1; warp < WARPS; ++warp) total = COMBINE(total, values[warp][column]);
    return total;
}

__device__ void store(const Layout& layout, char* out, i64 output, Accumulator total) {
    DIVIDE_TOTAL
    STORE_OFFSET
    STORE_TOTAL
}

extern "C" __global__ void __launch_bounds__(THREAD_COUNT) KERNEL_NAME(
    const Layout layout, PARAMETERS) {
    const i64 tile = blockIdx.x / layout.splits, split = blockIdx.x % layout.splits;
    const int column = IS_ADJACENT ? threadIdx.x % COLUMNS : threadIdx.x / ROWS;
    const int row = IS_ADJACENT ? threadIdx.x / COLUMNS : threadIdx.x % ROWS;
    const i64 output = tile * COLUMNS + column;
    const bool is_used = output < layout.outputs;
    const i64 next = (split + 1) * layout.chunk, end = next < layout.count ? next : layout.count;
    Accumulator total = IDENTITY;
    if (is_used) {
        LOAD_OFFSETS
        auto load_vector = [&](i64 at, Accumulator* elements) {
            enum { WIDTH = VECTOR };
            LOAD_ELEMENT
        };
        auto load_element = [&](i64 at) {
            enum { WIDTH = 1 };
            Accumulator elements[1];
            LOAD_ELEMENT
            return elements[0];
        };
        const i64 step = ROWS * VECTOR;
        i64 at = split * layout.chunk + row * VECTOR;
        for (; at + (UNROLLED - 1) * step + VECTOR <= end; at += UNROLLED * step) {
            Accumulator elements[UNROLLED][VECTOR];
            #pragma unroll
            for (int u = 0; u < UNROLLED; ++u) load_vector(at + u * step, elements[u]);
            #pragma unroll
            for (int u = 0; u < UNROLLED; ++u)
                #pragma unroll
                for (int k = 0; k < VECTOR; ++k) total = COMBINE(total, elements[u][k]);
        }
        for (; at + VECTOR <= end; at += step) {
            Accumulator elements[VECTOR];
            load_vector(at, elements);
            #pragma unroll
            for (int k = 0; k < VECTOR; ++k) total = COMBINE(total, elements[k]);
        }
        // One thread has the elements after the last whole vector.
        for (; at < end && VECTOR > 1; ++at) total = COMBINE(total, load_element(at));
    }
    total = combine_rows(total, row, column);
    if (layout.splits == 1) {
        if (row == 0 && is_used) store(layout, out, output, total);
        return;
    }

    const i64 tiles = (layout.outputs + COLUMNS - 1) / COLUMNS;
    u32* counters = (u32*)scratch;
    Accumulator* partials = (Accumulator*)(scratch + (tiles * 4 + 15) / 16 * 16);
    if (row == 0 && is_used) {
        partials[output * layout.splits + split] = total;
        __threadfence();
    }
    __shared__ bool is_last;
    __syncthreads();
    // The counter wraps to 0 at the last block, ready for the next launch.
    if (threadIdx.x == 0) is_last = atomicInc(&counters[tile], (u32)layout.splits - 1) == layout.splits - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    total = IDENTITY;
    if (is_used)
        for (i64 k = row; k < layout.splits; k += ROWS)
            total = COMBINE(total, partials[output * layout.splits + k]);
    total = combine_rows(total, row, column);
    if (row == 0 && is_used) store(layout, out, output, total);
}
