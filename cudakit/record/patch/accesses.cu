/* The device patch: the callbacks that an instrumented kernel calls before each access to global memory.
 *
 * Every thread of every kernel executes this code, so the rule is: test before set. An access whose bits are
 * already set costs two loads: the entry of its page, and a word of the page's bitmap. Bits are set only if they are
 * not set already: lanes of a warp that access consecutive memory send one word of bits, and no lane waits for the
 * result. The fast path is one function that calls no other function and uses only the 14 registers that it need not
 * save (see "rematerialized" in primitives.h). A call, or one more register, would slow down every access. The patch
 * never waits for a thread that may not be running, and uses no shared memory, so the kernels behave as before.
 *
 * The signatures are those of sanitizer_patching.h of the Sanitizer API, 13.5, section "Sanitizer Patching API";
 * each function below names its callback type. A patch returns SANITIZER_PATCH_SUCCESS, 0.
 */
#include "arena.h"

#ifdef __CUDACC__
#include "primitives.h"
#endif /* otherwise the including file defines the primitives */

#include "page_table.h"
#include "tensor_boxes.h"

/* --- bits ------------------------------------------------------------------------------------------ */

#define ALL_BITS (~0u)

/* Return whether all these bits of a word are already set. */
CK_INLINE bool bits_are_set(ck_u64 userdata, ck_u64 key, ck_u32 word, ck_u32 bits)
{
    const ck_u64 bitmap = find_bitmap(userdata, key);
    return bitmap > CK_NO_PAGE && (load(bitmap + word * 4) & bits) == bits;
}

/* Set the summary bits of ``words`` bitmap words, from the one at address ``word`` on. */
CK_INLINE void set_summary_bits(ck_u64 word, ck_u32 words)
{
    const ck_u32 low_address = (ck_u32)word;
    set_bits(make_u64(CK_SUMMARY_OF(low_address), (ck_u32)(word >> 32)),
             clipped_mask(CK_SUMMARY_BIT(low_address), words));
}

/* Return the page level of an access: 0 if it covers whole granules of 4 bytes, otherwise 1. */
CK_INLINE ck_u32 level_of(ck_u64 address, ck_u32 bytes)
{
    return (((ck_u32)address | bytes) & 3) != 0;
}

CK_INLINE ck_u64 key_of(ck_u64 userdata, ck_u32 mode, ck_u32 level, ck_u64 granule)
{
    return CK_KEY(CK_LAUNCH_OF(userdata), mode, level, granule >> CK_BITMAP_LOG2);
}

CK_INLINE ck_u32 word_index(ck_u64 granule)
{
    return (ck_u32)(granule >> 5) & (CK_BITMAP_WORDS - 1);
}

/* Record an access to the bytes that ``pattern`` selects. The pattern has one bit per byte, and repeats every 32
 * bytes, from addresses that are multiples of 32. */
CK_NOINLINE void record_bytes(ck_u64 userdata, ck_u32 mode, ck_u32 pattern, ck_u64 address, ck_u32 bytes)
{
    if (!has_arena(userdata) || !bytes)
        return;
    userdata = launch_user_data(userdata);
    if ((address + bytes - 1) >> CK_ADDRESS_BITS) {
        mark_launch_lost(userdata);
        return;
    }
    const ck_u32 level = level_of(address, bytes) || pattern != ALL_BITS;
    const ck_u64 end = (address + bytes) >> CK_GRANULE_SHIFT(level);
    /* Each iteration sets bits of one word of the bitmap, which covers 32 granules. */
#pragma unroll 1
    for (ck_u64 granule = address >> CK_GRANULE_SHIFT(level); granule < end; granule = (granule | 31) + 1) {
        const ck_u64 remaining_granules = end - (granule & ~31ull);
        const ck_u32 mask_before_end = remaining_granules < 32 ? (1u << remaining_granules) - 1 : ~0u;
        const ck_u32 bits = mask_before_end & ~0u << (granule & 31) & pattern;
        const ck_u64 key = key_of(userdata, mode, level, granule);
        if (bits_are_set(userdata, key, word_index(granule), bits))
            continue;
        page_search search = {userdata, key, 0, 0, RETRY_BUDGET};
        const ck_u64 bitmap = find_or_claim_page(&search);
        if (bitmap == CK_NO_PAGE)
            mark_launch_lost(userdata);
        else
            set_bits(bitmap + word_index(granule) * 4, bits);
    }
}

