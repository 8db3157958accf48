/* Gives nodes of equal content, such as equal call stacks and frames, the same number.
 *
 * The content of a container is encoded as a sequence of Values ("draft"): for a list the contents of
 * its items, for a dictionary its keys in the order of their blobs, each followed by the content of its
 * value. Equal sequences get the same number, which then stands for the container in the sequences of
 * its parents.
 */

#include "queries.h"

#include <stdlib.h>
#include <string.h>

/* A call stack is a list of dictionaries: two levels. Nodes below this depth are compared by
 * identity, as in tree.py. */
#define INTERN_DEPTH 4

/* A key (upper half) and the position of its value (lower half). Sorting puts the positions of a
 * repeated key in order. */
typedef uint64_t KeySlot;

typedef struct {
    uint64_t start, length;
} Range;

typedef struct {
    const Tree *tree;
    /* The number of each container's content + 1, by kind (list, dictionary), depth and index; 0: not visited. */
    uint32_t *numbers[2][INTERN_DEPTH];
    Range *key_ranges; /* the range of key_slots of each shape */
    Vector key_slots;  /* KeySlot: sorted keys of the shapes visited so far */
    Vector draft;      /* Value: the sequences under construction; nested ones follow their parents */
    Vector parts;      /* Value: the sequences of all contents */
    Vector contents;   /* Range: the range of parts of each content */
    Table table;       /* finds contents by hash */
} Interner;

