/* The tree of a pickle in flat memory: no Python object is made for a node.
 *
 * A node is a Value: a tag in the upper four bits, and a payload whose meaning depends on the tag.
 * Scalars of equal content have equal Values, since what does not fit in 60 bits is interned. A
 * dictionary is its shape (its keys in order: a path in a tree that all dictionaries share) and its
 * values.
 */

#ifndef CUDAKIT_READER_TREE_H
#define CUDAKIT_READER_TREE_H

#include "arrays.h"

typedef uint64_t Value;

enum {
    ABSENT,   /* the handle 0 */
    CONSTANT, /* IS_NONE, IS_FALSE or IS_TRUE */
    SMALL,    /* an integer of 60 bits */
    NUMBER,   /* a blob: a larger integer, in the shortest little-endian two's complement */
    FLOAT,    /* a blob: big-endian binary64, so that equal content means equal bits */
    TEXT,     /* a blob: valid UTF-8 */
    BYTES,    /* a blob */
    LIST,     /* an index into Tree.lists; tuples are lists */
    DICT,     /* an index into Tree.dicts */
    CONTENT,  /* while interning: the number of a content */
};

enum { IS_NONE, IS_FALSE, IS_TRUE };

#define PAYLOAD_BITS 60
#define PAYLOAD(value) ((value) & (((uint64_t)1 << PAYLOAD_BITS) - 1))
#define TAG(value) ((int)((value) >> PAYLOAD_BITS))
#define MAKE(tag, payload) ((Value)(tag) << PAYLOAD_BITS | (payload))

typedef struct {
    uint64_t offset, size; /* in the file, or with IN_SPILL set in Tree.spill */
} Span;

#define IN_SPILL ((uint64_t)1 << 63)

typedef struct {
    Value *items;
    uint32_t length, capacity;
} List;

typedef struct {
    Value *values;
    uint32_t shape, capacity; /* the shape has the length */
} Dict;

typedef struct {
    uint32_t parent, key; /* one key, a blob, more than the parent */
    uint32_t length;
    uint32_t successor; /* the latest child: a guess that saves most look-ups */
} Shape;

typedef struct Chunk {
    struct Chunk *next;
    Value items[];
} Chunk;

#define CHUNK_ITEMS ((uint64_t)1 << 17)

typedef struct {
    PyObject_HEAD
    Py_buffer file;
    uint64_t hash_key[2];
    Vector blobs;  /* Span */
    Vector spill;  /* bytes of scalars that the file contains in another form only */
    Vector lists;  /* List */
    Vector dicts;  /* Dict */
    Vector shapes; /* Shape; the first is the empty one */
    Table blob_table, shape_table;
    Chunk *chunks; /* where the items of lists and the values of dictionaries are */
    Value *free_items;
    uint64_t free_count;
    Value root;
} Tree;

static inline Span blob_at(const Tree *tree, Value value)
{
    return ITEMS(Span, tree->blobs)[PAYLOAD(value)];
}

static inline List *list_at(const Tree *tree, Value value)
{
    return &ITEMS(List, tree->lists)[PAYLOAD(value)];
}

static inline Dict *dict_at(const Tree *tree, Value value)
{
    return &ITEMS(Dict, tree->dicts)[PAYLOAD(value)];
}

static inline Shape *shape_at(const Tree *tree, uint32_t index)
{
    return &ITEMS(Shape, tree->shapes)[index];
}

static inline const uint8_t *bytes_of(const Tree *tree, Span span)
{
    if (span.offset & IN_SPILL)
        return ITEMS(uint8_t, tree->spill) + (span.offset ^ IN_SPILL);
    return (const uint8_t *)tree->file.buf + span.offset;
}

/* Returns the integer of a SMALL. */
static inline int64_t small_number(Value value)
{
    return (int64_t)(value << (64 - PAYLOAD_BITS)) >> (64 - PAYLOAD_BITS);
}

/* Returns the integer of two's complement in at most eight bytes, little-endian. */
int64_t signed_number(const uint8_t *bytes, uint64_t size);

/* Returns the number of the blob with these bytes; NOT_FOUND if there is none. */
uint32_t find_blob(const Tree *tree, const void *bytes, uint64_t size, uint32_t hash);

/* Returns the number of the blob with these bytes, new or known; NOT_FOUND without memory. */
uint32_t intern_blob(Tree *tree, Span span);

/* Copies bytes that the file does not contain in this form; false without memory. */
bool spill(Tree *tree, const void *bytes, uint64_t size, Span *span);

/* Returns the shape with one key more; NOT_FOUND without memory. */
uint32_t extended_shape(Tree *tree, uint32_t parent, uint32_t key);

/* Makes room for more items after the first `length`; false without memory. */
bool extend(Tree *tree, Value **items, uint32_t *capacity, uint32_t length, uint64_t extra);

/* Frees all memory of a tree but the tree itself. */
void tree_free(Tree *tree);

#endif
