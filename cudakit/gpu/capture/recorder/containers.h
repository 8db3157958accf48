/* Growing arrays, and a hash map of 64-bit keys to 32-bit numbers. */
#ifndef CK_CONTAINERS_H
#define CK_CONTAINERS_H

#include <stddef.h>
#include <stdint.h>

/* Return an array with space for ``count`` items, and update its capacity; NULL if out of memory: then the array is
 * unchanged. Reallocates to the capacity, or ``first``, doubled as often as needed. */
void *array_reserve(void *items, size_t *capacity, size_t count, size_t item_bytes, size_t first_capacity);

/* A hash map: open addressing, linear probing. Key 0 is not allowed. */
typedef struct {
    uint64_t *keys;
    uint32_t *values;
    size_t slot_count, used_slots; /* slots: a power of two; used includes slots of removed keys */
} hash_table;

/* Return the number of a key, or 0 if the key is absent. */
uint32_t hash_table_get(const hash_table *table, uint64_t key);

/* Set the number of a key; return -1 if out of memory. */
int hash_table_put(hash_table *table, uint64_t key, uint32_t value);

/* Remove a key and return the number that it had. */
uint32_t hash_table_remove(hash_table *table, uint64_t key);

/* Remove all keys. */
void hash_table_clear(hash_table *table);

#endif
