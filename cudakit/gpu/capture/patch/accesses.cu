/* The patch: what an instrumented kernel calls before each access to global memory.
 *
 * Every thread of every kernel comes through here, so the rule is: test before set. An access whose bits are
 * set already costs two loads, of the entry of its page and of the word of bits. Only what fails that test
 * goes on to set them, where neighbours in a warp that go on one behind the other send one word of bits, and
 * nobody waits for what comes back. All of that is one function that calls none and gets along with the
 * registers that it need not save (14 of them, see "renewed" in primitives.h): a call, or a register more, would
 * be paid by every access, in its first instructions.
 * Nothing here waits for a thread that may not be there, and nothing uses shared memory: kernels stay as
 * they were.
 *
 * The signatures are those of sanitizer_patching.h of the Sanitizer API, 13.5, section "Sanitizer Patching
 * API"; each function below names its callback type. A patch returns SANITIZER_PATCH_SUCCESS, 0.
 */
#include "arena.h"

/* offsetof, which NVRTC 13.0 does not have without headers. */
#define AT(type, field) ((ck_u64) & ((type *)0)->field)

#ifdef __CUDACC__
#include "primitives.h"
#endif /* else: from who includes this file */

/* What a thread that has to search for its page knows. In memory, to be fetched where it is needed: in
 * registers it would be there all the way, and they would not do. */
typedef struct {
    ck_u64 userdata, key, address;
    ck_u32 bytes, patience;
} seeker;

#define MAX_PROBES 63u
/* For an entry that another thread is filling: some instructions, in truth. */
#define PATIENCE_OF_A_PROBE (1u << 20)
#define PATIENCE (MAX_PROBES * PATIENCE_OF_A_PROBE)

/* In one comparison: arenas lie above the first 4 GiB. */
CK_INLINE bool has_arena(ck_u64 userdata)
{
    return opaque((ck_u32)(userdata >> 32));
}

/* The user data of this launch, from what several share where they do. */
CK_INLINE ck_u64 own(ck_u64 userdata)
{
    return userdata & CK_BY_GRID ? CK_USERDATA_OF_GRID(userdata, grid()) : userdata;
}

CK_INLINE ck_u64 lost_word(ck_u64 userdata)
{
    return CK_BASE_OF(userdata) + CK_LOST_AT + CK_LAUNCH_OF(userdata) / 32 * 4;
}

CK_INLINE bool is_lost(ck_u64 userdata)
{
    return load(lost_word(userdata)) >> (CK_LAUNCH_OF(userdata) & 31) & 1;
}

CK_INLINE void lose(ck_u64 userdata)
{
    const ck_u32 bit = 1u << (CK_LAUNCH_OF(userdata) & 31);
    if (load_shared_truth(lost_word(userdata)) & bit)
        return;
    if (!(atomic_or(lost_word(userdata), bit) & bit))
        atomic_add(CK_BASE_OF(userdata) + AT(ck_header, lost), 1);
}

/* --- pages ----------------------------------------------------------------------------------------- */

/* Pages that lie side by side have entries that do: eight share a line of the cache. What a launch does in one
 * mode begins somewhere else than what it does in another, a third of the table apart whatever its size, and
 * than what other launches do. */
#define PLACE_OF_LAUNCH 0x9E3779B8u /* 2^32 by the golden ratio, as in Fibonacci hashing; whole lines, as all three */
#define PLACE_OF_MODE 0x555550u     /* a third of 2^24: modulo any smaller 2^n, a third of that or two */
#define PLACE_OF_LEVEL 0x199998u    /* a tenth of 2^24: near none of those */

CK_INLINE ck_u32 place_of_page(ck_u32 launch, ck_u32 mode, ck_u32 level, ck_u32 page)
{
    return page + launch * PLACE_OF_LAUNCH + mode * PLACE_OF_MODE + level * PLACE_OF_LEVEL;
}

CK_INLINE ck_u32 first_probe(ck_u64 key)
{
    return place_of_page(CK_KEY_LAUNCH(key), CK_KEY_MODE(key), CK_KEY_LEVEL(key), (ck_u32)key);
}

/* Where two such streams of pages meet, one moves on as a whole, by a step of its own: odd, so that no stride
 * of addresses leaves room unused. */
