// An instrument of its own, to check the figures of `cudakit bench` with: CUDA C++, events of the runtime,
// no code in common. scripts/crosscheck_bench.py compiles it (nvcc -O3 -arch=native crosscheck.cu) and runs it.
// Prints a line for each figure: its name, a tab, the median in seconds.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include <cuda_runtime.h>

#define CHECK(call) \
    do { \
        cudaError_t status = (call); \
        if (status != cudaSuccess) { \
            fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(status)); \
            exit(1); \
        } \
    } while (0)

using Work = std::function<void(cudaStream_t)>;

__global__ void nothing()
{
}

// What a node of a graph is in `cudakit bench graph`: it writes 16 bytes, so that one can see that it ran.
__global__ void mark(uint4 *to, unsigned word, unsigned long long count)
{
    const unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (i < count)
        __stcs(to + i, make_uint4(word, word, word, word));
}

__global__ void wait(long long cycles)
{
    const long long begin = clock64();
    while (clock64() - begin < cycles) {
    }
}

__global__ void scatter_bits(uint4 *out, size_t count)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count;
         i += (size_t)gridDim.x * blockDim.x) {
        unsigned state = (unsigned)i * 747796405u + 2891336453u;
        auto next = [&] {
            state = state * 747796405u + 2891336453u;
            // Floats in [1, 2): any bits as a mantissa.
            return 0x3F800000u | (((state >> ((state >> 28) + 4)) ^ state) * 277803737u) >> 9;
        };
        out[i] = make_uint4(next(), next(), next(), next());
    }
}

__global__ void copy(float4 *to, const float4 *from, size_t count)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count; i += (size_t)gridDim.x * blockDim.x)
        to[i] = from[i];
}

__global__ void triad(float4 *to, const float4 *x, const float4 *y, float factor, size_t count)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count;
         i += (size_t)gridDim.x * blockDim.x) {
        const float4 a = x[i], b = y[i];
        to[i] = make_float4(a.x + factor * b.x, a.y + factor * b.y, a.z + factor * b.z, a.w + factor * b.w);
    }
}

