typedef COMPUTE Value;
enum { WIDTH = WIDTH_VALUE, VECTORS = VECTORS_VALUE, ROW_THREADS = ROW_THREADS_VALUE };
// Lanes of a warp that have the same row, and warps that have the same row.
enum { LANES = ROW_THREADS < 32 ? ROW_THREADS : 32, WARPS = ROW_THREADS <= 32 ? 1 : ROW_THREADS / 32 };
typedef Vector<STORAGE, WIDTH> Elements;

__device__ Value negative_infinity() { return -(Value)__int_as_float(0x7F800000); }

struct Maximum {
    static __device__ Value of(Value a, Value b) { return a > b ? a : b; }
};
struct Sum {
    static __device__ Value of(Value a, Value b) { return a + b; }
};

// Combines the values of all threads of a row; every thread returns the result.
template <class Operation> __device__ Value combine_row(Value value) {
    #pragma unroll
    for (int distance = LANES / 2; distance; distance /= 2)
        value = Operation::of(value, __shfl_xor_sync(0xFFFFFFFFu, value, distance));
    if (WARPS == 1) return value;
    __shared__ Value values[WARPS];
    if (threadIdx.x % 32 == 0) values[threadIdx.x / 32] = value;
    __syncthreads();
    value = values[threadIdx.x % WARPS];
    #pragma unroll
    for (int distance = WARPS / 2; distance; distance /= 2)
        value = Operation::of(value, __shfl_xor_sync(0xFFFFFFFFu, value, distance));
    return value;
}

// Keeps the elements of a row in registers.
__device__ void normalize_in_registers(const Elements* source, Elements* target, int vectors, int lane) {
    Value values[VECTORS ? VECTORS : 1][WIDTH];
    Value maximum = negative_infinity(), sum = 0;
    #pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const bool is_used = lane + v * ROW_THREADS < vectors;
        Elements elements;
        if (is_used) elements = source[lane + v * ROW_THREADS];
        #pragma unroll
        for (int k = 0; k < WIDTH; ++k)
            values[v][k] = is_used ? (Value)load_value(elements.elements[k]) : negative_infinity();
    }
    #pragma unroll
    for (int v = 0; v < VECTORS; ++v)
        #pragma unroll
        for (int k = 0; k < WIDTH; ++k) maximum = Maximum::of(maximum, values[v][k]);
    maximum = combine_row<Maximum>(maximum);
    #pragma unroll
    for (int v = 0; v < VECTORS; ++v)
        #pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
            values[v][k] = op::exp(values[v][k] - maximum);
            if (lane + v * ROW_THREADS < vectors) sum += values[v][k];
        }
    if (WARPS > 1) __syncthreads();  // the maxima in shared memory are still read
    const Value factor = (Value)1 / combine_row<Sum>(sum);
    #pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        if (lane + v * ROW_THREADS >= vectors) continue;
        Elements elements;
        #pragma unroll
        for (int k = 0; k < WIDTH; ++k) elements.elements[k] = stored<STORAGE>::from(values[v][k] * factor);
        if (target) target[lane + v * ROW_THREADS] = elements;
    }
}

// Reads the elements of a long row twice, and keeps a running sum relative to a running maximum.
__device__ void normalize_from_memory(const Elements* source, Elements* target, i64 vectors, int lane) {
    Value maximum = negative_infinity(), sum = 0;
    #pragma unroll 4
    for (i64 v = lane; v < vectors; v += ROW_THREADS) {
        const Elements elements = source[v];
        Value larger = maximum;
        #pragma unroll
        for (int k = 0; k < WIDTH; ++k) larger = Maximum::of(larger, load_value(elements.elements[k]));
        // Equal infinities give a factor of 1, and a finite base gives exp(-infinity) = 0, not NaN.
        const Value base = larger == negative_infinity() ? (Value)0 : larger;
        if (maximum != larger) sum *= op::exp(maximum - larger);
        maximum = larger;
        #pragma unroll
        for (int k = 0; k < WIDTH; ++k) sum += op::exp(load_value(elements.elements[k]) - base);
    }
    const Value row_maximum = combine_row<Maximum>(maximum);
    if (maximum != row_maximum) sum *= op::exp(maximum - row_maximum);
    if (WARPS > 1) __syncthreads();  // the maxima in shared memory are still read
    const Value factor = (Value)1 / combine_row<Sum>(sum);
    #pragma unroll 4
    for (i64 v = lane; v < vectors; v += ROW_THREADS) {
        const Elements elements = source[v];
        Elements result;
        #pragma unroll
        for (int k = 0; k < WIDTH; ++k)
            result.elements[k] = stored<STORAGE>::from(
                op::exp((Value)load_value(elements.elements[k]) - row_maximum) * factor);
        if (target) target[v] = result;
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK_VALUE) KERNEL_NAME(
    char* out, const char* in, i64 rows, i64 columns, i64 out_stride, i64 in_stride) {
    const i64 row = blockIdx.x * (i64)(BLOCK_VALUE / ROW_THREADS) + threadIdx.x / ROW_THREADS;
    // Threads without a row compute the last one, but do not store it: shuffles need all lanes of a warp.
    const Elements* source = (const Elements*)(in + (row < rows ? row : rows - 1) * in_stride);
    Elements* target = row < rows ? (Elements*)(out + row * out_stride) : nullptr;
    const int lane = threadIdx.x % ROW_THREADS;
    if (VECTORS) normalize_in_registers(source, target, (int)(columns / WIDTH), lane);
    else normalize_from_memory(source, target, columns / WIDTH, lane);
}
