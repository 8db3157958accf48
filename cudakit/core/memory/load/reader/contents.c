/* Numbers nodes by content: equal stacks and frames get one number. */

#include "queries.h"

#include <stdlib.h>
#include <string.h>

/* Frames are dictionaries in a list: two levels. Deeper nodes are compared by identity, as in
 * tree.py. */
#define INTERN_DEPTH 4

/* A key (upper half) and its slot (lower half): sorting groups the slots of a key in order. */
typedef uint64_t KeySlot;

typedef struct {
    uint64_t start, length;
} Range;

typedef struct {
    const Tree *tree;
    /* Of lists and of dictionaries, by depth: the content's number + 1, 0 where not visited. */
    uint32_t *numbers[2][INTERN_DEPTH];
    Range *shapes;    /* of key_slots, by shape */
    Vector key_slots; /* KeySlot: of the shapes met so far */
    Vector draft;     /* Value: a stack of contents under construction */
    Vector parts;     /* Value: of all contents */
    Vector contents;  /* Range, of parts */
    Table table;      /* of contents */
} Contents;

static void free_contents(Contents *in)
{
    for (int depth = 0; depth < INTERN_DEPTH; depth++) {
        PyMem_RawFree(in->numbers[0][depth]);
        PyMem_RawFree(in->numbers[1][depth]);
    }
    PyMem_RawFree(in->shapes);
    PyMem_RawFree(in->key_slots.data);
    PyMem_RawFree(in->draft.data);
    PyMem_RawFree(in->parts.data);
    PyMem_RawFree(in->contents.data);
    PyMem_RawFree(in->table.slots);
}

static int compare_key_slots(const void *a, const void *b)
{
    KeySlot left = *(const KeySlot *)a, right = *(const KeySlot *)b;
    return (left > right) - (left < right);
}

/* Appends the keys of a shape in the order of their numbers, each once, with its last slot. */
static bool add_key_slots(Contents *in, uint32_t shape)
{
    uint32_t length = shape_at(in->tree, shape)->length;
    if (!length || !reserve(&in->key_slots, length, sizeof(KeySlot)))
        return !length;
    KeySlot *found = ITEMS(KeySlot, in->key_slots) + in->key_slots.used, *kept = found;
    for (const Shape *at; (at = shape_at(in->tree, shape))->length; shape = at->parent)
        found[at->length - 1] = (uint64_t)at->key << 32 | (at->length - 1);
    qsort(found, length, sizeof(KeySlot), compare_key_slots);
    for (uint32_t i = 1; i < length; i++) {
        kept += found[i] >> 32 != *kept >> 32;
        *kept = found[i];
    }
    in->key_slots.used += (uint64_t)(kept - found) + 1;
    return true;
}

/* Returns the number of the content that was drafted from a position on; NOT_FOUND without memory. */
static uint32_t number_of_draft(Contents *in, uint64_t from)
{
    const Value *draft = ITEMS(Value, in->draft) + from;
    uint64_t length = in->draft.used - from, size = length * sizeof(Value);
    uint32_t hash = hash_bytes(in->tree->hash_key, draft, size);
    uint64_t position = hash;
    for (uint32_t i; (i = table_next(&in->table, hash, &position)) != NOT_FOUND;) {
        Range known = ITEMS(Range, in->contents)[i];
        if (known.length == length && !memcmp(ITEMS(Value, in->parts) + known.start, draft, size))
            return i;
    }
    if (!reserve(&in->contents, 1, sizeof(Range)) || !reserve(&in->parts, length, sizeof(Value)) ||
        !table_add(&in->table, hash, in->contents.used))
        return NOT_FOUND;
    memcpy(ITEMS(Value, in->parts) + in->parts.used, draft, size);
    ITEMS(Range, in->contents)[in->contents.used] = (Range){in->parts.used, length};
    in->parts.used += length;
    return (uint32_t)in->contents.used++;
}

static Value new_content(Contents *in, Value node, int depth);

/* Returns a Value that nodes of equal content share; 0 without memory. */
static inline Value content_of(Contents *in, Value node, int depth)
{
    if (TAG(node) < LIST || depth == INTERN_DEPTH)
        return node;
    const uint32_t *numbers = in->numbers[TAG(node) == DICT][depth];
    uint32_t number = numbers ? numbers[PAYLOAD(node)] : 0;
    return number ? MAKE(CONTENT, number - 1) : new_content(in, node, depth);
}

