#include "containers.h"

#include <stdlib.h>
#include <string.h>

void *array_reserve(void *items, size_t *capacity, size_t count, size_t item_bytes, size_t first)
{
    if (count <= *capacity)
        return items;
    size_t larger = *capacity ? *capacity : first;
    while (larger < count)
        larger *= 2;
    void *moved = realloc(items, larger * item_bytes);
    if (moved)
        *capacity = larger;
    return moved;
}

/* --- hash map --------------------------------------------------------------------------------- */

#define FIRST_SLOTS 256

static size_t slot_of(const table *map, uint64_t key)
{
    /* Fibonacci hashing: addresses differ in their middle bits. */
    size_t slot = (size_t)((key * 0x9E3779B97F4A7C15ull) >> 20) & (map->slots - 1);
    while (map->keys[slot] && map->keys[slot] != key)
        slot = (slot + 1) & (map->slots - 1);
    return slot;
}

uint32_t table_get(const table *map, uint64_t key)
{
    return map->slots ? map->values[slot_of(map, key)] : 0;
}

static int grow(table *map)
{
    table larger = {NULL, NULL, map->slots ? map->slots * 2 : FIRST_SLOTS, 0};
    larger.keys = calloc(larger.slots, sizeof *larger.keys);
    larger.values = calloc(larger.slots, sizeof *larger.values);
    if (!larger.keys || !larger.values) {
        free(larger.keys);
        free(larger.values);
        return -1;
    }
    for (size_t i = 0; i < map->slots; i++) {
        if (map->keys[i] && map->values[i]) { /* skip removed keys */
            size_t slot = slot_of(&larger, map->keys[i]);
            larger.keys[slot] = map->keys[i];
            larger.values[slot] = map->values[i];
            larger.used++;
        }
    }
    free(map->keys);
    free(map->values);
    *map = larger;
    return 0;
}

int table_put(table *map, uint64_t key, uint32_t value)
{
    if (2 * (map->used + 1) > map->slots && grow(map))
        return -1;
    size_t slot = slot_of(map, key);
    map->used += map->keys[slot] == 0;
    map->keys[slot] = key;
    map->values[slot] = value;
    return 0;
}

uint32_t table_remove(table *map, uint64_t key)
{
    if (!map->slots)
        return 0;
    size_t slot = slot_of(map, key);
    uint32_t value = map->values[slot];
    map->values[slot] = 0; /* keep the key, so that keys probed past this slot are still found */
    return value;
}

void table_clear(table *map)
{
    free(map->keys);
    free(map->values);
    memset(map, 0, sizeof *map);
}
