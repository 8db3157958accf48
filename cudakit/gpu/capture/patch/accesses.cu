/* The device patch: the callbacks that an instrumented kernel calls before each access to global memory.
 *
 * Every thread of every kernel executes this code, so the rule is: test before set. An access whose bits are
 * already set costs two loads: the entry of its page, and the word of bits. Only if that test fails are bits
 * set: lanes of a warp that access consecutive memory send one word of bits, and nobody waits for the result.
 * All of that is one function, which calls no other and uses only the registers that it need not save (14 of
 * them, see "rematerialized" in primitives.h): a call, or one more register, would slow down every access.
 * Nothing here waits for a thread that may not be running, and nothing uses shared memory: the kernels
 * themselves behave as before.
 *
 * The signatures are those of sanitizer_patching.h of the Sanitizer API, 13.5, section "Sanitizer Patching API";
 * each function below names its callback type. A patch returns SANITIZER_PATCH_SUCCESS, 0.
 */
#include "arena.h"

/* offsetof, which NVRTC 13.0 lacks without headers. */
#define AT(type, field) ((ck_u64) & ((type *)0)->field)

#ifdef __CUDACC__
#include "primitives.h"
#endif /* else: defined by the including file */

/* State of a thread that searches for its page. Kept in local memory and reloaded where needed: in registers
 * it would stay live throughout and exceed their number. */
typedef struct {
    ck_u64 userdata, key, address;
    ck_u32 bytes, retries;
} page_search;

#define MAX_PROBES 63u
/* For an entry that another thread is filling, which takes only a few instructions. */
#define RETRIES_PER_PROBE (1u << 20)
#define RETRY_BUDGET (MAX_PROBES * RETRIES_PER_PROBE)

/* One comparison: arenas lie above the first 4 GiB. */
CK_INLINE bool has_arena(ck_u64 userdata)
{
    return opaque((ck_u32)(userdata >> 32));
}

/* Return the user data of this launch; kernels of a graph share theirs. */
CK_INLINE ck_u64 launch_user_data(ck_u64 userdata)
{
    return userdata & CK_BY_GRID ? CK_USERDATA_OF_GRID(userdata, grid_id()) : userdata;
}

CK_INLINE ck_u64 lost_word(ck_u64 userdata)
{
    return CK_BASE_OF(userdata) + CK_LOST_AT + CK_LAUNCH_OF(userdata) / 32 * 4;
}

CK_INLINE bool is_lost(ck_u64 userdata)
{
    return load(lost_word(userdata)) >> (CK_LAUNCH_OF(userdata) & 31) & 1;
}

CK_INLINE void mark_lost(ck_u64 userdata)
{
    const ck_u32 bit = 1u << (CK_LAUNCH_OF(userdata) & 31);
    if (load_coherent(lost_word(userdata)) & bit)
        return;
    if (!(atomic_or(lost_word(userdata), bit) & bit))
        atomic_add(CK_BASE_OF(userdata) + AT(ck_header, lost), 1);
}

/* --- pages ----------------------------------------------------------------------------------------- */

/* Adjacent pages have adjacent entries: eight per cache line. Different launches, and different modes of one
 * launch, start at different slots; modes a third of the table apart, whatever its size. */
#define SLOT_STEP_OF_LAUNCH \
    0x9E3779B8u /* 2^32 over the golden ratio (Fibonacci hashing); all three are multiples of a cache line */
#define SLOT_STEP_OF_MODE 0x555550u  /* a third of 2^24: modulo any smaller 2^n, one or two thirds of that */
#define SLOT_STEP_OF_LEVEL 0x199998u /* a tenth of 2^24: far from all of those */

CK_INLINE ck_u32 slot_of_page(ck_u32 launch, ck_u32 mode, ck_u32 level, ck_u32 page)
{
    return page + launch * SLOT_STEP_OF_LAUNCH + mode * SLOT_STEP_OF_MODE + level * SLOT_STEP_OF_LEVEL;
}

CK_INLINE ck_u32 first_probe(ck_u64 key)
{
    return slot_of_page(CK_KEY_LAUNCH(key), CK_KEY_MODE(key), CK_KEY_LEVEL(key), (ck_u32)key);
}

/* Where two runs of pages collide, one moves as a whole, by a step of its own. The step is odd, so that no
 * stride of addresses leaves slots unused. */