static inline bool draft_part(Contents *in, Value node, int depth)
{
    Value part = content_of(in, node, depth);
    return part && append(&in->draft, part);
}

static bool draft_list(Contents *in, const List *list, int depth)
{
    for (uint32_t i = 0; i < list->length; i++)
        if (!draft_part(in, list->items[i], depth))
            return false;
    return true;
}

static bool draft_dict(Contents *in, const Dict *dict, int depth)
{
    Range *keys = &in->shapes[dict->shape];
    if (!keys->length) {
        keys->start = in->key_slots.used;
        if (!add_key_slots(in, dict->shape))
            return false;
        keys->length = in->key_slots.used - keys->start;
    }
    for (uint64_t i = 0; i < keys->length; i++) {
        KeySlot pair = ITEMS(KeySlot, in->key_slots)[keys->start + i];
        if (!append(&in->draft, pair >> 32) || !draft_part(in, dict->values[(uint32_t)pair], depth))
            return false;
    }
    return true;
}

/* Visits a container once for each depth, so that a container that contains itself ends. */
static Value new_content(Contents *in, Value node, int depth)
{
    bool is_dict = TAG(node) == DICT;
    uint32_t **numbers = &in->numbers[is_dict][depth];
    const Vector *all = is_dict ? &in->tree->dicts : &in->tree->lists;
    if (!*numbers)
        *numbers = PyMem_RawCalloc(all->used, sizeof **numbers);
    uint64_t from = in->draft.used;
    if (!*numbers || !append(&in->draft, is_dict))
        return 0;
    bool drafted = is_dict ? draft_dict(in, dict_at(in->tree, node), depth + 1)
                           : draft_list(in, list_at(in->tree, node), depth + 1);
    uint32_t number = drafted ? number_of_draft(in, from) : NOT_FOUND;
    if (number == NOT_FOUND)
        return 0;
    in->draft.used = from;
    (*numbers)[PAYLOAD(node)] = number + 1;
    return MAKE(CONTENT, number);
}

/* Returns the index of a content in `known`, to which it is added if it is new. */
static uint32_t id_of(Table *table, Vector *known, const uint64_t hash_key[2], Value content)
{
    uint32_t hash = hash_bytes(hash_key, &content, sizeof content);
    uint64_t position = hash;
    for (uint32_t i; (i = table_next(table, hash, &position)) != NOT_FOUND;)
        if (ITEMS(Value, *known)[i] == content)
            return i;
    bool added = known->used <= INT32_MAX && table_add(table, hash, known->used);
    return added && append(known, content) ? (uint32_t)known->used - 1 : NOT_FOUND;
}

/* Fills the ids, and of each id the first node. */
static bool number_nodes(Query *query, Contents *in, Table *table, Vector *known)
{
    uint32_t *ids = query->first;
    Value *nodes = query->second;
    Value previous = 0;
    for (uint64_t i = 0; i < query->count; i++) {
        Value handle = query->handles[i];
        if (i && handle == previous) {
            ids[i] = ids[i - 1];
            continue;
        }
        previous = handle;
        if (!exists(query->tree, handle))
            return refuse(query, "handle", handle);
        Value content = content_of(in, handle, 0);
        uint64_t before = known->used;
        ids[i] = content || !handle ? id_of(table, known, in->tree->hash_key, content) : NOT_FOUND;
        if (ids[i] == NOT_FOUND)
            return refuse(query, "memory", 0);
        if (known->used > before)
            nodes[ids[i]] = handle;
    }
    return true;
}

bool intern_nodes(Query *query)
{
    Contents in = {.tree = query->tree};
    Table table = {0};
    Vector known = {0}; /* Value: contents, by id */
    in.shapes = PyMem_RawCalloc(query->tree->shapes.used, sizeof(Range));
    bool good = in.shapes ? number_nodes(query, &in, &table, &known) : refuse(query, "memory", 0);
    free_contents(&in);
    PyMem_RawFree(table.slots);
    PyMem_RawFree(known.data);
    return good;
}
