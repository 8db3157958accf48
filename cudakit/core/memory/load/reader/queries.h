/* Queries on many nodes at once. They touch no Python object, so that the lock can be released. */

#ifndef CUDAKIT_READER_QUERIES_H
#define CUDAKIT_READER_QUERIES_H

#include "tree.h"

typedef struct {
    const Tree *tree;
    const Value *handles;
    uint64_t count;
    uint32_t key;         /* a blob, for look_up */
    void *first, *second; /* filled: one item for each handle, unless stated otherwise */
    uint64_t first_bytes;
    const char *why; /* of a refused query: a word, as from the machine, */
    Value node;      /* and the node that it is about */
} Query;

static inline bool refuse(Query *query, const char *why, Value node)
{
    query->why = why;
    query->node = node;
    return false;
}

/* Returns whether a handle is a node of the tree: handles come back from Python unchecked. */
static inline bool exists(const Tree *tree, Value handle)
{
    switch (TAG(handle)) {
    case ABSENT: return !handle;
    case CONSTANT: return PAYLOAD(handle) <= IS_TRUE;
    case SMALL: return true;
    case NUMBER:
    case FLOAT:
    case TEXT:
    case BYTES: return PAYLOAD(handle) < tree->blobs.used;
    case LIST: return PAYLOAD(handle) < tree->lists.used;
    case DICT: return PAYLOAD(handle) < tree->dicts.used;
    default: return false;
    }
}

/* Refuses a handle that is no node with this tag. */
static inline bool expect(Query *query, Value handle, int tag)
{
    if (!exists(query->tree, handle))
        return refuse(query, "handle", handle);
    return TAG(handle) == tag || refuse(query, "kind", handle);
}

/* Each fills the arrays of a query; false with why and node set if a node is refused. */
bool read_lengths(Query *query);  /* first: the lengths of lists */
bool gather_items(Query *query);  /* first: the items of lists, concatenated */
bool look_up(Query *query);       /* first: the value of a key in dictionaries; 0 if missing */
bool read_integers(Query *query); /* first: integers; second: whether a node is one */
bool intern_nodes(Query *query);  /* first: a number by content; second: a node of each number */

#endif