CK_INLINE ck_u32 next_probe(ck_u32 probe, ck_u64 key)
{
    return probe + (((ck_u32)(key >> 32) * 0x85EBCA6Bu) >> 8 | 1);
}

CK_INLINE ck_u64 entry_at(ck_u64 userdata, ck_u32 probe)
{
    const ck_u32 index = probe & wrapping_mask(0, (ck_u32)userdata >> CK_LAUNCH_BITS);
    return CK_BASE_OF(userdata) + CK_ENTRIES_AT + (ck_u64)index * sizeof(ck_entry);
}

/* Find the bitmap of a key through the L1 cache; 0 or CK_NO_PAGE if there is none. */
CK_INLINE ck_u64 find_bitmap(ck_u64 userdata, ck_u64 key)
{
    ck_u32 probe = first_probe(key);
#pragma unroll 1
    for (ck_u32 tries = 0; tries < MAX_PROBES; tries++, probe = next_probe(probe, key)) {
        const ck_entry entry = load_entry(entry_at(userdata, probe));
        if (entry.key == key)
            return entry.bitmap;
        if (!entry.key)
            return 0;
    }
    return 0;
}

CK_INLINE ck_u64 claim_page(const page_search *search)
{
    const ck_u64 header = CK_BASE_OF(reload(search)->userdata);
    const ck_u32 number = atomic_add(header + AT(ck_header, cursor), 1);
    if (number >= load(header + AT(ck_header, pages)))
        return CK_NO_PAGE;
    const ck_u32 page = load(header + AT(ck_header, pages_at)) + number * (ck_u32)sizeof(ck_page);
    store64(header + page, reload(search)->key);
    /* Reloaded, so that no register holds it until here. */
    const ck_u64 again = CK_BASE_OF(reload(search)->userdata);
    return again + load(again + AT(ck_header, chunks_at)) + (ck_u64)CK_SLOT_OF_PAGE(number) * CK_BITMAP_BYTES;
}

CK_INLINE bool use_retries(page_search *search, ck_u32 some)
{
    const ck_u32 before = reload(search)->retries;
    search->retries = before - some;
    return before <= some;
}

/* Find the bitmap of a key, or claim a page for it; CK_NO_PAGE if none is left.
 *
 * Of the lanes that reach a free entry together, one claims it and then looks it up again with the others:
 * otherwise it would continue alone, and whole words set by the warp would be missing in the summary. A thread
 * that finds a key without a page also retries: the thread that assigns the page waits for nothing. A kernel
 * that lost accesses does not search at every further access. */
CK_INLINE ck_u64 find_or_claim(page_search *search)
{
    ck_u32 probe = first_probe(reload(search)->key);
#pragma unroll 1
    for (;;) {
        const ck_u64 entry = entry_at(reload(search)->userdata, probe);
        const ck_entry current = load_entry_coherent(entry);
        if (current.key == reload(search)->key) {
            if (current.bitmap)
                return current.bitmap;
            if (use_retries(search, 1))
                break;
        } else if (current.key) {
            if (is_lost(reload(search)->userdata) || use_retries(search, RETRIES_PER_PROBE))
                break;
            probe = next_probe(probe, reload(search)->key);
        } else if (is_leader(active_lanes()) && !atomic_claim(entry, reload(search)->key)) {
            store64(entry + AT(ck_entry, bitmap), claim_page(search));
        }
    }
    return CK_NO_PAGE;
}

/* --- bits ------------------------------------------------------------------------------------------ */

#define ALL_BITS (~0u)

CK_INLINE bool are_set(ck_u64 userdata, ck_u64 key, ck_u32 word, ck_u32 bits)
{
    const ck_u64 bitmap = find_bitmap(userdata, key);
    return bitmap > CK_NO_PAGE && (load(bitmap + word * 4) & bits) == bits;
}

CK_INLINE void summarize(ck_u64 word, ck_u32 words)
{
    const ck_u32 low = (ck_u32)word;
    set_bits(make_u64(CK_SUMMARY_OF(low), (ck_u32)(word >> 32)), clipped_mask(CK_SUMMARY_BIT(low), words));
}

/* Level 0: whole granules of 4 bytes; level 1: single bytes. */
CK_INLINE ck_u32 level_of(ck_u64 address, ck_u32 bytes)
{
    return (((ck_u32)address | bytes) & 3) != 0;
}

CK_INLINE ck_u64 key_of(ck_u64 userdata, ck_u32 mode, ck_u32 level, ck_u64 granule)
{
    return CK_KEY(CK_LAUNCH_OF(userdata), mode, level, granule >> CK_BITMAP_LOG2);
}

