/* A map of 64-bit keys to 32-bit numbers: open addressing, linear probing. Key 0 is never put in. */
#ifndef CK_TABLE_H
#define CK_TABLE_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    uint64_t *keys;
    uint32_t *values;
    size_t slots, used; /* a power of two; taken, also by what was removed */
} table;

/* Return the number of a key, 0 where there is none. */
uint32_t table_get(const table *map, uint64_t key);

/* Give a key its number; -1 where memory is out. */
int table_put(table *map, uint64_t key, uint32_t value);

/* Forget a key, and return the number that it had. */
uint32_t table_remove(table *map, uint64_t key);

/* Forget every key. */
void table_clear(table *map);

#endif
