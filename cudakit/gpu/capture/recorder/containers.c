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
static int grow_hash_table(hash_table *table)
{
    hash_table new_table = {NULL, NULL, table->slot_count ? table->slot_count * 2 : MIN_SLOT_COUNT, 0};
    new_table.keys = calloc(new_table.slot_count, sizeof *new_table.keys);
    new_table.values = calloc(new_table.slot_count, sizeof *new_table.values);
    if (!new_table.keys || !new_table.values) {
        free(new_table.keys);
        free(new_table.values);
        return -1;
    }
    for (size_t i = 0; i < table->slot_count; i++) {
        if (table->keys[i] && table->values[i]) { /* skip removed keys */
            size_t slot = find_slot(&new_table, table->keys[i]);
            new_table.keys[slot] = table->keys[i];
            new_table.values[slot] = table->values[i];
            new_table.used_slot_count++;
        }
    }
    free(table->keys);
    free(table->values);
    *table = new_table;
    return 0;
}

int hash_table_put(hash_table *table, uint64_t key, uint32_t value)
{
    if (2 * (table->used_slot_count + 1) > table->slot_count && grow_hash_table(table))
        return -1;
    size_t slot = find_slot(table, key);
    table->used_slot_count += table->keys[slot] == 0;
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
