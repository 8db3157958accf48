typedef unsigned int u32;
typedef unsigned long long u64;

__device__ u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

extern "C" __global__ void cudakit_spin_until(const volatile u32* go, volatile u32* timed_out, u64 limit_ns) {
    const u64 begin = nanoseconds();
    while (*go == 0) {
        if (nanoseconds() - begin > limit_ns) {
            *timed_out = 1;
            return;
        }
    }
}

extern "C" __global__ void cudakit_spin_for(u64 duration_ns) {
    const u64 begin = nanoseconds();
    while (nanoseconds() - begin < duration_ns) {}
}

extern "C" __global__ void cudakit_empty() {}