CK_INLINE ck_u32 word_of(ck_u64 granule)
{
    return (ck_u32)(granule >> 5) & (CK_BITMAP_WORDS - 1);
}

/* Record the bytes from ``address`` on that ``pattern`` selects: one bit per byte of 32 bytes, aligned to 32
 * bytes. */
CK_ASIDE void record_bytes(ck_u64 userdata, ck_u32 mode, ck_u32 pattern, ck_u64 address, ck_u32 bytes)
{
    if (!has_arena(userdata) || !bytes)
        return;
    userdata = launch_user_data(userdata);
    if ((address + bytes - 1) >> CK_ADDRESS_BITS) {
        mark_lost(userdata);
        return;
    }
    const ck_u32 level = level_of(address, bytes) || pattern != ALL_BITS;
    const ck_u64 end = (address + bytes) >> CK_GRANULE_SHIFT(level);
#pragma unroll 1
    for (ck_u64 granule = address >> CK_GRANULE_SHIFT(level); granule < end; granule = (granule | 31) + 1) {
        const ck_u64 rest = end - (granule & ~31ull);
        const ck_u32 below = rest < 32 ? (1u << rest) - 1 : ~0u;
        const ck_u32 bits = below & ~0u << (granule & 31) & pattern;
        const ck_u64 key = key_of(userdata, mode, level, granule);
        if (are_set(userdata, key, word_of(granule), bits))
            continue;
        page_search self = {userdata, key, 0, 0, RETRY_BUDGET};
        const ck_u64 bitmap = find_or_claim(&self);
        if (bitmap == CK_NO_PAGE)
            mark_lost(userdata);
        else
            set_bits(bitmap + word_of(granule) * 4, bits);
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

#define UNCOMMON_FLAGS (FLAG_PREFETCH | FLAG_ATOMIC_SYSTEM | FLAG_SCOPE_SYSTEM | FLAG_ATOMIC_WRITE_ONLY)

CK_INLINE ck_u32 mode_of(ck_u32 flags)
{
    ck_u32 mode = flags & (FLAG_READ | FLAG_WRITE);
    if (flags & FLAG_ATOMIC_WRITE_ONLY)
        mode = CK_ATOMIC;
    if (flags & (FLAG_ATOMIC_SYSTEM | FLAG_SCOPE_SYSTEM)) /* volatile accesses have system scope */
        mode = CK_SYNC;
    return mode;
}

CK_INLINE ck_u64 word_at(ck_u64 bitmap, ck_u32 level, ck_u32 address)
{
    return bitmap | word_of(address >> CK_GRANULE_SHIFT(level)) * 4;
}

/* Lanes of a warp mostly continue where their left neighbour ends. The first lane of such a run, or the
 * first in each word that the run reaches, sets the bits of all. Lanes exchange positions while the word is
 * being loaded. */
CK_INLINE void set_runs(ck_u64 word, ck_u32 level, ck_u32 address, ck_u32 bytes)
{
    const ck_u32 current = load(word);
    const ck_u32 shift = CK_GRANULE_SHIFT(level), many = bytes >> shift;
    /* Continuous across words; a lane that copies fewer bytes gets a distant value, and so is no neighbour. */
    const ck_u32 bit = ((ck_u32)word << 3 | (address >> shift & 31)) + (many << 28);
    const ck_u32 step = bit - from_left_lane(bit);
    const ck_u32 here = active_lanes(), self = lane_bit();
    const bool next = has_left_lane(here, self) & (step == many);
    const ck_u32 like = active_lanes_with_same(next), heads = next ? here & ~like : like;
    if (next & ((bit & 31) >= many))
        return;
    const ck_u32 all = many * (1 + popcount(here & lanes_until_next(heads, self)));
    const ck_u32 bits = clipped_mask(bit, all);
    if (!(bits & ~current))
        return;
    set_bits(word, bits);
    if (!next && !(bit & 31) && all >= 32)
        summarize(word, all >> 5);
}

/* Find the word of an access through its first entry; false if that entry belongs to another page. */
CK_INLINE bool find_word(ck_u64 userdata, ck_u32 mode, ck_u32 level, ck_u64 address, ck_u64 *word)
{
    const ck_u32 launch = CK_LAUNCH_OF(userdata);
    const ck_u64 page = address >> CK_PAGE_SHIFT(level);
    const ck_u64 key = make_u64((ck_u32)page, (ck_u32)(CK_KEY(launch, mode, level, page) >> 32));
    const ck_entry entry = load_entry(entry_at(userdata, slot_of_page(launch, mode, level, (ck_u32)page)));
    *word = word_at(entry.bitmap, level, (ck_u32)address);
    return entry.key == key && entry.bitmap >> 32;
}

/* Retry with a device-coherent load: our L1 copy may predate another SM's claim of this page. */
CK_INLINE bool find_word_coherent(ck_u64 userdata, ck_u32 mode, ck_u32 level, ck_u64 address, ck_u64 *word)
{
    const ck_u32 launch = CK_LAUNCH_OF(userdata);
    const ck_u64 page = address >> CK_PAGE_SHIFT(level);
    const ck_u64 key = make_u64((ck_u32)page, (ck_u32)(CK_KEY(launch, mode, level, page) >> 32));
    const ck_u64 at = entry_at(userdata, slot_of_page(launch, mode, level, (ck_u32)page));
    if (load_coherent64(at) != key)
        return false;
    const ck_u64 bitmap = load_coherent64(at + AT(ck_entry, bitmap));
    *word = word_at(bitmap, level, (ck_u32)address);
    return bitmap >> 32;
}

/* Slow path: search for the page, and claim one if there is none. */
CK_INLINE void search_and_set(ck_u64 userdata, ck_u32 mode, ck_u64 address, ck_u32 bytes)
{
    const ck_u32 level = level_of(address, bytes);
    page_search self = {userdata, CK_KEY(CK_LAUNCH_OF(userdata), mode, level, address >> CK_PAGE_SHIFT(level)),
                        address, bytes, RETRY_BUDGET};
    const ck_u64 bitmap = find_or_claim(&self);
    userdata = reload(&self)->userdata, bytes = reload(&self)->bytes;
    const ck_u32 low = (ck_u32)reload(&self)->address, again = level_of(low, bytes);
    const ck_u64 word = word_at(bitmap, again, low);
    if (bitmap == CK_NO_PAGE)
        mark_lost(userdata);
    else
        set_runs(word, again, low, bytes);
}

/* Record the access of one instruction: at most 32 bytes, naturally aligned, so within one word. Most
 * accesses are plain and of whole granules, and need less work. */
CK_INLINE void record_access(ck_u64 userdata, ck_u32 flags, ck_u64 address, ck_u32 bytes)
{
    ck_u64 word;
    ck_u32 mode = flags & CK_ATOMIC;
    if (!((((ck_u32)address | bytes) & 3) | (flags & UNCOMMON_FLAGS))) {
        if (find_word(userdata, mode, 0, address, &word)) {
            set_runs(word, 0, (ck_u32)address, bytes);
            return;
        }
        userdata = rematerialized(userdata), mode = rematerialized(mode); /* and values derived from them */
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

/* SanitizerCallbackMemcpyAsync, of SANITIZER_INSTRUCTION_MEMCPY_ASYNC: zero-filled bytes are not read. */
CK_PATCH ck_copy_async(ck_u64 userdata, ck_u64 pc, ck_u64 source, ck_u32 destination, ck_u32 bytes, ck_u32 zeros)
{
    (void)pc, (void)destination;
    if (has_arena(userdata) && opaque(bytes - zeros))
        record_access(launch_user_data(userdata), FLAG_READ, source, bytes - zeros);
    return 0;
}

/* --- bulk copies: all lanes that arrive together have the same arguments ---------------------- */

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
 * a bit for each byte of a block. */
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

CK_INLINE ck_u64 hash_mix(ck_u64 hash, ck_u64 value)
{
    hash = (hash ^ value) * 0xD6E8FEB86659FD93ull;
    return hash ^ hash >> 32;
}

/* Return the slot of a key in a hash table of 2^n slots, or the number of slots if all probed slots are
 * taken. ``is_new``: the slot was claimed now, and the caller must write the entry. */
CK_INLINE ck_u32 claim_slot(ck_u64 keys, ck_u32 slots, ck_u64 key, bool *is_new)
{
    const ck_u32 step = (ck_u32)(key >> 44) | 1;
    ck_u32 slot = (ck_u32)(key >> 20);
    *is_new = false;
    for (ck_u32 tries = 0; tries < MAX_PROBES; tries++, slot += step) {
        const ck_u64 at = keys + (slot & (slots - 1)) * sizeof(ck_u64);
        ck_u64 current = load64(at);
        if (!current) {
            current = atomic_claim(at, key);
            *is_new = !current;
        }
        if (!current || current == key)
            return slot & (slots - 1);
    }
    return slots;
}

CK_INLINE ck_u64 arena_address(ck_u64 userdata, ck_u64 offset)
{
    return CK_BASE_OF(userdata) + offset;
}

CK_INLINE void write_map(ck_u64 userdata, ck_u64 map, ck_u32 slot)
{
    const ck_u32 number = atomic_add(CK_BASE_OF(userdata) + AT(ck_header, maps), 1);
    const ck_u64 at = arena_address(userdata, CK_MAPS_AT(CK_ENTRIES_LOG2_OF(userdata))) + number * sizeof(ck_map);
    if (number >= CK_MAX_MAPS)
        return;
    for (int i = 0; i < CK_MAP_WORDS; i++)
        store64(at + AT(ck_map, content) + i * 8, load64(map + i * 8));
    store(at + AT(ck_map, slot), slot);
}

/* Return the slot of a tensor map by its content, writing a new map to the arena. A map that has a slot but
 * was not written, for lack of space, is missed by the host. */
CK_INLINE ck_u32 slot_of_map(ck_u64 userdata, ck_u64 map)
{
    ck_u64 hash = 0;
    for (int i = 0; i < CK_MAP_WORDS; i++)
        hash = hash_mix(hash, load64(map + i * 8));
    bool is_new;
    const ck_u64 keys = arena_address(userdata, CK_MAP_KEYS_AT(CK_ENTRIES_LOG2_OF(userdata)));
    const ck_u32 slot = claim_slot(keys, CK_MAP_KEYS, hash | 1, &is_new);
    if (is_new)
        write_map(userdata, map, slot);
    return slot < CK_MAP_KEYS ? slot : CK_NO_MAP;
}

CK_INLINE void write_box(ck_u64 userdata, ck_u32 map_and_mode, const ck_u32 *word, ck_u32 words)
{
    const ck_u32 number = atomic_add(CK_BASE_OF(userdata) + AT(ck_header, boxes), 1);
    const ck_u64 at = arena_address(userdata, CK_BOXES_AT(CK_ENTRIES_LOG2_OF(userdata))) + number * sizeof(ck_box);
    if (number >= CK_MAX_BOXES) {
        mark_lost(userdata);
        return;
    }
    store(at + AT(ck_box, launch), CK_LAUNCH_OF(userdata));
    store(at + AT(ck_box, map), map_and_mode);
    for (ck_u32 i = 0; i < 12; i++)
        store(at + AT(ck_box, word) + i * 4, i < words ? word[i] : 0);
}

/* Record each use of a map once. Words from ``first`` on distinguish uses; earlier words locate the box in
 * shared memory. */
CK_INLINE void record_box(ck_u64 userdata, ck_u32 mode, ck_u64 map, const ck_u32 *word, ck_u32 words, ck_u32 first)
{
    if (!has_arena(userdata))
        return;
    userdata = launch_user_data(userdata);
    if (is_lost(userdata))
        return;
    const ck_u32 map_and_mode = slot_of_map(userdata, map) | mode << 16;
    ck_u64 hash = hash_mix((ck_u64)CK_LAUNCH_OF(userdata) << 32 | map_and_mode, words);
    for (ck_u32 i = first; i < words; i++)
        hash = hash_mix(hash, word[i]);
    bool is_new;
    const ck_u64 keys = arena_address(userdata, CK_BOX_KEYS_AT(CK_ENTRIES_LOG2_OF(userdata)));
    if (claim_slot(keys, CK_BOX_KEYS, hash | 1, &is_new) == CK_BOX_KEYS)
        mark_lost(userdata);
    if (is_new)
        write_box(userdata, map_and_mode, word, words);
}

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
CK_PATCH ck_tensor_store(ck_u64 userdata, ck_u64 pc, ck_u64 map, ck_u32 w0, ck_u32 w1, ck_u32 w2, ck_u32 w3,
                         ck_u32 w4, ck_u32 w5, ck_u32 w6, ck_u32 w7)
{
    (void)pc;
    const ck_u32 word[] = {w0, w1, w2, w3, w4, w5, w6, w7};
    if (is_leader(active_lanes()))
        record_box(userdata, CK_WRITE, map, word, 8, 1);
    return 0;
}