/* --- accesses of threads ---------------------------------------------------------------------------- */

/* Sanitizer_DeviceMemoryFlags */
enum {
    FLAG_READ = 1 << 0,
    FLAG_WRITE = 1 << 1,
    FLAG_ATOMIC_SYSTEM = 1 << 2,
    FLAG_PREFETCH = 1 << 3,
    FLAG_SCOPE_SYSTEM = 1 << 7,
    FLAG_ATOMIC_WRITE_ONLY = 1 << 8,
};

/* Flags of accesses whose mode is not simply read, write or atomic. */
#define UNCOMMON_FLAGS (FLAG_PREFETCH | FLAG_ATOMIC_SYSTEM | FLAG_SCOPE_SYSTEM | FLAG_ATOMIC_WRITE_ONLY)

CK_INLINE ck_u32 mode_of(ck_u32 flags)
{
    ck_u32 mode = flags & (FLAG_READ | FLAG_WRITE);
    if (flags & FLAG_ATOMIC_WRITE_ONLY)
        mode = CK_ATOMIC;
    if (flags & (FLAG_ATOMIC_SYSTEM | FLAG_SCOPE_SYSTEM)) /* volatile accesses have system scope as well */
        mode = CK_SYNC;
    return mode;
}

CK_INLINE ck_u64 word_address(ck_u64 bitmap, ck_u32 level, ck_u32 address)
{
    return bitmap | word_index(address >> CK_GRANULE_SHIFT(level)) * 4;
}

/* Set the bits of an access. Consecutive lanes of a warp mostly access consecutive memory; such lanes form a run. The
 * first lane of a run sets the bits of all its lanes. If a run extends over several words of the bitmap, the first
 * lane in each word sets the bits of that word. Lanes exchange their positions while their words are being loaded. */
CK_INLINE void set_runs(ck_u64 word, ck_u32 level, ck_u32 address, ck_u32 bytes)
{
    const ck_u32 current_bits = load(word);
    const ck_u32 shift = CK_GRANULE_SHIFT(level), granules = bytes >> shift;
    /* The position of the first bit, counted across words. The size is added to the upper bits: a lane that accesses
     * fewer bytes then has a distant position and does not join the run. */
    const ck_u32 first_bit = ((ck_u32)word << 3 | (address >> shift & 31)) + (granules << 28);
    const ck_u32 distance = first_bit - from_left_lane(first_bit);
    const ck_u32 active_lane_mask = active_lanes(), this_lane_bit = lane_bit();
    const bool continues_run = has_left_lane(active_lane_mask, this_lane_bit) & (distance == granules);
    const ck_u32 agreeing_lanes = active_lanes_with_same(continues_run),
                 run_starts = continues_run ? active_lane_mask & ~agreeing_lanes : agreeing_lanes;
    if (continues_run & ((first_bit & 31) >= granules))
        return; /* an earlier lane of the run sets these bits */
    const ck_u32 run_granules =
        granules * (1 + popcount(active_lane_mask & lanes_until_next(run_starts, this_lane_bit)));
    const ck_u32 bits = clipped_mask(first_bit, run_granules);
    if (!(bits & ~current_bits))
        return;
    set_bits(word, bits);
    if (!continues_run && !(first_bit & 31) && run_granules >= 32)
        set_summary_bits(word, run_granules >> 5);
}

/* Fast path: load only the first entry of the access's key. Return false if this entry is free or belongs to another
 * page; otherwise set ``word`` to the address of the access's word in the bitmap. */
CK_INLINE bool find_word(ck_u64 userdata, ck_u32 mode, ck_u32 level, ck_u64 address, ck_u64 *word)
{
    const ck_u32 launch = CK_LAUNCH_OF(userdata);
    const ck_u64 page = address >> CK_PAGE_SHIFT(level);
    const ck_u64 key = make_u64((ck_u32)page, (ck_u32)(CK_KEY(launch, mode, level, page) >> 32));
    const ck_entry entry = load_entry(entry_address(userdata, slot_of_page(launch, mode, level, (ck_u32)page)));
    *word = word_address(entry.bitmap, level, (ck_u32)address);
    return entry.key == key && entry.bitmap >> 32;
}