CK_INLINE ck_u32 next_probe(ck_u32 probe, ck_u64 key)
{
    return probe + (((ck_u32)(key >> 32) * 0x85EBCA6Bu) >> 8 | 1);
}

CK_INLINE ck_u64 entry_at(ck_u64 userdata, ck_u32 probe)
{
    const ck_u32 index = probe & mask(0, (ck_u32)userdata >> CK_LAUNCH_BITS);
    return CK_BASE_OF(userdata) + CK_ENTRIES_AT + (ck_u64)index * sizeof(ck_entry);
}

/* Find the bitmap of a key by what the cache of this multiprocessor knows: 0 or CK_NO_PAGE for none. */
CK_INLINE ck_u64 find(ck_u64 userdata, ck_u64 key)
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

CK_INLINE ck_u64 next_page(const seeker *of)
{
    const ck_u64 header = CK_BASE_OF(anew(of)->userdata);
    const ck_u32 number = atomic_add(header + AT(ck_header, cursor), 1);
    if (number >= load(header + AT(ck_header, pages)))
        return CK_NO_PAGE;
    const ck_u32 page = load(header + AT(ck_header, pages_at)) + number * (ck_u32)sizeof(ck_page);
    store64(header + page, anew(of)->key);
    /* Fetched once more, to be in no register until here. */
    const ck_u64 again = CK_BASE_OF(anew(of)->userdata);
    return again + load(again + AT(ck_header, chunks_at)) + (ck_u64)CK_SLOT_OF_PAGE(number) * CK_BITMAP_BYTES;
}

CK_INLINE bool loses_patience(seeker *of, ck_u32 some)
{
    const ck_u32 before = anew(of)->patience;
    of->patience = before - some;
    return before <= some;
}

/* Find the bitmap of a key, or take a page for it; CK_NO_PAGE where there is none.
 *
 * One thread of those that come to a free entry together takes it, and looks at it again with the others: it would
 * go on alone otherwise, and what they do as one would be in no summary. A thread that finds a key without a page
 * looks again too: who is giving it one waits for nothing meanwhile. A kernel for which there was no room shall not
 * search for it at every access. */
CK_INLINE ck_u64 find_or_take(seeker *of)
{
    ck_u32 probe = first_probe(anew(of)->key);
#pragma unroll 1
    for (;;) {
        const ck_u64 entry = entry_at(anew(of)->userdata, probe);
        const ck_entry there = load_shared_entry(entry);
        if (there.key == anew(of)->key) {
            if (there.bitmap)
                return there.bitmap;
            if (loses_patience(of, 1))
                break;
        } else if (there.key) {
            if (is_lost(anew(of)->userdata) || loses_patience(of, PATIENCE_OF_A_PROBE))
                break;
            probe = next_probe(probe, anew(of)->key);
        } else if (leads(all_here()) && !atomic_swap_free(entry, anew(of)->key)) {
            store64(entry + AT(ck_entry, bitmap), next_page(of));
        }
    }
    return CK_NO_PAGE;
}

/* --- bits ------------------------------------------------------------------------------------------ */

#define ALL (~0u)

CK_INLINE bool all_set(ck_u64 userdata, ck_u64 key, ck_u32 word, ck_u32 bits)
{
    const ck_u64 bitmap = find(userdata, key);
    return bitmap > CK_NO_PAGE && (load(bitmap + word * 4) & bits) == bits;
}

CK_INLINE void summarize(ck_u64 word, ck_u32 words)
{
    const ck_u32 low = (ck_u32)word;
    set_bits(pair(CK_SUMMARY_OF(low), (ck_u32)(word >> 32)), mask_within(CK_SUMMARY_BIT(low), words));
}

/* Whole granules of 4 bytes, or each byte for itself. */
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

/* The bytes from address on of which ``pattern`` (of 32 bytes, from an address that is a multiple of 32) lets
 * all or some through. */
