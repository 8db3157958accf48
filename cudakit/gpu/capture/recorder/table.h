/* A hash map of 64-bit keys to 32-bit numbers: open addressing, linear probing. Key 0 is not allowed. */
#ifndef CK_TABLE_H
#define CK_TABLE_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    uint64_t *keys;
    uint32_t *values;
    size_t slots, used; /* slots: a power of two; used includes slots of removed keys */
} table;

/* Return the number of a key, or 0 if the key is absent. */
uint32_t table_get(const table *map, uint64_t key);

/* Set the number of a key; return -1 if out of memory. */
int table_put(table *map, uint64_t key, uint32_t value);

/* Remove a key and return the number that it had. */
uint32_t table_remove(table *map, uint64_t key);

/* Remove all keys. */
void table_clear(table *map);

#endif