/* Repeat find_word() with coherent loads: the L1 cache may hold the entry from before another SM claimed the page. */
CK_INLINE bool find_word_coherent(ck_u64 userdata, ck_u32 mode, ck_u32 level, ck_u64 address, ck_u64 *word)
{
    const ck_u32 launch = CK_LAUNCH_OF(userdata);
    const ck_u64 page = address >> CK_PAGE_SHIFT(level);
    const ck_u64 key = make_u64((ck_u32)page, (ck_u32)(CK_KEY(launch, mode, level, page) >> 32));
    const ck_u64 slot_address = entry_address(userdata, slot_of_page(launch, mode, level, (ck_u32)page));
    if (load_coherent64(slot_address) != key)
        return false;
    const ck_u64 bitmap = load_coherent64(slot_address + OFFSET_OF(ck_entry, bitmap));
    *word = word_address(bitmap, level, (ck_u32)address);
    return bitmap >> 32;
}

/* Slow path: search for the page by probing, and claim a page if there is none. */
CK_INLINE void search_and_set(ck_u64 userdata, ck_u32 mode, ck_u64 address, ck_u32 bytes)
{
    const ck_u32 level = level_of(address, bytes);
    page_search search = {userdata, CK_KEY(CK_LAUNCH_OF(userdata), mode, level, address >> CK_PAGE_SHIFT(level)),
                          address, bytes, RETRY_BUDGET};
    const ck_u64 bitmap = find_or_claim_page(&search);
    userdata = reload(&search)->userdata, bytes = reload(&search)->bytes;
    const ck_u32 low_address = (ck_u32)reload(&search)->address, same_level = level_of(low_address, bytes);
    const ck_u64 word = word_address(bitmap, same_level, low_address);
    if (bitmap == CK_NO_PAGE)
        mark_launch_lost(userdata);
    else
        set_runs(word, same_level, low_address, bytes);
}

/* Record the access of one instruction: at most 32 bytes, naturally aligned, so that its bits are within one word.
 * Most accesses have no uncommon flags and consist of whole granules; the first branch is for them. */
CK_INLINE void record_access(ck_u64 userdata, ck_u32 flags, ck_u64 address, ck_u32 bytes)
{
    ck_u64 word;
    ck_u32 mode = flags & CK_ATOMIC;
    if (!((((ck_u32)address | bytes) & 3) | (flags & UNCOMMON_FLAGS))) {
        if (find_word(userdata, mode, 0, address, &word)) {
            set_runs(word, 0, (ck_u32)address, bytes);
            return;
        }
        /* Compute derived values again: keeping them across the branch would need more registers. */
        userdata = rematerialized(userdata), mode = rematerialized(mode);
        address = make_u64((ck_u32)address, rematerialized((ck_u32)(address >> 32)));
        if (find_word_coherent(userdata, mode, 0, address, &word)) {
            set_runs(word, 0, (ck_u32)address, bytes);
            return;
        }
    } else {
        const ck_u32 level = level_of(address, bytes);
        if (flags & FLAG_PREFETCH)
            return;
        mode = mode_of(flags);
        if (find_word(userdata, mode, level, address, &word)) {
            set_runs(word, level, (ck_u32)address, bytes);
            return;
        }
    }
    search_and_set(rematerialized(userdata), rematerialized(mode), rematerialized(address), bytes);
}

/* SanitizerCallbackMemoryAccess, of SANITIZER_INSTRUCTION_GLOBAL_MEMORY_ACCESS. */
CK_PATCH ck_memory_access(ck_u64 userdata, ck_u64 pc, ck_u64 address, ck_u32 bytes, ck_u32 flags, const void *data)
{
    (void)pc, (void)data;
    if (has_arena(userdata))
        record_access(launch_user_data(userdata), flags, address, bytes);
    return 0;
}

/* SanitizerCallbackMemcpyAsync, of SANITIZER_INSTRUCTION_MEMCPY_ASYNC: bytes that are filled with zeros are not
 * read. */
