/* Device code: the user data of launches, and the hash table that finds the page of an access or claims a new page. */
#ifndef CK_PAGE_TABLE_H
#define CK_PAGE_TABLE_H

#include "arena.h"

/* Replacement of offsetof, which NVRTC 13.0 does not define without headers. */
#define OFFSET_OF(type, field) ((ck_u64) & ((type *)0)->field)

/* State of a thread that searches for a page. It is in local memory and reloaded where it is used: in registers, its
 * fields would stay live during the whole search and exceed the available registers. */
typedef struct {
    ck_u64 userdata, key, address;
    ck_u32 bytes, retry_budget;
} page_search;

#define MAX_PROBES 63u
/* Limit of retries while another thread writes an entry, which takes that thread only a few instructions. */
#define PROBE_COST (1u << 20)
#define RETRY_BUDGET (MAX_PROBES * PROBE_COST)

/* Return whether the launch has an arena. Arenas lie above the first 4 GiB, so the upper half suffices. */
CK_INLINE bool has_arena(ck_u64 userdata)
{
    return make_opaque((ck_u32)(userdata >> 32));
}

/* Return the user data with the launch index of this kernel. The kernels of a graph receive the same user data. */
CK_INLINE ck_u64 launch_user_data(ck_u64 userdata)
{
    return userdata & CK_BY_GRID ? CK_USERDATA_OF_GRID(userdata, grid_id()) : userdata;
}

/* Return the address of the word that has the lost bit of a launch. */
CK_INLINE ck_u64 lost_word(ck_u64 userdata)
{
    return CK_BASE_OF(userdata) + CK_LOST_OFFSET + CK_LAUNCH_OF(userdata) / 32 * 4;
}

CK_INLINE bool launch_is_lost(ck_u64 userdata)
{
    return load(lost_word(userdata)) >> (CK_LAUNCH_OF(userdata) & 31) & 1;
}

/* Set the lost bit of the launch, which marks its accesses as incomplete, and count the launch once. */
CK_INLINE void mark_launch_lost(ck_u64 userdata)
{
    const ck_u32 bit = 1u << (CK_LAUNCH_OF(userdata) & 31);
    if (load_coherent(lost_word(userdata)) & bit)
        return;
    if (!(atomic_or(lost_word(userdata), bit) & bit))
        atomic_add(CK_BASE_OF(userdata) + OFFSET_OF(ck_header, lost_launches), 1);
}

/* --- pages ----------------------------------------------------------------------------------------- */

/* Adjacent pages have adjacent entries, eight per cache line. The entries of other launches, modes and levels begin
 * at other slots; the entries of other modes begin a third of the table away, for any table size. The steps are
 * multiples of a cache line. */
#define SLOT_STEP_OF_LAUNCH 0x9E3779B8u /* 2^32 divided by the golden ratio (Fibonacci hashing) */
#define SLOT_STEP_OF_MODE 0x555550u  /* 2^24 / 3, which is a third or two thirds of 2^n modulo any smaller 2^n */
#define SLOT_STEP_OF_LEVEL 0x199998u /* 2^24 / 10, which is far from the multiples of a third */

CK_INLINE ck_u32 slot_of_page(ck_u32 launch, ck_u32 mode, ck_u32 level, ck_u32 page)
{
    return page + launch * SLOT_STEP_OF_LAUNCH + mode * SLOT_STEP_OF_MODE + level * SLOT_STEP_OF_LEVEL;
}

CK_INLINE ck_u32 first_probe(ck_u64 key)
{
    return slot_of_page(CK_KEY_LAUNCH(key), CK_KEY_MODE(key), CK_KEY_LEVEL(key), (ck_u32)key);
}

/* The probe step depends on the launch and the mode only. If two sequences of adjacent pages collide, all entries of
 * one sequence move by the same distance and stay adjacent. The step is odd, so that probing reaches every slot. */
