/* The tree: the parsed content of a pickle, in flat memory.
 *
 * OVERVIEW OF THE READER
 *
 * A memory snapshot is a pickle of lists and dictionaries, often a million small dictionaries with
 * the same keys. pickle.load creates Python objects for all of them, and calls any function that the
 * file names. This reader does neither: it accepts plain data only, creates no Python object per node,
 * and answers queries on whole columns ("the key `size` of these 10^6 dictionaries as an int64 array").
 *
 *     bytes --machine.c, scalars.c--> Tree --queries.c, intern.c--> numpy arrays
 *                                       \____________module.c_____________/
 *
 *   arrays.[ch]   growing arrays, a keyed hash function, a hash table of indices
 *   tree.[ch]     the Tree: nodes, interned scalars, shapes of dictionaries, memory of the items
 *   machine.[ch]  the pickle machine: its stack, marks, memo and opcodes
 *   scalars.c     the opcodes that push numbers, text and bytes
 *   queries.[ch]  queries on many nodes: lengths, items, values of a key, integers
 *   intern.c      the query that gives nodes of equal content the same number
 *   module.c      the Python type PickledTree; native.py wraps it
 *
 * The terms are those of the pickle protocol (see pickletools in Python's standard library). A
 * pickle is a program for a stack machine. An opcode pushes a scalar or an empty container, or moves
 * the top of the stack into the container below it. MARK remembers a position in the stack, and the
 * memo is an array of values that opcodes store and fetch again by index.
 *
 * A node is a Value: a tag in the upper four bits, and a payload that depends on the tag. Python
 * refers to nodes by the same 64-bit number, called a handle. A scalar that does not fit in 60 bits is
 * a blob: a span of bytes of the file, interned, so that equal scalars have equal Values and are
 * compared as integers.
 *
 * A dictionary is a shape and an array of values. A shape is the sequence of its keys; shapes form a
 * tree, in which a child has one key more than its parent, and all dictionaries with the same keys
 * share one shape. A query for a key searches each shape once, not each dictionary.
 *
 * Hostile files. Time and memory are linear in the size of the file: an opcode stores a bounded
 * number of items, a declared length is compared with the rest of the file before it is used, and a
 * memo index must be smaller than the number of bytes read. The caller limits the memory in bytes,
 * because a compressed file can be large in this form. Hash functions are keyed with random
 * bytes, so that a file cannot contain prepared collisions. Handles come back from Python unchecked,
 * so every query checks them (is_node). Nodes can contain themselves: every walk is bounded by a
 * depth. machine.py is the same machine in Python; tests require that both accept the same files, and
 * reject the others at the same byte for the same reason.
 *
 * Threads. The interpreter lock is released while a file is parsed and while a query runs. A Tree
 * does not change after it was parsed. Another thread may change the arrays of a query, so each item
 * is read once.
 */

#ifndef CUDAKIT_READER_TREE_H
#define CUDAKIT_READER_TREE_H

#include "arrays.h"

typedef uint64_t Value;

enum {
    ABSENT,     /* no node: the handle 0 */
    CONSTANT,   /* IS_NONE, IS_FALSE or IS_TRUE */
    SMALL_INT,  /* an integer of at most 60 bits */
    BIG_INT,    /* a blob: a larger integer, in the shortest little-endian two's complement */
    FLOAT,      /* a blob: 8 bytes, big-endian IEEE 754, so that floats are equal if their bits are */
    TEXT,       /* a blob: valid UTF-8 */
    BYTES,      /* a blob */
    LIST,       /* an index into Tree.lists; tuples are lists too */
    DICT,       /* an index into Tree.dicts */
    CONTENT_ID, /* only in intern.c: the number of a distinct content */
};

enum { IS_NONE, IS_FALSE, IS_TRUE };

#define PAYLOAD_BITS 60
#define PAYLOAD(value) ((value) & (((uint64_t)1 << PAYLOAD_BITS) - 1))
#define TAG(value) ((int)((value) >> PAYLOAD_BITS))
#define MAKE(tag, payload) ((Value)(tag) << PAYLOAD_BITS | (payload))

typedef struct {
    uint64_t offset, size; /* offset in the file, or with IN_CONVERTED in Tree.converted */
} Span;

#define IN_CONVERTED ((uint64_t)1 << 63)

typedef struct {
    Value *items;
    uint32_t length, capacity;
} List;

typedef struct {
    Value *values;
    uint32_t shape;    /* index into Tree.shapes; the length of the shape is the number of values */
    uint32_t capacity; /* allocated number of values */
} Dict;

typedef struct {
    uint32_t parent, key; /* the shape has the keys of the parent shape and one more key, a blob */
    uint32_t length;      /* number of keys */
    uint32_t last_child;  /* the child used last: most dictionaries add the same key next */
} Shape;

typedef struct Chunk {
    struct Chunk *next;
    Value items[];
} Chunk;

#define CHUNK_ITEMS ((uint64_t)1 << 17)
#define CHECK_INTERVAL 1024

typedef struct {
    PyObject_HEAD
    Py_buffer file;
    uint64_t hash_key[2];
    Vector blobs;     /* Span */
    Vector converted; /* bytes of scalars that are not stored in this form in the file */
    Vector lists;     /* List */
    Vector dicts;     /* Dict */
    Vector shapes;    /* Shape, the keys of a Dict; shape 0 has no keys */
    Table blob_table, shape_table;
    Chunk *chunks;        /* memory for the items of lists and the values of dictionaries */
    uint64_t chunk_bytes; /* the size of all chunks */
    Value *free_items;
    uint64_t free_count;
    Value root;
    uint64_t memory_limit; /* bytes that parsing may take, checked every CHECK_INTERVAL opcodes */
    uint64_t max_keys;     /* maximum number of keys of a dictionary that is returned as a Python dict */
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
    if (span.offset & IN_CONVERTED)
        return ITEMS(uint8_t, tree->converted) + (span.offset ^ IN_CONVERTED);
    return (const uint8_t *)tree->file.buf + span.offset;
}

/* Returns the integer of a SMALL_INT node. */
static inline int64_t small_int(Value value)
{
    return (int64_t)(value << (64 - PAYLOAD_BITS)) >> (64 - PAYLOAD_BITS);
}

/* Decodes at most eight bytes of little-endian two's complement. */
int64_t decode_signed(const uint8_t *bytes, uint64_t size);

/* Returns the index of the blob with these bytes, or NOT_FOUND. */
uint32_t find_blob(const Tree *tree, const void *bytes, uint64_t size, uint32_t hash);

/* Returns the index of the blob with these bytes, adding it if it is new; NOT_FOUND if memory runs out. */
uint32_t intern_blob(Tree *tree, Span span);

/* Copies bytes into Tree.converted and sets the span. Returns false if memory runs out. */
bool store_converted(Tree *tree, const void *bytes, uint64_t size, Span *span);

/* Returns the child shape that has one more key, or NOT_FOUND if memory runs out. */
uint32_t shape_with_key(Tree *tree, uint32_t parent, uint32_t key);

/* Grows the capacity to at least length + extra items, and keeps the first `length` items. Returns false if memory
 * runs out. */
bool grow_items(Tree *tree, Value **items, uint32_t *capacity, uint32_t length, uint64_t extra);

/* Returns the size in bytes of all arrays, tables and chunks of a tree. */
uint64_t tree_bytes(const Tree *tree);

/* Frees all memory that a tree owns, but not the tree itself. */
void tree_free(Tree *tree);

#endif