CK_ASIDE void record(ck_u64 userdata, ck_u32 mode, ck_u32 pattern, ck_u64 address, ck_u32 bytes)
{
    if (!has_arena(userdata) || !bytes)
        return;
    userdata = own(userdata);
    if ((address + bytes - 1) >> CK_ADDRESS_BITS) {
        lose(userdata);
        return;
    }
    const ck_u32 level = level_of(address, bytes) || pattern != ALL;
    const ck_u64 end = (address + bytes) >> CK_GRANULE_SHIFT(level);
#pragma unroll 1
    for (ck_u64 granule = address >> CK_GRANULE_SHIFT(level); granule < end;
         granule = (granule | 31) + 1) {
        const ck_u64 rest = end - (granule & ~31ull);
        const ck_u32 below = rest < 32 ? (1u << rest) - 1 : ~0u;
        const ck_u32 bits = below & ~0u << (granule & 31) & pattern;
        const ck_u64 key = key_of(userdata, mode, level, granule);
        if (all_set(userdata, key, word_of(granule), bits))
            continue;
        seeker self = {userdata, key, 0, 0, PATIENCE};
        const ck_u64 bitmap = find_or_take(&self);
        if (bitmap == CK_NO_PAGE)
            lose(userdata);
        else
            set_bits(bitmap + word_of(granule) * 4, bits);
    }
}

/* --- accesses of threads ---------------------------------------------------------------------------- */

enum { /* Sanitizer_DeviceMemoryFlags */
    FLAG_READ = 1 << 0,
    FLAG_WRITE = 1 << 1,
    FLAG_ATOMIC_SYSTEM = 1 << 2,
    FLAG_PREFETCH = 1 << 3,
    FLAG_SCOPE_SYSTEM = 1 << 7,
    FLAG_ATOMIC_WRITE_ONLY = 1 << 8,
};

#define FLAGS_APART (FLAG_PREFETCH | FLAG_ATOMIC_SYSTEM | FLAG_SCOPE_SYSTEM | FLAG_ATOMIC_WRITE_ONLY)

CK_INLINE ck_u32 mode_of(ck_u32 flags)
{
    ck_u32 mode = flags & (FLAG_READ | FLAG_WRITE);
    if (flags & FLAG_ATOMIC_WRITE_ONLY)
        mode = CK_ATOMIC;
    if (flags & (FLAG_ATOMIC_SYSTEM | FLAG_SCOPE_SYSTEM)) /* volatile accesses are of the system's scope */
        mode = CK_SYNC;
    return mode;
}

CK_INLINE ck_u64 word_at(ck_u64 bitmap, ck_u32 level, ck_u32 address)
{
    return bitmap | word_of(address >> CK_GRANULE_SHIFT(level)) * 4;
}

/* Threads of a warp mostly go on where their left neighbour ends. The first of such a run sets the bits of all,
 * in each word that it reaches the first one there. They say where they are while the word is on its way. */
CK_INLINE void set_runs(ck_u64 word, ck_u32 level, ck_u32 address, ck_u32 bytes)
{
    const ck_u32 there = load(word);
    const ck_u32 shift = CK_GRANULE_SHIFT(level), many = bytes >> shift;
    /* Counted on from word to word; who copies less than others is far away, and so no neighbour. */
    const ck_u32 bit = ((ck_u32)word << 3 | (address >> shift & 31)) + (many << 28);
    const ck_u32 step = bit - of_left(bit);
    const ck_u32 here = all_here(), self = own_bit();
    const bool next = has_left(here, self) & (step == many);
    const ck_u32 like = alike(next), heads = next ? here & ~like : like;
    if (next & ((bit & 31) >= many))
        return;
    const ck_u32 all = many * (1 + bits_in(here & until_next(heads, self)));
    const ck_u32 bits = mask_within(bit, all);
    if (!(bits & ~there))
        return;
    set_bits(word, bits);
    if (!next && !(bit & 31) && all >= 32)
        summarize(word, all >> 5);
}

/* Find the word of an access by the first entry to look at; false where that is another page's. */
CK_INLINE bool first_word(ck_u64 userdata, ck_u32 mode, ck_u32 level, ck_u64 address, ck_u64 *word)
{
    const ck_u32 launch = CK_LAUNCH_OF(userdata);
    const ck_u64 page = address >> CK_PAGE_SHIFT(level);
    const ck_u64 key = pair((ck_u32)page, (ck_u32)(CK_KEY(launch, mode, level, page) >> 32));
    const ck_entry entry = load_entry(entry_at(userdata, place_of_page(launch, mode, level, (ck_u32)page)));
    *word = word_at(entry.bitmap, level, (ck_u32)address);
    return entry.key == key && entry.bitmap >> 32;
}