CK_INLINE ck_u32 next_probe(ck_u32 probe, ck_u64 key)
{
    return probe + (((ck_u32)(key >> 32) * 0x85EBCA6Bu) >> 8 | 1);
}

CK_INLINE ck_u64 entry_address(ck_u64 userdata, ck_u32 probe)
{
    const ck_u32 index = probe & wrapping_mask(0, (ck_u32)userdata >> CK_LAUNCH_BITS);
    return CK_BASE_OF(userdata) + CK_ENTRIES_OFFSET + (ck_u64)index * sizeof(ck_entry);
}

/* Return the address of the bitmap of a key, found through the L1 cache; 0 or CK_NO_PAGE if the key has no bitmap. */
CK_INLINE ck_u64 find_bitmap(ck_u64 userdata, ck_u64 key)
{
    ck_u32 probe = first_probe(key);
#pragma unroll 1
    for (ck_u32 probes = 0; probes < MAX_PROBES; probes++, probe = next_probe(probe, key)) {
        const ck_entry entry = load_entry(entry_address(userdata, probe));
        if (entry.key == key)
            return entry.bitmap;
        if (!entry.key)
            return 0;
    }
    return 0;
}

/* Take the next free page, and return the address of its bitmap, or CK_NO_PAGE if no page is left. */
CK_INLINE ck_u64 claim_page(const page_search *search)
{
    const ck_u64 header = CK_BASE_OF(reload(search)->userdata);
    const ck_u32 index = atomic_add(header + OFFSET_OF(ck_header, requested_pages), 1);
    if (index >= load(header + OFFSET_OF(ck_header, page_capacity)))
        return CK_NO_PAGE;
    const ck_u32 page = load(header + OFFSET_OF(ck_header, pages_offset)) + index * (ck_u32)sizeof(ck_page);
    store64(header + page, reload(search)->key);
    /* The address is computed again, so that no register holds it across the calls above. */
    const ck_u64 same_header = CK_BASE_OF(reload(search)->userdata);
    return same_header + load(same_header + OFFSET_OF(ck_header, chunks_offset)) +
           (ck_u64)CK_SLOT_OF_PAGE(index) * CK_BITMAP_BYTES;
}

/* Subtract a cost from the retry budget. Return true if the budget is used up. */
CK_INLINE bool spend_retry_budget(page_search *search, ck_u32 cost)
{
    const ck_u32 budget = reload(search)->retry_budget;
    search->retry_budget = budget - cost;
    return budget <= cost;
}

/* Return the address of the bitmap of a key, claiming a page if the key is new. Return CK_NO_PAGE if no page is left,
 * or the retry budget is used up.
 *
 * If several lanes reach a free entry together, one of them claims the entry, and then all of them look it up again.
 * Otherwise the claiming lane would continue alone, and the warp would no longer set whole words at once, which the
 * summary needs. A lane that finds its key without a page retries, for a short time only: the thread that assigns the
 * page never waits. Once a launch is lost, it stops probing, because a full table would slow down every access. */
CK_INLINE ck_u64 find_or_claim_page(page_search *search)
{
    ck_u32 probe = first_probe(reload(search)->key);
#pragma unroll 1
    for (;;) {
        const ck_u64 entry = entry_address(reload(search)->userdata, probe);
        const ck_entry stored_entry = load_entry_coherent(entry);
        if (stored_entry.key == reload(search)->key) {
            if (stored_entry.bitmap)
                return stored_entry.bitmap;
            if (spend_retry_budget(search, 1))
                break;
        } else if (stored_entry.key) {
            if (launch_is_lost(reload(search)->userdata) || spend_retry_budget(search, PROBE_COST))
                break;
            probe = next_probe(probe, reload(search)->key);
        } else if (is_leader(active_lanes()) && !atomic_claim(entry, reload(search)->key)) {
            store64(entry + OFFSET_OF(ck_entry, bitmap), claim_page(search));
        }
    }
    return CK_NO_PAGE;
}

#endif
