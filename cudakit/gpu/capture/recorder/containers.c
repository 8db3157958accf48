#include "containers.h"

#include <stdlib.h>
#include <string.h>

void *array_reserve(void *items, size_t *capacity, size_t count, size_t item_bytes, size_t first_capacity)
{
    if (count <= *capacity)
        return items;
    size_t larger = *capacity ? *capacity : first_capacity;
    while (larger < count)
        larger *= 2;
    void *resized_items = realloc(items, larger * item_bytes);
    if (resized_items)
        *capacity = larger;
    return resized_items;
}

/* --- hash table ------------------------------------------------------------------------------- */

#define MIN_SLOT_COUNT 256

/* Return the slot of a key, or the free slot where the key would be inserted. */
static size_t find_slot(const hash_table *table, uint64_t key)
{
    /* Fibonacci hashing, without the lowest bits: keys are often addresses, which differ in their middle bits. */
    size_t slot = (size_t)((key * 0x9E3779B97F4A7C15ull) >> 20) & (table->slot_count - 1);
    while (table->keys[slot] && table->keys[slot] != key)
        slot = (slot + 1) & (table->slot_count - 1);
    return slot;
}

uint32_t hash_table_get(const hash_table *table, uint64_t key)
{
    return table->slot_count ? table->values[find_slot(table, key)] : 0;
}

/* Double the number of slots. Return 0, or -1 if no memory is left. */
static int grow(hash_table *table)
{
    hash_table larger = {NULL, NULL, table->slot_count ? table->slot_count * 2 : MIN_SLOT_COUNT, 0};
    larger.keys = calloc(larger.slot_count, sizeof *larger.keys);
    larger.values = calloc(larger.slot_count, sizeof *larger.values);
    if (!larger.keys || !larger.values) {
        free(larger.keys);
        free(larger.values);
        return -1;
    }
    for (size_t i = 0; i < table->slot_count; i++) {
        if (table->keys[i] && table->values[i]) { /* skip removed keys */
            size_t slot = find_slot(&larger, table->keys[i]);
            larger.keys[slot] = table->keys[i];
            larger.values[slot] = table->values[i];
            larger.used_slots++;
        }
    }
    free(table->keys);
    free(table->values);
    *table = larger;
    return 0;
}

int hash_table_put(hash_table *table, uint64_t key, uint32_t value)
{
    if (2 * (table->used_slots + 1) > table->slot_count && grow(table))
        return -1;
    size_t slot = find_slot(table, key);
    table->used_slots += table->keys[slot] == 0;
    table->keys[slot] = key;
    table->values[slot] = value;
    return 0;
}

uint32_t hash_table_remove(hash_table *table, uint64_t key)
{
    if (!table->slot_count)
        return 0;
    size_t slot = find_slot(table, key);
    uint32_t value = table->values[slot];
    table->values[slot] = 0; /* the key stays, so that keys that were inserted behind this slot are still found */
    return value;
}

void hash_table_clear(hash_table *table)
{
    free(table->keys);
    free(table->values);
    memset(table, 0, sizeof *table);
}