/* The same by what all threads of the device agree on: another one may just have taken the page. */
CK_INLINE bool first_word_anew(ck_u64 userdata, ck_u32 mode, ck_u32 level, ck_u64 address, ck_u64 *word)
{
    const ck_u32 launch = CK_LAUNCH_OF(userdata);
    const ck_u64 page = address >> CK_PAGE_SHIFT(level);
    const ck_u64 key = pair((ck_u32)page, (ck_u32)(CK_KEY(launch, mode, level, page) >> 32));
    const ck_u64 at = entry_at(userdata, place_of_page(launch, mode, level, (ck_u32)page));
    if (load_shared_truth64(at) != key)
        return false;
    const ck_u64 bitmap = load_shared_truth64(at + AT(ck_entry, bitmap));
    *word = word_at(bitmap, level, (ck_u32)address);
    return bitmap >> 32;
}

/* The long way: search for the page, and take one where there is none. */
CK_INLINE void search(ck_u64 userdata, ck_u32 mode, ck_u64 address, ck_u32 bytes)
{
    const ck_u32 level = level_of(address, bytes);
    seeker self = {userdata, CK_KEY(CK_LAUNCH_OF(userdata), mode, level, address >> CK_PAGE_SHIFT(level)), address,
                   bytes, PATIENCE};
    const ck_u64 bitmap = find_or_take(&self);
    userdata = anew(&self)->userdata, bytes = anew(&self)->bytes;
    const ck_u32 low = (ck_u32)anew(&self)->address, again = level_of(low, bytes);
    const ck_u64 word = word_at(bitmap, again, low);
    if (bitmap == CK_NO_PAGE)
        lose(userdata);
    else
        set_runs(word, again, low, bytes);
}

/* What one instruction accesses: at most 32 bytes, at a multiple of their number, so that it is in one word.
 * Most accesses are of whole granules and plain, and come along with less. */
CK_INLINE void touch(ck_u64 userdata, ck_u32 flags, ck_u64 address, ck_u32 bytes)
{
    ck_u64 word;
    ck_u32 mode = flags & CK_ATOMIC;
    if (!((((ck_u32)address | bytes) & 3) | (flags & FLAGS_APART))) {
        if (first_word(userdata, mode, 0, address, &word)) {
            set_runs(word, 0, (ck_u32)address, bytes);
            return;
        }
        userdata = renewed(userdata), mode = renewed(mode); /* and what follows from them */
        address = pair((ck_u32)address, renewed((ck_u32)(address >> 32)));
        if (first_word_anew(userdata, mode, 0, address, &word)) {
            set_runs(word, 0, (ck_u32)address, bytes);
            return;
        }
    } else {
        const ck_u32 level = level_of(address, bytes);
        if (flags & FLAG_PREFETCH)
            return;
        mode = mode_of(flags);
        if (first_word(userdata, mode, level, address, &word)) {
            set_runs(word, level, (ck_u32)address, bytes);
            return;
        }
    }
    search(renewed(userdata), renewed(mode), renewed(address), bytes);
}

/* SanitizerCallbackMemoryAccess, of SANITIZER_INSTRUCTION_GLOBAL_MEMORY_ACCESS. */
CK_PATCH ck_memory_access(ck_u64 userdata, ck_u64 pc, ck_u64 address, ck_u32 bytes, ck_u32 flags,
                          const void *data)
{
    (void)pc, (void)data;
    if (has_arena(userdata))
        touch(own(userdata), flags, address, bytes);
    return 0;
}

/* SanitizerCallbackMemcpyAsync, of SANITIZER_INSTRUCTION_MEMCPY_ASYNC: what is filled with zeros is not
 * read. */
CK_PATCH ck_copy_async(ck_u64 userdata, ck_u64 pc, ck_u64 source, ck_u32 destination, ck_u32 bytes,
                       ck_u32 zeros)
{
    (void)pc, (void)destination;
    if (has_arena(userdata) && opaque(bytes - zeros))
        touch(own(userdata), FLAG_READ, source, bytes - zeros);
    return 0;
}

