/* Queries on many nodes at once. They use no Python objects, so they run without the interpreter
 * lock. */

#ifndef CUDAKIT_READER_QUERIES_H
#define CUDAKIT_READER_QUERIES_H

#include "tree.h"

typedef struct {
    const Tree *tree;
    const Value *handles;
    uint64_t count;
    uint32_t key;       /* for look_up_key: a blob */
    void *out, *out2;   /* the results: one item per handle, unless stated otherwise */
    uint64_t out_bytes; /* the size of `out` */
    const char *reason; /* why the query was rejected: "handle", "kind", "keys", "space" or "memory" */
    Value node;         /* the rejected node */
} Query;

static inline bool reject(Query *query, const char *reason, Value node)
{
    query->reason = reason;
    query->node = node;
    return false;
}

/* Returns whether a handle, which Python may have made up, is a node of the tree. */
static inline bool is_node(const Tree *tree, Value handle)
{
    switch (TAG(handle)) {
    case ABSENT: return !handle;
    case CONSTANT: return PAYLOAD(handle) <= IS_TRUE;
    case SMALL_INT: return true;
    case BIG_INT:
    case FLOAT:
    case TEXT:
    case BYTES: return PAYLOAD(handle) < tree->blobs.used;
    case LIST: return PAYLOAD(handle) < tree->lists.used;
    case DICT: return PAYLOAD(handle) < tree->dicts.used;
    default: return false;
    }
}

/* Rejects the query unless the handle is a node with this tag. */
static inline bool expect_tag(Query *query, Value handle, int tag)
{
    if (!is_node(query->tree, handle))
        return reject(query, "handle", handle);
    return TAG(handle) == tag || reject(query, "kind", handle);
}

/* Each function fills the results. Returns false, with reason and node set, if a node is rejected. */
bool read_lengths(Query *query);  /* out: lengths of lists */
bool gather_items(Query *query);  /* out: the items of lists, concatenated */
bool look_up_key(Query *query);   /* out: values of `key` in dictionaries; 0 if the key is missing */
bool read_integers(Query *query); /* out: integers; out2: whether each node is one */
bool intern_nodes(Query *query);  /* out: the number of each node's content; out2: a node for each number */

#endif
