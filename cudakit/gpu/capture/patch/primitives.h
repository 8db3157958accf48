/* What the patch is made of on a device: loads, atomics, and what threads of a warp say to each other. On the
 * host, the tests bring their own. */
#ifndef CK_PRIMITIVES_H
#define CK_PRIMITIVES_H

#include "arena.h"

#define CK_PATCH extern "C" __device__ __noinline__ int
#define CK_INLINE static __device__ __forceinline__
#ifdef CK_NO_CALLS /* for a patch that may call nothing */
#define CK_ASIDE CK_INLINE
#else
#define CK_ASIDE static __device__ __noinline__
#endif

/* Loads by way of the first-level cache may be stale, but only by bits that were set since: then the access
 * goes the long way. Bits are never cleared while a launch may still look at them. */
CK_INLINE ck_entry load_entry(ck_u64 at)
{
    ck_entry entry;
    asm volatile("ld.global.v2.u64 {%0, %1}, [%2];" : "=l"(entry.key), "=l"(entry.bitmap) : "l"(at));
    return entry;
}
CK_INLINE ck_u32 load(ck_u64 at)
{
    ck_u32 value;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(value) : "l"(at));
    return value;
}
CK_INLINE ck_u64 load64(ck_u64 at)
{
    ck_u64 value;
    asm volatile("ld.global.u64 %0, [%1];" : "=l"(value) : "l"(at));
    return value;
}
/* What all threads of the device agree on. */
CK_INLINE ck_u32 load_shared_truth(ck_u64 at)
{
    ck_u32 value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}
CK_INLINE ck_u64 load_shared_truth64(ck_u64 at)
{
    ck_u64 value;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}
CK_INLINE void store64(ck_u64 at, ck_u64 value)
{
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
CK_INLINE void store(ck_u64 at, ck_u32 value)
{
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
CK_INLINE ck_u32 atomic_or(ck_u64 at, ck_u32 bits)
{
    ck_u32 old;
    asm volatile("atom.relaxed.gpu.global.or.b32 %0, [%1], %2;"
                 : "=r"(old) : "l"(at), "r"(bits) : "memory");
    return old;
}
CK_INLINE ck_u32 atomic_add(ck_u64 at, ck_u32 value)
{
    ck_u32 old;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(old) : "l"(at), "r"(value) : "memory");
    return old;
}
CK_INLINE ck_u64 atomic_swap_free(ck_u64 at, ck_u64 value)
{
    ck_u64 old;
    asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], 0, %2;"
                 : "=l"(old) : "l"(at), "l"(value) : "memory");
    return old;
}

CK_INLINE ck_u32 lane(void)
{
    ck_u32 number;
    asm("mov.u32 %0, %%laneid;" : "=r"(number));
    return number;
}

/* The threads of this warp that came here together and say the same value. */
CK_INLINE ck_u32 companions(ck_u64 value)
{
    return __match_any_sync(__activemask(), value);
}
CK_INLINE ck_u32 all_here(void)
{
    return __activemask();
}
CK_INLINE bool leads(ck_u32 threads)
{
    return lane() == (ck_u32)__ffs(threads) - 1;
}
CK_INLINE ck_u64 of_leader(ck_u32 threads, ck_u64 value)
{
    return __shfl_sync(threads, value, __ffs(threads) - 1);
}
/* The reduction of a warp, redux.sync, is not allowed in a patch. */
CK_INLINE ck_u32 joined(ck_u32 threads, ck_u32 bits)
{
    ck_u32 all = 0;
    for (ck_u32 rest = threads; rest; rest &= rest - 1)
        all |= __shfl_sync(threads, bits, __ffs(rest) - 1);
    return all;
}

#endif
