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
/* Each half by itself: the bitmap may be newer than the key. */
CK_INLINE ck_entry load_shared_entry(ck_u64 at)
{
    ck_entry entry;
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(entry.key), "=l"(entry.bitmap) : "l"(at) : "memory");
    return entry;
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
/* Without what was there before, that is, without a wait. */
CK_INLINE void set_bits(ck_u64 at, ck_u32 bits)
{
    asm volatile("red.relaxed.gpu.global.or.b32 [%0], %1;" ::"l"(at), "r"(bits) : "memory");
}
CK_INLINE ck_u64 atomic_swap_free(ck_u64 at, ck_u64 value)
{
    ck_u64 old;
    asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], 0, %2;"
                 : "=l"(old) : "l"(at), "l"(value) : "memory");
    return old;
}

/* The number of the launch, or of the node in a launch of a graph: the gridId of Sanitizer_LaunchData. */
CK_INLINE ck_u32 grid(void)
{
    ck_u64 number;
    asm volatile("mov.u64 %0, %%gridid;" : "=l"(number));
    return (ck_u32)number;
}
CK_INLINE ck_u32 lane(void)
{
    ck_u32 number;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(number));
    return number;
}
/* The bit that this lane has where there is one for each of them. */
CK_INLINE ck_u32 own_bit(void)
{
    ck_u32 before;
    asm volatile("mov.u32 %0, %%lanemask_lt;" : "=r"(before));
    return before + 1;
}

/* The threads of this warp that came here together. */
CK_INLINE ck_u32 all_here(void)
{
    return __activemask();
}
CK_INLINE bool leads(ck_u32 threads)
{
    return lane() == (ck_u32)__ffs(threads) - 1;
}
/* What follows has no ".sync" on purpose. Patches are assembled without the uniform registers, and without these
 * each such instruction first gathers its threads (WARPSYNC.COLLECTIVE), which takes longer than all the rest of
 * what is done for an access. Those that are together here stay so: between them there is no branch. */

/* Those of the threads here that say the same. */
CK_INLINE ck_u32 alike(bool yes)
{
    ck_u32 some;
    asm volatile("{.reg .pred yes; setp.ne.u32 yes, %1, 0;\n"
                 "@yes activemask.b32 %0; @!yes activemask.b32 %0;}"
                 : "=r"(some) : "r"((ck_u32)yes));
    return some;
}
/* What the lane to the left says, if it is here. */
CK_INLINE ck_u32 of_left(ck_u32 value)
{
    ck_u32 left;
    asm volatile("shfl.up.b32 %0, %1, 1, 0;" : "=r"(left) : "r"(value));
    return left;
}
CK_INLINE bool has_left(ck_u32 threads, ck_u32 self)
{
    return threads & (self >> 1); /* of lane 0, nothing */
}
/* The lanes behind this one, up to the next of these heads. */
CK_INLINE ck_u32 until_next(ck_u32 heads, ck_u32 self)
{
    const ck_u32 behind = 0u - self - self;
    const ck_u32 next = heads & behind;
    return behind & ((next & -next) - 1); /* for none, all are below */
}
CK_INLINE ck_u32 bits_in(ck_u32 word)
{
    return __popc(word);
}

/* So many bits from a place on, both modulo 32. */
CK_INLINE ck_u32 mask(ck_u32 place, ck_u32 width)
{
    ck_u32 bits;
    asm("{.reg .b32 low; shf.l.wrap.b32 low, 0, 1, %2; sub.u32 low, low, 1;\n"
        "shf.l.wrap.b32 %0, 0, low, %1;}"
        : "=r"(bits) : "r"(place), "r"(width));
    return bits;
}
/* So many bits, as far as the word has them, from a place on that is modulo 32. */
CK_INLINE ck_u32 mask_within(ck_u32 place, ck_u32 width)
{
    ck_u32 bits;
    asm("{.reg .b32 low; shl.b32 low, 1, %2; sub.u32 low, low, 1; shl.b32 %0, low, %1;}"
        : "=r"(bits) : "r"(place & 31), "r"(width));
    return bits;
}

/* In two registers, as they are. */
CK_INLINE ck_u64 pair(ck_u32 low, ck_u32 high)
{
    ck_u64 both;
    asm("mov.b64 %0, {%1, %2};" : "=l"(both) : "r"(low), "r"(high));
    return both;
}

/* The same value. The compiler does not know that it is. */
CK_INLINE ck_u32 opaque(ck_u32 value)
{
    asm("" : "+r"(value));
    return value;
}

/* The same value. The assembler does not know that some thread is here, so that for it this is another one,
 * and what was computed from the old one need not be kept. */
CK_INLINE ck_u32 renewed(ck_u32 value)
{
    ck_u32 again;
    asm volatile("{.reg .pred some; .reg .b32 here;\n"
                 "activemask.b32 here; setp.ne.u32 some, here, 0; selp.b32 %0, %1, 0, some;}"
                 : "=r"(again) : "r"(value));
    return again;
}

CK_INLINE ck_u64 renewed(ck_u64 value)
{
    return pair(renewed((ck_u32)value), (ck_u32)(value >> 32));
}

/* A variable to load a field of here and now: that is in no register since it was written, and neither is where
 * the variable lies. The assembler does not know that some thread is here, so that for it the address is another
 * one each time. */
template <class type> CK_INLINE const type *anew(const type *variable)
{
    ck_u64 at;
    asm volatile("{.reg .pred some; .reg .b32 here;\n"
                 "activemask.b32 here; setp.ne.u32 some, here, 0; selp.b64 %0, %1, 0, some;}"
                 : "=l"(at) : "l"(__cvta_generic_to_local(variable)) : "memory");
    return (const type *)__cvta_local_to_generic(at);
}

#endif