double median(std::vector<double> times)
{
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

void tell(const char *name, double seconds)
{
    printf("%s\t%.9g\n", name, seconds);
}

// What the device takes for one execution, the launches hidden behind a kernel that waits.
double on_device(cudaStream_t stream, const Work &work, int samples, int each = 1)
{
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    std::vector<double> times;
    for (int sample = -10; sample < samples; ++sample) {
        wait<<<1, 1, 0, stream>>>(400000 + 10000LL * each);
        CHECK(cudaEventRecord(begin, stream));
        for (int i = 0; i < each; ++i)
            work(stream);
        CHECK(cudaEventRecord(end, stream));
        CHECK(cudaStreamSynchronize(stream));
        float milliseconds;
        CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
        if (sample >= 0)
            times.push_back(milliseconds * 1e-3 / each);
    }
    CHECK(cudaEventDestroy(begin));
    CHECK(cudaEventDestroy(end));
    return median(times);
}

// What the host takes for a call, by its own clock; the device is waited for outside of the time.
double at_host(const std::function<void()> &call, int samples, bool waits = false)
{
    std::vector<double> times;
    for (int sample = -10; sample < samples; ++sample) {
        CHECK(cudaDeviceSynchronize());
        const auto begin = std::chrono::steady_clock::now();
        call();
        if (waits)
            CHECK(cudaDeviceSynchronize());
        const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
        if (sample >= 0)
            times.push_back(elapsed.count());
    }
    return median(times);
}

void bandwidth(cudaStream_t stream)
{
    const size_t bytes = size_t(1) << 30, count = bytes / sizeof(float4);
    float4 *at[3];
    for (auto &ptr : at) {
        CHECK(cudaMalloc(&ptr, bytes));
        scatter_bits<<<4096, 256, 0, stream>>>((uint4 *)ptr, count);
    }
    const int blocks = 65536, threads = 256;
    tell("memory copy 1GiB",
         on_device(stream, [&](cudaStream_t s) { copy<<<blocks, threads, 0, s>>>(at[0], at[1], count); }, 200));
    tell("memory triad 1GiB",
         on_device(
             stream, [&](cudaStream_t s) { triad<<<blocks, threads, 0, s>>>(at[0], at[1], at[2], 1.7f, count); },
             200));
    tell("copy d2d 1GiB",
         on_device(
             stream,
             [&](cudaStream_t s) { CHECK(cudaMemcpyAsync(at[0], at[1], bytes, cudaMemcpyDeviceToDevice, s)); },
             200));
    void *host;
    CHECK(cudaMallocHost(&host, bytes));
    tell("copy h2d 1GiB",
         on_device(
             stream,
             [&](cudaStream_t s) { CHECK(cudaMemcpyAsync(at[0], host, bytes, cudaMemcpyHostToDevice, s)); }, 20));
    tell("copy d2h 1GiB",
         on_device(
             stream,
             [&](cudaStream_t s) { CHECK(cudaMemcpyAsync(host, at[0], bytes, cudaMemcpyDeviceToHost, s)); }, 20));
    CHECK(cudaFreeHost(host));
    void *pages = malloc(size_t(256) << 20);
    std::fill_n((char *)pages, size_t(256) << 20, 1);
    tell("copy pageable-h2d 256MiB",
         at_host([&] { CHECK(cudaMemcpy(at[0], pages, size_t(256) << 20, cudaMemcpyHostToDevice)); }, 20, true));
    tell("copy pageable-d2h 256MiB",
         at_host([&] { CHECK(cudaMemcpy(pages, at[0], size_t(256) << 20, cudaMemcpyDeviceToHost)); }, 20, true));
    free(pages);
    for (auto ptr : at)
        CHECK(cudaFree(ptr));
}

void latencies(cudaStream_t stream)
{
    cudaEvent_t event;
    CHECK(cudaEventCreate(&event));
    tell("launch", at_host([&] { nothing<<<1, 1, 0, stream>>>(); }, 2000));
    tell("launch-to-finish", at_host([&] { nothing<<<1, 1, 0, stream>>>(); }, 2000, true));
    tell("launch-back-to-back", on_device(stream, [](cudaStream_t s) { nothing<<<1, 1, 0, s>>>(); }, 50, 500));
    tell("event-record", at_host([&] { CHECK(cudaEventRecord(event, stream)); }, 2000));
    CHECK(cudaEventDestroy(event));
    void *ptr;
    tell("alloc stream-ordered 1MiB", at_host(
                                          [&] {
                                              CHECK(cudaMallocAsync(&ptr, 1 << 20, stream));
                                              CHECK(cudaFreeAsync(ptr, stream));
                                          },
                                          2000));
    tell("alloc driver 1MiB", at_host(
                                  [&] {
                                      CHECK(cudaMalloc(&ptr, 1 << 20));
                                      CHECK(cudaFree(ptr));
                                  },
                                  500));
}

// A node takes longer in a process that has run graphs in two streams than in one that has not, on an H200 0.89
// against 0.71 us: both are told. cudakit has a second stream, too: the one in which it verifies.
void graphs(cudaStream_t stream, const char *streams)
{
    uint4 *marks;
    CHECK(cudaMalloc(&marks, 1000 * sizeof(uint4)));
    for (int nodes : {1, 100, 1000}) {
        cudaGraph_t graph;
        cudaGraphExec_t executable;
        CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        for (int i = 0; i < nodes; ++i)
            mark<<<1, 256, 0, stream>>>(marks + i, i, 1);
        CHECK(cudaStreamEndCapture(stream, &graph));
        CHECK(cudaGraphInstantiate(&executable, graph, 0));
        char name[64];
        snprintf(name, sizeof name, "graph launch %d%s", nodes, streams);
        tell(name, at_host([&] { CHECK(cudaGraphLaunch(executable, stream)); }, 500));
        snprintf(name, sizeof name, "graph run %d%s", nodes, streams);
        tell(name, on_device(stream, [&](cudaStream_t s) { CHECK(cudaGraphLaunch(executable, s)); }, 200));
        snprintf(name, sizeof name, "graph replay %d%s", nodes, streams);
        tell(name, at_host([&] { CHECK(cudaGraphLaunch(executable, stream)); }, 500, true));
        CHECK(cudaGraphExecDestroy(executable));
        CHECK(cudaGraphDestroy(graph));
    }
    CHECK(cudaFree(marks));
}

int main()
{
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    bandwidth(stream);
    latencies(stream);
    graphs(stream, ", one stream");
    cudaStream_t second;
    CHECK(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
    graphs(second, "");
    CHECK(cudaStreamDestroy(second));
    CHECK(cudaStreamDestroy(stream));
}
