/* Device code: records the uses of tensor maps (boxes). Each map and each box is written once. */
#ifndef CK_TENSOR_BOXES_H
#define CK_TENSOR_BOXES_H

#include "page_table.h"

CK_INLINE ck_u64 hash_mix(ck_u64 hash, ck_u64 value)
{
    hash = (hash ^ value) * 0xD6E8FEB86659FD93ull;
    return hash ^ hash >> 32;
}

/* Return the slot of a key in a hash table of 2^n slots, or the number of slots if all probed slots are taken. Set
 * ``is_new`` if this call has claimed the slot; the caller must then write the map or box of the key. */
CK_INLINE ck_u32 claim_slot(ck_u64 keys, ck_u32 slots, ck_u64 key, bool *is_new)
{
    const ck_u32 probe_step = (ck_u32)(key >> 44) | 1;
    ck_u32 slot = (ck_u32)(key >> 20);
    *is_new = false;
    for (ck_u32 probes = 0; probes < MAX_PROBES; probes++, slot += probe_step) {
        const ck_u64 address = keys + (slot & (slots - 1)) * sizeof(ck_u64);
        ck_u64 stored_key = load64(address);
        if (!stored_key) {
            stored_key = atomic_claim(address, key);
            *is_new = !stored_key;
        }
        if (!stored_key || stored_key == key)
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
    const ck_u32 index = atomic_add(CK_BASE_OF(userdata) + OFFSET_OF(ck_header, requested_maps), 1);
    const ck_u64 address =
        arena_address(userdata, CK_MAPS_OFFSET(CK_ENTRIES_LOG2_OF(userdata))) + index * sizeof(ck_map);
    if (index >= CK_MAX_MAPS)
        return;
    for (int i = 0; i < CK_MAP_WORDS; i++)
        store64(address + OFFSET_OF(ck_map, content) + i * 8, load64(map + i * 8));
    store(address + OFFSET_OF(ck_map, slot), slot);
}

/* Return the slot of the key of a tensor map, which is a hash of its content; a new map is written to the arena. If no
 * space is left, the map has a slot but is not written: the host then treats its boxes as unknown. */
CK_INLINE ck_u32 slot_of_map(ck_u64 userdata, ck_u64 map)
{
    ck_u64 hash = 0;
    for (int i = 0; i < CK_MAP_WORDS; i++)
        hash = hash_mix(hash, load64(map + i * 8));
    bool is_new;
    const ck_u64 keys = arena_address(userdata, CK_MAP_KEYS_OFFSET(CK_ENTRIES_LOG2_OF(userdata)));
    const ck_u32 slot = claim_slot(keys, CK_MAP_KEYS, hash | 1, &is_new);
    if (is_new)
        write_map(userdata, map, slot);
    return slot < CK_MAP_KEYS ? slot : CK_NO_MAP;
}

CK_INLINE void write_box(ck_u64 userdata, ck_u32 map_and_mode, const ck_u32 *word, ck_u32 words)
{
    const ck_u32 index = atomic_add(CK_BASE_OF(userdata) + OFFSET_OF(ck_header, requested_boxes), 1);
    const ck_u64 address =
        arena_address(userdata, CK_BOXES_OFFSET(CK_ENTRIES_LOG2_OF(userdata))) + index * sizeof(ck_box);
    if (index >= CK_MAX_BOXES) {
        mark_launch_lost(userdata);
        return;
    }
    store(address + OFFSET_OF(ck_box, launch), CK_LAUNCH_OF(userdata));
    store(address + OFFSET_OF(ck_box, map), map_and_mode);
    for (ck_u32 i = 0; i < 12; i++)
        store(address + OFFSET_OF(ck_box, word) + i * 4, i < words ? word[i] : 0);
}

/* Record a use of a tensor map, unless it is already recorded. Two uses are the same if their words from
 * ``first_distinguishing_word`` on are the same; the earlier words are addresses in shared memory. */
CK_INLINE void record_box(ck_u64 userdata, ck_u32 mode, ck_u64 map, const ck_u32 *word, ck_u32 words,
                          ck_u32 first_distinguishing_word)
{
    if (!has_arena(userdata))
        return;
    userdata = launch_user_data(userdata);
    if (launch_is_lost(userdata))
        return;
    const ck_u32 map_and_mode = slot_of_map(userdata, map) | mode << 16;
    ck_u64 hash = hash_mix((ck_u64)CK_LAUNCH_OF(userdata) << 32 | map_and_mode, words);
    for (ck_u32 i = first_distinguishing_word; i < words; i++)
        hash = hash_mix(hash, word[i]);
    bool is_new;
    const ck_u64 keys = arena_address(userdata, CK_BOX_KEYS_OFFSET(CK_ENTRIES_LOG2_OF(userdata)));
    if (claim_slot(keys, CK_BOX_KEYS, hash | 1, &is_new) == CK_BOX_KEYS)
        mark_launch_lost(userdata);
    if (is_new)
        write_box(userdata, map_and_mode, word, words);
}

#endif
