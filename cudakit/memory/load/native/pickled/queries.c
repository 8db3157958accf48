#include "queries.h"

#include <string.h>

bool read_lengths(Query *query)
{
    int64_t *lengths = query->out;
    for (uint64_t i = 0; i < query->count; i++) {
        Value handle = query->handles[i];
        if (handle &&!expect_tag(query, handle, LIST))
            return false;
        lengths[i] = handle ? list_at(query->tree, handle)->length : 0;
    }
    return true;
}

bool gather_items(Query *query)
{
    Value *items = query->out;
    uint64_t item_capacity = query->out_bytes / sizeof(Value);
    for (uint64_t i = 0; i < query->count; i++) {
        Value handle = query->handles[i];
        if (handle &&!expect_tag(query, handle, LIST))
            return false;
        List list = handle ? *list_at(query->tree, handle) : (List){0};
        if (list.length > item_capacity)
            return reject(query, "space", handle);
        if (list.length)
            memcpy(items, list.items, list.length * sizeof(Value));
        items += list.length;
        item_capacity -= list.length;
    }
    return true;
}

/* Returns the position of a key's last value in a shape, plus 1; 0 if the shape lacks the key. */
static uint32_t slot_of(const Tree *tree, uint32_t shape, uint32_t key)
{
    for (; shape; shape = shape_at(tree, shape)->parent)
        if (shape_at(tree, shape)->key == key)
            return shape_at(tree, shape)->length;
    return 0;
}

/* Searches each shape once. The file contains at least one key-value pair per key of each shape, so
 * all searches together are linear in the size of the file. */
bool look_up_key(Query *query)
{
    const Tree *tree = query->tree;
    Value *found_values = query->out;
    uint32_t *slots =
        PyMem_RawCalloc(tree->shapes.used, sizeof(uint32_t)); /* by shape: slot_of() + 1; 0: not searched */
    uint64_t i = 0;
    if (!slots)
        return reject(query, "memory", 0);
    for (; i < query->count; i++) {
        Value handle = query->handles[i]; /* read once, because another thread may change the array */
        if (!expect_tag(query, handle, DICT))
            break;
        Dict dict = *dict_at(tree, handle);
        if (!slots[dict.shape])
            slots[dict.shape] = slot_of(tree, dict.shape, query->key) + 1;
        uint32_t slot = slots[dict.shape] - 1;
        found_values[i] = slot ? dict.values[slot - 1] : 0;
    }
    PyMem_RawFree(slots);
    return i == query->count;
}

static bool read_integer(const Tree *tree, Value handle, int64_t *number)
{
    Span span = TAG(handle) == BIG_INT ? blob_at(tree, handle) : (Span){0};
    /* 2**63 to 2**64-1 take nine bytes, the last of them zero. */
    if (span.size == 9 && bytes_of(tree, span)[8] == 0)
        span.size = 8;
    *number = 0;
    if (TAG(handle) == SMALL_INT)
        *number = small_int(handle);
    else if (TAG(handle) == CONSTANT)
        *number = PAYLOAD(handle) == IS_TRUE;
    else if (span.size <= 8)
        *number = decode_signed(bytes_of(tree, span), span.size);
    return TAG(handle) == SMALL_INT || (TAG(handle) == CONSTANT && PAYLOAD(handle) != IS_NONE) ||
           (TAG(handle) == BIG_INT && span.size <= 8);
}

bool read_integers(Query *query)
{
    int64_t *numbers = query->out;
    uint8_t *is_integer = query->out2;
    for (uint64_t i = 0; i < query->count; i++) {
        Value handle = query->handles[i];
        if (!is_node(query->tree, handle))
            return reject(query, "handle", handle);
        is_integer[i] = read_integer(query->tree, handle, &numbers[i]);
    }
    return true;
}
