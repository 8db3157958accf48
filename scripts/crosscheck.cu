// Independent measurements to validate `cudakit bench`: CUDA C++ and runtime events, no shared code.
// scripts/crosscheck_bench.py compiles this file (nvcc -O3 -arch=native crosscheck.cu) and runs it.
// Prints one line per measurement: its name, a tab, the median in seconds.

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

__global__ void empty()
{
}

// The graph node of `cudakit bench graph`: writes 16 bytes, so that its execution can be verified.
__global__ void mark(uint4 *to, unsigned word, unsigned long long count)
{
    const unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (i < count)
        __stcs(to + i, make_uint4(word, word, word, word));
}

__global__ void spin(long long cycles)
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
            // Floats in [1, 2): random mantissa bits.
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

void print_result(const char *name, double seconds)
{
    printf("%s\t%.9g\n", name, seconds);
}

// Returns the median device time of one execution. A spinning kernel hides the launch latency.
double device_time(cudaStream_t stream, const Work &work, int samples, int each = 1)
{
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    std::vector<double> times;
    for (int sample = -10; sample < samples; ++sample) {
        spin<<<1, 1, 0, stream>>>(400000 + 10000LL * each);
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

// Returns the median host time of a call; with `waits`, including the wait for the device.
double host_time(const std::function<void()> &call, int samples, bool waits = false)
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
    print_result(
        "memory copy 1GiB",
        device_time(stream, [&](cudaStream_t s) { copy<<<blocks, threads, 0, s>>>(at[0], at[1], count); }, 200));
    print_result("memory triad 1GiB",
                 device_time(
                     stream,
                     [&](cudaStream_t s) { triad<<<blocks, threads, 0, s>>>(at[0], at[1], at[2], 1.7f, count); },
                     200));
    print_result("copy d2d 1GiB", device_time(
                                      stream,
                                      [&](cudaStream_t s) {
                                          CHECK(cudaMemcpyAsync(at[0], at[1], bytes, cudaMemcpyDeviceToDevice, s));
                                      },
                                      200));
    void *host;
    CHECK(cudaMallocHost(&host, bytes));
    print_result(
        "copy h2d 1GiB",
        device_time(
            stream, [&](cudaStream_t s) { CHECK(cudaMemcpyAsync(at[0], host, bytes, cudaMemcpyHostToDevice, s)); },
            20));
    print_result(
        "copy d2h 1GiB",
        device_time(
            stream, [&](cudaStream_t s) { CHECK(cudaMemcpyAsync(host, at[0], bytes, cudaMemcpyDeviceToHost, s)); },
            20));
    CHECK(cudaFreeHost(host));
    void *pages = malloc(size_t(256) << 20);
    std::fill_n((char *)pages, size_t(256) << 20, 1);
    print_result(
        "copy pageable-h2d 256MiB",
        host_time([&] { CHECK(cudaMemcpy(at[0], pages, size_t(256) << 20, cudaMemcpyHostToDevice)); }, 20, true));
    print_result(
        "copy pageable-d2h 256MiB",
        host_time([&] { CHECK(cudaMemcpy(pages, at[0], size_t(256) << 20, cudaMemcpyDeviceToHost)); }, 20, true));
    free(pages);
    for (auto ptr : at)
        CHECK(cudaFree(ptr));
}

void latencies(cudaStream_t stream)
{
    cudaEvent_t event;
    CHECK(cudaEventCreate(&event));
    print_result("launch", host_time([&] { empty<<<1, 1, 0, stream>>>(); }, 2000));
    print_result("launch-to-finish", host_time([&] { empty<<<1, 1, 0, stream>>>(); }, 2000, true));
    print_result("launch-back-to-back",
                 device_time(stream, [](cudaStream_t s) { empty<<<1, 1, 0, s>>>(); }, 50, 500));
    print_result("event-record", host_time([&] { CHECK(cudaEventRecord(event, stream)); }, 2000));
    CHECK(cudaEventDestroy(event));
    void *ptr;
    print_result("alloc stream-ordered 1MiB", host_time(
                                                  [&] {
                                                      CHECK(cudaMallocAsync(&ptr, 1 << 20, stream));
                                                      CHECK(cudaFreeAsync(ptr, stream));
                                                  },
                                                  2000));
    print_result("alloc driver 1MiB", host_time(
                                          [&] {
                                              CHECK(cudaMalloc(&ptr, 1 << 20));
                                              CHECK(cudaFree(ptr));
                                          },
                                          500));
}

// Graph nodes take longer once a process has run graphs in two streams (0.89 instead of 0.71 us on an H200), so
// both cases are measured. cudakit uses a second stream as well, for verification.
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
        print_result(name, host_time([&] { CHECK(cudaGraphLaunch(executable, stream)); }, 500));
        snprintf(name, sizeof name, "graph run %d%s", nodes, streams);
        print_result(name,
                     device_time(stream, [&](cudaStream_t s) { CHECK(cudaGraphLaunch(executable, s)); }, 200));
        snprintf(name, sizeof name, "graph replay %d%s", nodes, streams);
        print_result(name, host_time([&] { CHECK(cudaGraphLaunch(executable, stream)); }, 500, true));
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
