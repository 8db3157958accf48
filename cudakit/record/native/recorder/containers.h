/* Growing arrays, a hash table from 64-bit keys to 32-bit numbers, and a hash function. */
#ifndef CK_CONTAINERS_H
#define CK_CONTAINERS_H

#include <stddef.h>
#include <stdint.h>

/* Return an array with space for ``count`` items, and update its capacity. Return NULL if no memory is left; the array
 * is then unchanged. The new capacity is the old one, or ``first_capacity``, doubled until it suffices. */
void *array_reserve(void *items, size_t *capacity, size_t count, size_t item_bytes, size_t first_capacity);

/* A hash table from 64-bit keys to 32-bit numbers, with linear probing. Key 0 and value 0 mean "no entry". */
typedef struct {
    uint64_t key;
    uint32_t value; /* 0: the key was removed */
} hash_slot;

typedef struct {
    hash_slot *slots;
    size_t slot_count,
        used_slot_count; /* slot_count is a power of two; used_slot_count includes slots of removed keys */
} hash_table;

/* Return the value of a key, or 0 if the key is absent. */
uint32_t hash_table_get(const hash_table *table, uint64_t key);

/* Set the value of a key. Return 0, or -1 if no memory is left. */
int hash_table_put(hash_table *table, uint64_t key, uint32_t value);

/* Remove a key and return its value, or 0 if the key is absent. */
uint32_t hash_table_remove(hash_table *table, uint64_t key);

/* Remove all keys. */
void hash_table_clear(hash_table *table);

/* Return a hash of the hashed values so far and one more value. */
static inline uint64_t mix_hash(uint64_t hash, uint64_t value)
{
    hash = (hash ^ value) * 0x9E3779B97F4A7C15ull;
    return hash ^ hash >> 32;
}

#endif
