/* Device primitives of the patch: loads, atomics, and communication within a warp. The tests, which compile the patch
 * for the host, replace this file. */
#ifndef CK_PRIMITIVES_H
#define CK_PRIMITIVES_H

#include "arena.h"

#define CK_PATCH extern "C" __device__ __noinline__ int
#define CK_INLINE static __device__ __forceinline__
#ifdef CK_NO_CALLS /* builds a patch without function calls */
#define CK_NOINLINE CK_INLINE
#else
#define CK_NOINLINE static __device__ __noinline__
#endif

/* Loads through the L1 cache may be stale. A stale value can only lack bits that were set meanwhile; the access then
 * takes the slow path. Bits are never cleared while a launch may still read them. */
CK_INLINE ck_entry load_entry(ck_u64 address)
{
    ck_entry entry;
    asm volatile("ld.global.v2.u64 {%0, %1}, [%2];" : "=l"(entry.key), "=l"(entry.bitmap) : "l"(address));
    return entry;
}
CK_INLINE ck_u32 load(ck_u64 address)
{
    ck_u32 value;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(value) : "l"(address));
    return value;
}
CK_INLINE ck_u64 load64(ck_u64 address)
{
    ck_u64 value;
    asm volatile("ld.global.u64 %0, [%1];" : "=l"(value) : "l"(address));
    return value;
}
/* Loads that are coherent across the device. */
CK_INLINE ck_u32 load_coherent(ck_u64 address)
{
    ck_u32 value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}
CK_INLINE ck_u64 load_coherent64(ck_u64 address)
{
    ck_u64 value;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}
/* Load an entry coherently. Each half is loaded atomically, but the bitmap may be newer than the key. */
CK_INLINE ck_entry load_entry_coherent(ck_u64 address)
{
    ck_entry entry;
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(entry.key), "=l"(entry.bitmap)
                 : "l"(address)
                 : "memory");
    return entry;
}
CK_INLINE void store64(ck_u64 address, ck_u64 value)
{
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}
CK_INLINE void store(ck_u64 address, ck_u32 value)
{
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
CK_INLINE ck_u32 atomic_or(ck_u64 address, ck_u32 bits)
{
    ck_u32 old_value;
    asm volatile("atom.relaxed.gpu.global.or.b32 %0, [%1], %2;"
                 : "=r"(old_value)
                 : "l"(address), "r"(bits)
                 : "memory");
    return old_value;
}
CK_INLINE ck_u32 atomic_add(ck_u64 address, ck_u32 value)
{
    ck_u32 old_value;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(old_value)
                 : "l"(address), "r"(value)
                 : "memory");
    return old_value;
}
/* Set bits by a reduction, which returns no value, so that the thread does not wait for memory. */
CK_INLINE void set_bits(ck_u64 address, ck_u32 bits)
{
    asm volatile("red.relaxed.gpu.global.or.b32 [%0], %1;" ::"l"(address), "r"(bits) : "memory");
}
/* Store a value if the word is 0, and return the old value. */
CK_INLINE ck_u64 atomic_claim(ck_u64 address, ck_u64 value)
{
    ck_u64 old_value;
    asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], 0, %2;"
                 : "=l"(old_value)
                 : "l"(address), "l"(value)
                 : "memory");
    return old_value;
}

/* Return the grid id of the launch or graph node, which the host gets as gridId of Sanitizer_LaunchData. */
CK_INLINE ck_u32 grid_id(void)
{
    ck_u64 id;
    asm volatile("mov.u64 %0, %%gridid;" : "=l"(id));
    return (ck_u32)id;
}
CK_INLINE ck_u32 lane_id(void)
{
    ck_u32 id;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(id));
    return id;
}
/* Return the bit of this lane in a lane mask. */
CK_INLINE ck_u32 lane_bit(void)
{
    ck_u32 lower_lanes;
    asm volatile("mov.u32 %0, %%lanemask_lt;" : "=r"(lower_lanes));
    return lower_lanes + 1;
}

/* Return the lanes of this warp that are executing together. */
CK_INLINE ck_u32 active_lanes(void)
{
    return __activemask();
}
CK_INLINE bool is_leader(ck_u32 lanes)
{
    return lane_id() == (ck_u32)__ffs(lanes) - 1;
}
/* The functions below omit ".sync" on purpose. Patches are assembled without uniform registers; an instruction with
 * ".sync" would then first gather its threads (WARPSYNC.COLLECTIVE), which takes longer than all other work for an
 * access. Lanes that execute together stay together, because there is no branch between these instructions. */

