#include "tree.h"

#include <string.h>

int64_t decode_signed(const uint8_t *bytes, uint64_t size)
{
    uint64_t number = size && bytes[size - 1] & 0x80 ? UINT64_MAX : 0;
    for (uint64_t i = size; i--;)
        number = number << 8 | bytes[i];
    return (int64_t)number;
}

uint32_t find_blob(const Tree *tree, const void *bytes, uint64_t size, uint32_t hash)
{
    uint64_t position = hash;
    for (uint32_t i; (i = table_next(&tree->blob_table, hash, &position)) != NOT_FOUND;) {
        Span existing_span = blob_at(tree, i);
        if (existing_span.size == size && !memcmp(bytes_of(tree, existing_span), bytes, size))
            return i;
    }
    return NOT_FOUND;
}

uint32_t intern_blob(Tree *tree, Span span)
{
    const uint8_t *bytes = bytes_of(tree, span);
    uint32_t hash = hash_bytes(tree->hash_key, bytes, span.size);
    uint32_t existing_index = find_blob(tree, bytes, span.size, hash);
    if (existing_index != NOT_FOUND)
        return existing_index;
    if (!reserve(&tree->blobs, 1, sizeof(Span)) || !table_add(&tree->blob_table, hash, tree->blobs.used))
        return NOT_FOUND;
    ITEMS(Span, tree->blobs)[tree->blobs.used] = span;
    return (uint32_t)tree->blobs.used++;
}

bool store_converted(Tree *tree, const void *bytes, uint64_t size, Span *span)
{
    /* One more byte, so that an empty text has an address too: memcmp must not get NULL. */
    if (!reserve(&tree->converted, size + 1, 1))
        return false;
    *span = (Span){tree->converted.used | IN_CONVERTED, size};
    if (size)
        memcpy(ITEMS(uint8_t, tree->converted) + tree->converted.used, bytes, size);
    tree->converted.used += size;
    return true;
}

uint32_t shape_with_key(Tree *tree, uint32_t parent, uint32_t key)
{
    Shape *parent_shape = shape_at(tree, parent), *last_child = shape_at(tree, parent_shape->last_child);
    if (parent_shape->last_child && last_child->key == key)
        return parent_shape->last_child;
    uint32_t pair[2] = {parent, key}, hash = hash_bytes(tree->hash_key, pair, sizeof pair);
    uint64_t position = hash;
    for (uint32_t i; (i = table_next(&tree->shape_table, hash, &position)) != NOT_FOUND;)
        if (shape_at(tree, i)->parent == parent && shape_at(tree, i)->key == key)
            return parent_shape->last_child = i;
    if (!reserve(&tree->shapes, 1, sizeof(Shape)) || !table_add(&tree->shape_table, hash, tree->shapes.used))
        return NOT_FOUND;
    uint32_t new_index = (uint32_t)tree->shapes.used++;
    *shape_at(tree, new_index) = (Shape){parent, key, shape_at(tree, parent)->length + 1, 0};
    return shape_at(tree, parent)->last_child = new_index;
}

/* Takes items from the current chunk, or starts a new chunk and abandons the rest of the old one. */
static Value *allocate_items(Tree *tree, uint64_t count)
{
    if (count > tree->free_count) {
        uint64_t size = count > CHUNK_ITEMS ? count : CHUNK_ITEMS;
        Chunk *chunk = PyMem_RawMalloc(sizeof(Chunk) + size * sizeof(Value));
        if (!chunk)
            return NULL;
        chunk->next = tree->chunks;
        tree->chunks = chunk;
        tree->chunk_bytes += size * sizeof(Value);
        tree->free_items = chunk->items;
        tree->free_count = size;
    }
    Value *items = tree->free_items;
    tree->free_items += count;
    tree->free_count -= count;
    return items;
}

/* The first batch gets exactly its size, because most containers are filled by one opcode. After
 * that the capacity doubles. */
bool grow_items(Tree *tree, Value **items, uint32_t *capacity, uint32_t length, uint64_t extra)
{
    uint64_t needed_capacity = length + extra, new_capacity = 2 * (uint64_t)*capacity;
    if (needed_capacity <= *capacity)
        return true;
    if (new_capacity < needed_capacity)
        new_capacity = needed_capacity;
    Value *new_items = new_capacity < NOT_FOUND ? allocate_items(tree, new_capacity) : NULL;
    if (!new_items)
        return false;
    if (length)
        memcpy(new_items, *items, length * sizeof(Value));
    *items = new_items;
    *capacity = (uint32_t)new_capacity;
    return true;
}

uint64_t tree_bytes(const Tree *tree)
{
    uint64_t array_bytes = tree->blobs.capacity * sizeof(Span) + tree->converted.capacity +
                           tree->lists.capacity * sizeof(List) + tree->dicts.capacity * sizeof(Dict) +
                           tree->shapes.capacity * sizeof(Shape);
    return array_bytes + (tree->blob_table.size + tree->shape_table.size) * sizeof(uint64_t) + tree->chunk_bytes;
}

void tree_free(Tree *tree)
{
    for (Chunk *chunk = tree->chunks, *next; chunk; chunk = next) {
        next = chunk->next;
        PyMem_RawFree(chunk);
    }
    PyMem_RawFree(tree->blobs.data);
    PyMem_RawFree(tree->converted.data);
    PyMem_RawFree(tree->lists.data);
    PyMem_RawFree(tree->dicts.data);
    PyMem_RawFree(tree->shapes.data);
    PyMem_RawFree(tree->blob_table.slots);
    PyMem_RawFree(tree->shape_table.slots);
}