/* --- bulk copies: all threads that come together say the same ---------------------------------------- */

#define BLOCK_BYTES 16u
#define BLOCKS_OF(mask_and_size) ((mask_and_size) & 0xffff)

/* SanitizerCallbackBulkCopyGlobalToShared, of SANITIZER_INSTRUCTION_BULK_COPY_GLOBAL_TO_SHARED. */
CK_PATCH ck_bulk_load(ck_u64 userdata, ck_u64 pc, ck_u64 source, ck_u32 destination, ck_u32 barrier,
                      ck_u32 mask_and_size, ck_u32 is_multicast)
{
    (void)pc, (void)destination, (void)barrier, (void)is_multicast;
    if (leads(all_here()))
        record(userdata, CK_READ, ALL, source, BLOCKS_OF(mask_and_size) * BLOCK_BYTES);
    return 0;
}

/* SanitizerCallbackBulkCopySharedToGlobal, of SANITIZER_INSTRUCTION_BULK_COPY_SHARED_TO_GLOBAL: the mask has
 * a bit for each byte of a block. */
CK_PATCH ck_bulk_store(ck_u64 userdata, ck_u64 pc, ck_u64 destination, ck_u32 source, ck_u32 mask_and_size,
                       ck_u32 has_mask)
{
    (void)pc, (void)source;
    const ck_u32 mask = mask_and_size >> 16;
    if (leads(all_here()))
        record(userdata, CK_WRITE, has_mask ? mask | mask << 16 : ALL, destination,
               BLOCKS_OF(mask_and_size) * BLOCK_BYTES);
    return 0;
}

/* SanitizerCallbackBulkReductionSharedToGlobal, of SANITIZER_INSTRUCTION_BULK_REDUCTION_SHARED_TO_GLOBAL. */
CK_PATCH ck_bulk_reduction(ck_u64 userdata, ck_u64 pc, ck_u64 destination, ck_u32 source, ck_u32 blocks)
{
    (void)pc, (void)source;
    if (leads(all_here()))
        record(userdata, CK_ATOMIC, ALL, destination, blocks * BLOCK_BYTES);
    return 0;
}

/* --- tensor maps -------------------------------------------------------------------------------------- */

CK_INLINE ck_u64 mixed(ck_u64 hash, ck_u64 value)
{
    hash = (hash ^ value) * 0xD6E8FEB86659FD93ull;
    return hash ^ hash >> 32;
}

/* The place of a key in a table of 2^n, or the number of places if it has none and all that were tried are
 * taken. ``is_new``: it got the place now, and the caller has to write down what it is the key of. */
CK_INLINE ck_u32 place_of(ck_u64 keys, ck_u32 places, ck_u64 key, bool *is_new)
{
    const ck_u32 step = (ck_u32)(key >> 44) | 1;
    ck_u32 place = (ck_u32)(key >> 20);
    *is_new = false;
    for (ck_u32 tries = 0; tries < MAX_PROBES; tries++, place += step) {
        const ck_u64 at = keys + (place & (places - 1)) * sizeof(ck_u64);
        ck_u64 there = load64(at);
        if (!there) {
            there = atomic_swap_free(at, key);
            *is_new = !there;
        }
        if (!there || there == key)
            return place & (places - 1);
    }
    return places;
}

CK_INLINE ck_u64 part(ck_u64 userdata, ck_u64 offset)
{
    return CK_BASE_OF(userdata) + offset;
}

CK_INLINE void write_map(ck_u64 userdata, ck_u64 map, ck_u32 place)
{
    const ck_u32 number = atomic_add(CK_BASE_OF(userdata) + AT(ck_header, maps), 1);
    const ck_u64 at = part(userdata, CK_MAPS_AT(CK_ENTRIES_LOG2_OF(userdata))) + number * sizeof(ck_map);
    if (number >= CK_MAX_MAPS)
        return;
    for (int i = 0; i < CK_MAP_WORDS; i++)
        store64(at + AT(ck_map, content) + i * 8, load64(map + i * 8));
    store(at + AT(ck_map, place), place);
}

/* The place of what a tensor map holds, whoever uses it. One that has a place and is not written down, for
 * want of room, is missed by who reads the boxes. */