/* Return the active lanes whose condition has the same value as the condition of this lane. */
CK_INLINE ck_u32 active_lanes_with_same(bool condition)
{
    ck_u32 matching_lanes;
    asm volatile("{.reg .pred yes; setp.ne.u32 yes, %1, 0;\n"
                 "@yes activemask.b32 %0; @!yes activemask.b32 %0;}"
                 : "=r"(matching_lanes)
                 : "r"((ck_u32)condition));
    return matching_lanes;
}
/* Return the value of the lane to the left; meaningful only if that lane is active. */
CK_INLINE ck_u32 from_left_lane(ck_u32 value)
{
    ck_u32 left_value;
    asm volatile("shfl.up.b32 %0, %1, 1, 0;" : "=r"(left_value) : "r"(value));
    return left_value;
}
CK_INLINE bool has_left_lane(ck_u32 lanes, ck_u32 this_lane_bit)
{
    return lanes & (this_lane_bit >> 1); /* 0 for lane 0 */
}
/* Return the lanes after this lane and before the next lane of ``run_starts``. */
CK_INLINE ck_u32 lanes_until_next(ck_u32 run_starts, ck_u32 this_lane_bit)
{
    const ck_u32 later_lanes = 0u - this_lane_bit - this_lane_bit;
    const ck_u32 next_start = run_starts & later_lanes;
    return later_lanes & ((next_start & -next_start) - 1); /* if no run starts later: all later lanes */
}
CK_INLINE ck_u32 popcount(ck_u32 word)
{
    return __popc(word);
}

/* Return a mask of ``width`` bits, rotated left by ``position``; both are modulo 32. */
CK_INLINE ck_u32 wrapping_mask(ck_u32 position, ck_u32 width)
{
    ck_u32 bits;
    asm("{.reg .b32 low; shf.l.wrap.b32 low, 0, 1, %2; sub.u32 low, low, 1;\n"
        "shf.l.wrap.b32 %0, 0, low, %1;}"
        : "=r"(bits)
        : "r"(position), "r"(width));
    return bits;
}
/* Return a mask of ``width`` bits, shifted left by ``position`` modulo 32. Bits beyond the word are dropped. */
CK_INLINE ck_u32 clipped_mask(ck_u32 position, ck_u32 width)
{
    ck_u32 bits;
    asm("{.reg .b32 low; shl.b32 low, 1, %2; sub.u32 low, low, 1; shl.b32 %0, low, %1;}"
        : "=r"(bits)
        : "r"(position & 31), "r"(width));
    return bits;
}

/* Combine two registers, which costs no instruction. */
CK_INLINE ck_u64 make_u64(ck_u32 low, ck_u32 high)
{
    ck_u64 combined;
    asm("mov.b64 %0, {%1, %2};" : "=l"(combined) : "r"(low), "r"(high));
    return combined;
}

/* Return the value unchanged, but unknown to the compiler. */
CK_INLINE ck_u32 make_opaque(ck_u32 value)
{
    asm("" : "+r"(value));
    return value;
}

/* Return the value unchanged, but as a new value for the assembler: it is selected by the condition "some lane is
 * active", which always holds, but the assembler does not know that. Results derived from the old value are then
 * computed again instead of being kept in registers. */
CK_INLINE ck_u32 rematerialized(ck_u32 value)
{
    ck_u32 copy;
    asm volatile("{.reg .pred some; .reg .b32 here;\n"
                 "activemask.b32 here; setp.ne.u32 some, here, 0; selp.b32 %0, %1, 0, some;}"
                 : "=r"(copy)
                 : "r"(value));
    return copy;
}

CK_INLINE ck_u64 rematerialized(ck_u64 value)
{
    return make_u64(rematerialized((ck_u32)value), (ck_u32)(value >> 32));
}

/* Return the address of a local variable as a new value for the assembler, as in rematerialized(). The variable is
 * then reloaded from local memory, and occupies no register before that. */
template <class type> CK_INLINE const type *reload(const type *variable)
{
    ck_u64 address;
    asm volatile("{.reg .pred some; .reg .b32 here;\n"
                 "activemask.b32 here; setp.ne.u32 some, here, 0; selp.b64 %0, %1, 0, some;}"
                 : "=l"(address)
                 : "l"(__cvta_generic_to_local(variable))
                 : "memory");
    return (const type *)__cvta_local_to_generic(address);
}

#endif