CK_PATCH ck_copy_async(ck_u64 userdata, ck_u64 pc, ck_u64 source, ck_u32 destination, ck_u32 bytes, ck_u32 zeros)
{
    (void)pc, (void)destination;
    if (has_arena(userdata) && make_opaque(bytes - zeros))
        record_access(launch_user_data(userdata), FLAG_READ, source, bytes - zeros);
    return 0;
}

/* --- bulk copies: all lanes that call a callback together have the same arguments ---------------------- */

#define BLOCK_BYTES 16u
#define BLOCKS_OF(mask_and_size) ((mask_and_size) & 0xffff)

/* SanitizerCallbackBulkCopyGlobalToShared, of SANITIZER_INSTRUCTION_BULK_COPY_GLOBAL_TO_SHARED. */
CK_PATCH ck_bulk_load(ck_u64 userdata, ck_u64 pc, ck_u64 source, ck_u32 destination, ck_u32 barrier,
                      ck_u32 mask_and_size, ck_u32 is_multicast)
{
    (void)pc, (void)destination, (void)barrier, (void)is_multicast;
    if (is_leader(active_lanes()))
        record_bytes(userdata, CK_READ, ALL_BITS, source, BLOCKS_OF(mask_and_size) * BLOCK_BYTES);
    return 0;
}

/* SanitizerCallbackBulkCopySharedToGlobal, of SANITIZER_INSTRUCTION_BULK_COPY_SHARED_TO_GLOBAL: the mask has
 * a bit for each byte of a 16-byte block. */
CK_PATCH ck_bulk_store(ck_u64 userdata, ck_u64 pc, ck_u64 destination, ck_u32 source, ck_u32 mask_and_size,
                       ck_u32 has_mask)
{
    (void)pc, (void)source;
    const ck_u32 block_mask = mask_and_size >> 16;
    if (is_leader(active_lanes()))
        record_bytes(userdata, CK_WRITE, has_mask ? block_mask | block_mask << 16 : ALL_BITS, destination,
                     BLOCKS_OF(mask_and_size) * BLOCK_BYTES);
    return 0;
}

/* SanitizerCallbackBulkReductionSharedToGlobal, of SANITIZER_INSTRUCTION_BULK_REDUCTION_SHARED_TO_GLOBAL. */
CK_PATCH ck_bulk_reduction(ck_u64 userdata, ck_u64 pc, ck_u64 destination, ck_u32 source, ck_u32 blocks)
{
    (void)pc, (void)source;
    if (is_leader(active_lanes()))
        record_bytes(userdata, CK_ATOMIC, ALL_BITS, destination, blocks * BLOCK_BYTES);
    return 0;
}

/* --- tensor maps -------------------------------------------------------------------------------------- */

/* SanitizerCallbackTensorMemoryLoad, of SANITIZER_INSTRUCTION_TMA_LOAD. */
CK_PATCH ck_tensor_load(ck_u64 userdata, ck_u64 pc, ck_u64 map, ck_u32 destination, ck_u32 barrier, ck_u32 coord0,
                        ck_u32 coord1, ck_u32 coord2, ck_u32 coord3, ck_u32 coord4, ck_u32 dim,
                        ck_u32 is_multicast, ck_u32 mask_and_offsets, ck_u32 load_mode)
{
    (void)pc;
    const ck_u32 word[] = {destination, barrier, coord0,       coord1,           coord2,   coord3,
                           coord4,      dim,     is_multicast, mask_and_offsets, load_mode};
    if (is_leader(active_lanes()))
        record_box(userdata, CK_READ, map, word, 11, 2);
    return 0;
}

/* SANITIZER_INSTRUCTION_TMA_STORE. The header names its callback type, SanitizerCallbackTensorMemoryStore,
 * but does not declare it (13.5.25), so the words after the map are recorded unchanged. */
CK_PATCH ck_tensor_store(ck_u64 userdata, ck_u64 pc, ck_u64 map, ck_u32 word0, ck_u32 word1, ck_u32 word2,
                         ck_u32 word3, ck_u32 word4, ck_u32 word5, ck_u32 word6, ck_u32 word7)
{
    (void)pc;
    const ck_u32 word[] = {word0, word1, word2, word3, word4, word5, word6, word7};
    if (is_leader(active_lanes()))
        record_box(userdata, CK_WRITE, map, word, 8, 1);
    return 0;
}
