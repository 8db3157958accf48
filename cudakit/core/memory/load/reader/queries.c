#include "queries.h"

#include <string.h>

bool read_lengths(Query *query)
{
    int64_t *lengths = query->first;
    for (uint64_t i = 0; i < query->count; i++) {
        Value handle = query->handles[i];
        if (handle &&!expect(query, handle, LIST))
            return false;
        lengths[i] = handle ? list_at(query->tree, handle)->length : 0;
    }
    return true;
}

bool gather_items(Query *query)
{
    Value *out = query->first;
    uint64_t room = query->first_bytes / sizeof(Value);
    for (uint64_t i = 0; i < query->count; i++) {
        Value handle = query->handles[i];
        if (handle &&!expect(query, handle, LIST))
            return false;
        List list = handle ? *list_at(query->tree, handle) : (List){0};
        if (list.length > room)
            return refuse(query, "room", handle);
        if (list.length)
            memcpy(out, list.items, list.length * sizeof(Value));
        out += list.length;
        room -= list.length;
    }
    return true;
}

/* Returns the slot of a key's last value in a shape, plus 1; 0 if there is none. */
static uint32_t slot_of(const Tree *tree, uint32_t shape, uint32_t key)
{
    for (; shape; shape = shape_at(tree, shape)->parent)
        if (shape_at(tree, shape)->key == key)
            return shape_at(tree, shape)->length;
    return 0;
}

/* Walks each shape once, however many dictionaries have it. The file contains a pair for each step
 * of the shape of a dictionary, so that all walks together are linear in the file. */
bool look_up(Query *query)
{
    const Tree *tree = query->tree;
    Value *found = query->first;
    uint32_t *slots = PyMem_RawCalloc(tree->shapes.used, sizeof(uint32_t)); /* + 1: 0 is unknown */
    uint64_t i = 0;
    if (!slots)
        return refuse(query, "memory", 0);
    for (; i < query->count; i++) {
        Value handle = query->handles[i]; /* read once: another thread may change the array */
        if (!expect(query, handle, DICT))
            break;
        Dict dict = *dict_at(tree, handle);
        if (!slots[dict.shape])
            slots[dict.shape] = slot_of(tree, dict.shape, query->key) + 1;
        uint32_t slot = slots[dict.shape] - 1;
        found[i] = slot ? dict.values[slot - 1] : 0;
    }
    PyMem_RawFree(slots);
    return i == query->count;
}

static bool read_integer(const Tree *tree, Value handle, int64_t *number)
{
    Span span = TAG(handle) == NUMBER ? blob_at(tree, handle) : (Span){0};
    /* 2**63 to 2**64-1 take nine bytes, the last of them zero. */
    if (span.size == 9 && bytes_of(tree, span)[8] == 0)
        span.size = 8;
    *number = 0;
    if (TAG(handle) == SMALL)
        *number = small_number(handle);
    else if (TAG(handle) == CONSTANT)
        *number = PAYLOAD(handle) == IS_TRUE;
    else if (span.size <= 8)
        *number = signed_number(bytes_of(tree, span), span.size);
    return TAG(handle) == SMALL || (TAG(handle) == CONSTANT && PAYLOAD(handle) != IS_NONE) ||
           (TAG(handle) == NUMBER && span.size <= 8);
}

bool read_integers(Query *query)
{
    int64_t *numbers = query->first;
    uint8_t *known = query->second;
    for (uint64_t i = 0; i < query->count; i++) {
        Value handle = query->handles[i];
        if (!exists(query->tree, handle))
            return refuse(query, "handle", handle);
        known[i] = read_integer(query->tree, handle, &numbers[i]);
    }
    return true;
}
