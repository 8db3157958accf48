#include "containers.h"

#include <stdlib.h>
#include <string.h>

void *array_reserve(void *items, size_t *capacity, size_t count, size_t item_bytes, size_t first_capacity)
{
    if (count <= *capacity)
        return items;
    size_t new_capacity = *capacity ? *capacity : first_capacity;
    while (new_capacity < count)
        new_capacity *= 2;
    void *resized_items = realloc(items, new_capacity * item_bytes);
    if (resized_items)
        *capacity = new_capacity;
    return resized_items;
}

/* --- hash table ------------------------------------------------------------------------------- */

#define MIN_SLOT_COUNT 16

/* Return the slot of a key, or the free slot where the key would be inserted. */
static hash_slot *find_slot(const hash_table *table, uint64_t key)
{
    /* Fibonacci hashing, without the lowest bits: keys are often addresses, which differ in their middle bits. */
    size_t slot = (size_t)((key * 0x9E3779B97F4A7C15ull) >> 20) & (table->slot_count - 1);
    while (table->slots[slot].key && table->slots[slot].key != key)
        slot = (slot + 1) & (table->slot_count - 1);
    return table->slots + slot;
}

uint32_t hash_table_get(const hash_table *table, uint64_t key)
{
    return table->slot_count ? find_slot(table, key)->value : 0;
}

static size_t count_keys(const hash_table *table)
{
    size_t key_count = 0;
    for (size_t i = 0; i < table->slot_count; i++)
        key_count += table->slots[i].value != 0;
    return key_count;
}

/* Free the slots of removed keys, and double the number of slots if many keys remain. Return 0, or -1 if no memory is
 * left. */
static int make_free_slots(hash_table *table)
{
    hash_table new_table = {NULL, MIN_SLOT_COUNT, 0};
    if (table->slot_count)
        new_table.slot_count =
            4 * count_keys(table) > table->slot_count ? 2 * table->slot_count : table->slot_count;
    new_table.slots = calloc(new_table.slot_count, sizeof *new_table.slots);
    if (!new_table.slots)
        return -1;
    for (size_t i = 0; i < table->slot_count; i++)
        if (table->slots[i].value) {
            *find_slot(&new_table, table->slots[i].key) = table->slots[i];
            new_table.used_slot_count++;
        }
    free(table->slots);
    *table = new_table;
    return 0;
}

int hash_table_put(hash_table *table, uint64_t key, uint32_t value)
{
    if (2 * (table->used_slot_count + 1) > table->slot_count && make_free_slots(table))
        return -1;
    hash_slot *slot = find_slot(table, key);
    table->used_slot_count += slot->key == 0;
    *slot = (hash_slot){key, value};
    return 0;
}

uint32_t hash_table_remove(hash_table *table, uint64_t key)
{
    if (!table->slot_count)
        return 0;
    hash_slot *slot = find_slot(table, key);
    const uint32_t value = slot->value;
    slot->value = 0; /* the key stays, so that keys that were inserted behind this slot are still found */
    return value;
}

void hash_table_clear(hash_table *table)
{
    free(table->slots);
    *table = (hash_table){0};
}
