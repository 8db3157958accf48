/* Growing arrays, a keyed hash function, and a hash table of indices. tree.h has the overview. */

#ifndef CUDAKIT_READER_ARRAYS_H
#define CUDAKIT_READER_ARRAYS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>

typedef struct {
    void *data;
    uint64_t used, capacity; /* numbers of items */
} Vector;

#define ITEMS(type, vector) ((type *)(vector).data)

/* Makes the capacity at least `needed` items. Returns false if memory runs out. */ bool grow(Vector *vector,
                                                                                              uint64_t needed,
                                                                                              size_t item_bytes);

static inline bool reserve(Vector *vector, uint64_t extra, size_t item_bytes)
{
    uint64_t needed_capacity = vector->used + extra;
    return needed_capacity <= vector->capacity || grow(vector, needed_capacity, item_bytes);
}

static inline bool append_word(Vector *words, uint64_t word)
{
    if (!reserve(words, 1, sizeof word))
        return false;
    ITEMS(uint64_t, *words)[words->used++] = word;
    return true;
}

/* SipHash-1-3 (Aumasson and Bernstein, 2012): collisions cannot be constructed without the key. */
uint32_t hash_bytes(const uint64_t key[2], const void *data, uint64_t size);

/* A hash table of indices into an array of the caller, with open addressing. A slot is the hash
 * (upper half) and the index + 1 (lower half); the number of slots is a power of two. The caller
 * compares the items themselves. */
typedef struct {
    uint64_t *slots;
    uint64_t size, used; /* numbers of slots */
} Table;

#define NOT_FOUND UINT32_MAX

/* Returns the next index with this hash, and NOT_FOUND after the last one. Start with
 * position = hash. */
static inline uint32_t table_next(const Table *table, uint32_t hash, uint64_t *position)
{
    while (table->size) {
        uint64_t slot = table->slots[*position & (table->size - 1)];
        if (!slot)
            break;
        ++*position;
        if (slot >> 32 == hash)
            return (uint32_t)slot - 1;
    }
    return NOT_FOUND;
}

/* Adds an index. Returns false if memory runs out. */ bool table_add(Table *table, uint32_t hash, uint64_t index);

#endif