static void free_interner(Interner *in)
{
    for (int depth = 0; depth < INTERN_DEPTH; depth++) {
        PyMem_RawFree(in->numbers[0][depth]);
        PyMem_RawFree(in->numbers[1][depth]);
    }
    PyMem_RawFree(in->key_ranges);
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

/* Appends the keys of a shape in the order of their blobs, each once, with its last position. */
static bool add_key_slots(Interner *in, uint32_t shape)
{
    uint32_t length = shape_at(in->tree, shape)->length;
    if (!length || !reserve(&in->key_slots, length, sizeof(KeySlot)))
        return !length;
    KeySlot *sorted_slots = ITEMS(KeySlot, in->key_slots) + in->key_slots.used, *last_kept = sorted_slots;
    for (const Shape *at; (at = shape_at(in->tree, shape))->length; shape = at->parent)
        sorted_slots[at->length - 1] = (uint64_t)at->key << 32 | (at->length - 1);
    qsort(sorted_slots, length, sizeof(KeySlot), compare_key_slots);
    for (uint32_t i = 1; i < length; i++) {
        last_kept += sorted_slots[i] >> 32 != *last_kept >> 32;
        *last_kept = sorted_slots[i];
    }
    in->key_slots.used += (uint64_t)(last_kept - sorted_slots) + 1;
    return true;
}

/* Returns the number of the sequence that starts at a position of the draft, or NOT_FOUND if memory runs out. */
static uint32_t id_of_draft(Interner *in, uint64_t from)
{
    const Value *draft = ITEMS(Value, in->draft) + from;
    uint64_t length = in->draft.used - from, size = length * sizeof(Value);
    uint32_t hash = hash_bytes(in->tree->hash_key, draft, size);
    uint64_t position = hash;
    for (uint32_t i; (i = table_next(&in->table, hash, &position)) != NOT_FOUND;) {
        Range existing_content = ITEMS(Range, in->contents)[i];
        if (existing_content.length == length &&
            !memcmp(ITEMS(Value, in->parts) + existing_content.start, draft, size))
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

static Value new_content(Interner *in, Value node, int depth);

/* Returns a Value that is equal for nodes of equal content, or 0 if memory runs out. */
static inline Value content_of(Interner *in, Value node, int depth)
{
    if (TAG(node) < LIST || depth == INTERN_DEPTH)
        return node;
    const uint32_t *numbers = in->numbers[TAG(node) == DICT][depth];
    uint32_t content_number = numbers ? numbers[PAYLOAD(node)] : 0;
    return content_number ? MAKE(CONTENT_ID, content_number - 1) : new_content(in, node, depth);
}

static inline bool draft_part(Interner *in, Value node, int depth)
{
    Value part = content_of(in, node, depth);
    return part && append_word(&in->draft, part);
}

static bool draft_list(Interner *in, const List *list, int depth)
{
    for (uint32_t i = 0; i < list->length; i++)
        if (!draft_part(in, list->items[i], depth))
            return false;
    return true;
}

static bool draft_dict(Interner *in, const Dict *dict, int depth)
{
    Range *keys = &in->key_ranges[dict->shape];
    if (!keys->length) {
        keys->start = in->key_slots.used;
        if (!add_key_slots(in, dict->shape))
            return false;
        keys->length = in->key_slots.used - keys->start;
    }
    for (uint64_t i = 0; i < keys->length; i++) {
        KeySlot key_slot = ITEMS(KeySlot, in->key_slots)[keys->start + i];
        if (!append_word(&in->draft, key_slot >> 32) || !draft_part(in, dict->values[(uint32_t)key_slot], depth))
            return false;
    }
    return true;
}

/* Encodes a container. Each container is visited once per depth, so a container that contains itself
 * ends the recursion too. */
static Value new_content(Interner *in, Value node, int depth)
{
    bool is_dict = TAG(node) == DICT;
    uint32_t **numbers = &in->numbers[is_dict][depth];
    const Vector *all_containers = is_dict ? &in->tree->dicts : &in->tree->lists;
    if (!*numbers)
        *numbers = PyMem_RawCalloc(all_containers->used, sizeof **numbers);
    uint64_t draft_start = in->draft.used;
    if (!*numbers || !append_word(&in->draft, is_dict))
        return 0;
    bool is_drafted = is_dict ? draft_dict(in, dict_at(in->tree, node), depth + 1)
                              : draft_list(in, list_at(in->tree, node), depth + 1);
    uint32_t content_number = is_drafted ? id_of_draft(in, draft_start) : NOT_FOUND;
    if (content_number == NOT_FOUND)
        return 0;
    in->draft.used = draft_start;
    (*numbers)[PAYLOAD(node)] = content_number + 1;
    return MAKE(CONTENT_ID, content_number);
}

/* Returns the id of a content: its index in `contents`, to which a new content is appended. Returns NOT_FOUND if no
 * memory is left. */
static uint32_t id_of(Table *table, Vector *contents, const uint64_t hash_key[2], Value content)
{
    uint32_t hash = hash_bytes(hash_key, &content, sizeof content);
    uint64_t position = hash;
    for (uint32_t i; (i = table_next(table, hash, &position)) != NOT_FOUND;)
        if (ITEMS(Value, *contents)[i] == content)
            return i;
    bool is_added = contents->used <= INT32_MAX && table_add(table, hash, contents->used);
    return is_added && append_word(contents, content) ? (uint32_t)contents->used - 1 : NOT_FOUND;
}

/* Fills the ids, and the first node of each id. */
static bool number_nodes(Query *query, Interner *in, Table *table, Vector *contents)
{
    uint32_t *ids = query->out;
    Value *nodes = query->out2;
    Value previous_handle = 0;
    for (uint64_t i = 0; i < query->count; i++) {
        Value handle = query->handles[i];
        if (i && handle == previous_handle) {
            ids[i] = ids[i - 1];
            continue;
        }
        previous_handle = handle;
        if (!is_node(query->tree, handle))
            return reject(query, "handle", handle);
        Value content = content_of(in, handle, 0);
        uint64_t content_count = contents->used;
        ids[i] = content || !handle ? id_of(table, contents, in->tree->hash_key, content) : NOT_FOUND;
        if (ids[i] == NOT_FOUND)
            return reject(query, "memory", 0);
        if (contents->used > content_count)
            nodes[ids[i]] = handle;
    }
    return true;
}

bool intern_nodes(Query *query)
{
    Interner in = {.tree = query->tree};
    Table table = {0};
    Vector contents = {0}; /* Value: contents, by id */
    in.key_ranges = PyMem_RawCalloc(query->tree->shapes.used, sizeof(Range));
    bool is_complete = in.key_ranges ? number_nodes(query, &in, &table, &contents) : reject(query, "memory", 0);
    free_interner(&in);
    PyMem_RawFree(table.slots);
    PyMem_RawFree(contents.data);
    return is_complete;
}