CK_INLINE ck_u32 place_of_map(ck_u64 userdata, ck_u64 map)
{
    ck_u64 hash = 0;
    for (int i = 0; i < CK_MAP_WORDS; i++)
        hash = mixed(hash, load64(map + i * 8));
    bool is_new;
    const ck_u64 keys = part(userdata, CK_MAP_KEYS_AT(CK_ENTRIES_LOG2_OF(userdata)));
    const ck_u32 place = place_of(keys, CK_MAP_KEYS, hash | 1, &is_new);
    if (is_new)
        write_map(userdata, map, place);
    return place < CK_MAP_KEYS ? place : CK_NO_MAP;
}

CK_INLINE void write_box(ck_u64 userdata, ck_u32 map_and_mode, const ck_u32 *word, ck_u32 words)
{
    const ck_u32 number = atomic_add(CK_BASE_OF(userdata) + AT(ck_header, boxes), 1);
    const ck_u64 at = part(userdata, CK_BOXES_AT(CK_ENTRIES_LOG2_OF(userdata))) + number * sizeof(ck_box);
    if (number >= CK_MAX_BOXES) {
        lose(userdata);
        return;
    }
    store(at + AT(ck_box, launch), CK_LAUNCH_OF(userdata));
    store(at + AT(ck_box, map), map_and_mode);
    for (ck_u32 i = 0; i < 12; i++)
        store(at + AT(ck_box, word) + i * 4, i < words ? word[i] : 0);
}

/* Write a use of a map down once: the words from ``first`` on tell uses apart, those before say where in
 * shared memory the box is. */
CK_INLINE void record_box(ck_u64 userdata, ck_u32 mode, ck_u64 map, const ck_u32 *word, ck_u32 words,
                          ck_u32 first)
{
    if (!has_arena(userdata))
        return;
    userdata = own(userdata);
    if (is_lost(userdata))
        return;
    const ck_u32 map_and_mode = place_of_map(userdata, map) | mode << 16;
    ck_u64 hash = mixed((ck_u64)CK_LAUNCH_OF(userdata) << 32 | map_and_mode, words);
    for (ck_u32 i = first; i < words; i++)
        hash = mixed(hash, word[i]);
    bool is_new;
    const ck_u64 keys = part(userdata, CK_BOX_KEYS_AT(CK_ENTRIES_LOG2_OF(userdata)));
    if (place_of(keys, CK_BOX_KEYS, hash | 1, &is_new) == CK_BOX_KEYS)
        lose(userdata);
    if (is_new)
        write_box(userdata, map_and_mode, word, words);
}

/* SanitizerCallbackTensorMemoryLoad, of SANITIZER_INSTRUCTION_TMA_LOAD. */
CK_PATCH ck_tensor_load(ck_u64 userdata, ck_u64 pc, ck_u64 map, ck_u32 destination, ck_u32 barrier,
                        ck_u32 coord0, ck_u32 coord1, ck_u32 coord2, ck_u32 coord3, ck_u32 coord4, ck_u32 dim,
                        ck_u32 is_multicast, ck_u32 mask_and_offsets, ck_u32 load_mode)
{
    (void)pc;
    const ck_u32 word[] = {destination, barrier, coord0,       coord1,           coord2,   coord3,
                           coord4,      dim,     is_multicast, mask_and_offsets, load_mode};
    if (leads(all_here()))
        record_box(userdata, CK_READ, map, word, 11, 2);
    return 0;
}

/* SANITIZER_INSTRUCTION_TMA_STORE. Its type, SanitizerCallbackTensorMemoryStore, is named by the header but
 * not declared (13.5.25), so the words behind the map are written down as they come. */
CK_PATCH ck_tensor_store(ck_u64 userdata, ck_u64 pc, ck_u64 map, ck_u32 w0, ck_u32 w1, ck_u32 w2, ck_u32 w3,
                         ck_u32 w4, ck_u32 w5, ck_u32 w6, ck_u32 w7)
{
    (void)pc;
    const ck_u32 word[] = {w0, w1, w2, w3, w4, w5, w6, w7};
    if (leads(all_here()))
        record_box(userdata, CK_WRITE, map, word, 8, 1);
    return 0;
}
