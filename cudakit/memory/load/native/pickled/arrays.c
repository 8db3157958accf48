#include "arrays.h"

#include <string.h>

bool grow(Vector *vector, uint64_t needed, size_t item_bytes)
{
    uint64_t capacity = vector->capacity + vector->capacity / 2;
    if (capacity < needed)
        capacity = needed + 15;
    void *data = NULL;
    if (capacity <= PTRDIFF_MAX / item_bytes)
        data = PyMem_RawRealloc(vector->data, capacity * item_bytes);
    if (!data)
        return false;
    vector->data = data;
    vector->capacity = capacity;
    return true;
}

static inline uint64_t rotate_left(uint64_t word, int bits)
{
    return word << bits | word >> (64 - bits);
}

static inline void sip_round(uint64_t v[4])
{
    v[0] += v[1], v[1] = rotate_left(v[1], 13) ^ v[0], v[0] = rotate_left(v[0], 32);
    v[2] += v[3], v[3] = rotate_left(v[3], 16) ^ v[2];
    v[0] += v[3], v[3] = rotate_left(v[3], 21) ^ v[0];
    v[2] += v[1], v[1] = rotate_left(v[1], 17) ^ v[2], v[2] = rotate_left(v[2], 32);
}

uint32_t hash_bytes(const uint64_t key[2], const void *data, uint64_t size)
{
    uint64_t v[4] = {key[0] ^ 0x736f6d6570736575, key[1] ^ 0x646f72616e646f6d, key[0] ^ 0x6c7967656e657261,
                     key[1] ^ 0x7465646279746573};
    const uint8_t *bytes = data;
    uint64_t bytes_left = size, word;
    for (; bytes_left >= 8; bytes_left -= 8, bytes += 8) {
        memcpy(&word, bytes, 8);
        v[3] ^= word;
        sip_round(v);
        v[0] ^= word;
    }
    word = size << 56;
    for (uint64_t i = 0; i < bytes_left; i++)
        word |= (uint64_t)bytes[i] << (8 * i);
    v[3] ^= word;
    sip_round(v);
    v[0] ^= word;
    v[2] ^= 0xff;
    sip_round(v), sip_round(v), sip_round(v);
    return (uint32_t)(v[0] ^ v[1] ^ v[2] ^ v[3]);
}

static void table_place(Table *table, uint64_t slot)
{
    uint64_t position = slot >> 32;
    while (table->slots[position & (table->size - 1)])
        position++;
    table->slots[position & (table->size - 1)] = slot;
}

static bool table_grow(Table *table)
{
    Table larger_table = {NULL, table->size ? table->size * 2 : 64, table->used};
    larger_table.slots = PyMem_RawCalloc(larger_table.size, sizeof(uint64_t));
    if (!larger_table.slots)
        return false;
    for (uint64_t i = 0; i < table->size; i++)
        if (table->slots[i])
            table_place(&larger_table, table->slots[i]);
    PyMem_RawFree(table->slots);
    *table = larger_table;
    return true;
}

bool table_add(Table *table, uint32_t hash, uint64_t index)
{
    if (index >= NOT_FOUND - 1 || (table->used * 3 >= table->size * 2 && !table_grow(table)))
        return false;
    table_place(table, (uint64_t)hash << 32 | (index + 1));
    table->used++;
    return true;
}
