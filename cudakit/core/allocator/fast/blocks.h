/* Blocks, and the free blocks of a pool and stream, sorted by size and address. */
#ifndef CUDAKIT_FAST_BLOCKS_H
#define CUDAKIT_FAST_BLOCKS_H

#include "types.h"

enum { SMALLEST_BLOCK = 512 }; /* as in torch_rules/sizes.py */
enum { CLASSES = 55 };         /* powers of two from 512 bytes to the largest size of 64 bits */

/* ---- blocks ---------------------------------------------------------------------------------------------- */

struct block {
    PyObject_HEAD
    long long ptr, size;
    /* The links of the tree are next to the keys, to share a cache line with them. */
    struct block *child[2]; /* smaller and larger keys */
    uint64_t priority;
    struct block **place; /* the child or root that refers to this block; NULL outside of the tree */
    long long requested, gc_count_base;
    struct free_blocks *free_blocks;
    struct block *prev, *next;
    PyObject *expandable_segment, *stream_uses, *stack, *segment_stack;
    int event_count;
    char free, allocated, mapped;
};

struct free_blocks {
    PyObject_HEAD
    PyObject *pool, *pool_id, *stream;
    struct counters *counters;
    struct block *roots[CLASSES]; /* a tree for the sizes from 512 to 1,023 bytes, from 1 to 2 KiB, and so on */
    uint64_t random;
};

#define BLOCK_FIELDS(DO) \
    DO(child[0]) \
    DO(child[1]) \
    DO(free_blocks) DO(prev) DO(next) DO(expandable_segment) DO(stream_uses) DO(stack) DO(segment_stack)
COLLECTED(block, BLOCK_FIELDS)

static PyObject *block_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"ptr", "size", "free_blocks", "expandable_segment", NULL};
    struct block parsed = {.expandable_segment = Py_None}, *self;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "LLO!|O", names, &parsed.ptr, &parsed.size,
                                     state_of(type)->types[FREE_BLOCKS], &parsed.free_blocks,
                                     &parsed.expandable_segment) ||
        !(self = (struct block *)type->tp_alloc(type, 0)))
        return NULL;
    self->ptr = parsed.ptr;
    self->size = parsed.size;
    self->mapped = true;
    BLOCK_FIELDS(COPY)
    return (PyObject *)self;
}

/* Set prev or next; the closure is its offset. */
static int set_adjacent(PyObject *self, PyObject *value, void *offset)
{
    PyObject **place = (PyObject **)((char *)self + (size_t)offset);
    bool is_block = value && value != Py_None;
    if (is_block && Py_TYPE(value) != Py_TYPE(self)) {
        PyErr_SetString(PyExc_TypeError, "not a block of the same type");
        return -1;
    }
    Py_XSETREF(*place, is_block ? Py_NewRef(value) : NULL);
    return 0;
}

static PyObject *get_adjacent(PyObject *self, void *offset)
{
    PyObject *value = *(PyObject **)((char *)self + (size_t)offset);
    return Py_NewRef(value ? value : Py_None);
}

static PyMemberDef block_members[] = {
    MEMBER(block, ptr, T_LONGLONG, 0),
    MEMBER(block, size, T_LONGLONG, 0),
    MEMBER(block, requested, T_LONGLONG, 0),
    MEMBER(block, gc_count_base, T_LONGLONG, 0),
    MEMBER(block, event_count, T_INT, 0),
    MEMBER(block, free, T_BOOL, READONLY),
    MEMBER(block, allocated, T_BOOL, 0),
    MEMBER(block, mapped, T_BOOL, 0),
    MEMBER(block, free_blocks, T_OBJECT_EX, READONLY),
    MEMBER(block, expandable_segment, T_OBJECT, 0),
    MEMBER(block, stream_uses, T_OBJECT, 0),
    MEMBER(block, stack, T_OBJECT, 0),
    MEMBER(block, segment_stack, T_OBJECT, 0),
    END,
};

static PyGetSetDef block_getset[] = {
    {"prev", get_adjacent, set_adjacent, NULL, (void *)offsetof(struct block, prev)},
    {"next", get_adjacent, set_adjacent, NULL, (void *)offsetof(struct block, next)},
    END,
};

static PyType_Slot block_slots[] = {
    {Py_tp_new, block_new},
    {Py_tp_members, block_members},
    {Py_tp_getset, block_getset},
    COLLECTED_SLOTS(block),
};

/* ---- free blocks: the tree ------------------------------------------------------------------------------- */

static bool is_before(const struct block *block, const struct block *other)
{
    return block->size < other->size || (block->size == other->size && block->ptr < other->ptr);
}

static struct block **root_for(struct free_blocks *self, long long size)
{
    return &self->roots[63 - 9 - __builtin_clzll((unsigned long long)size | SMALLEST_BLOCK)];
}

/* Return the smallest block of at least a size, at the lowest address among equal sizes; or NULL. A predicted
 * branch does not wait for the comparison; child[block->size < size] would. */
static struct block *best_fit(struct free_blocks *self, long long size)
{
    struct block *best = NULL;
    for (struct block **root = root_for(self, size); !best && root < self->roots + CLASSES; root++)
        for (struct block *block = *root; block;)
            if (block->size < size) {
                block = block->child[1];
            } else {
                best = block;
                block = block->child[0];
            }
    return best;
}

static void put(struct block **place, struct block *block)
{
    *place = block;
    if (block)
        block->place = place;
}

/* Insert a block, whose reference the tree takes. */
static void insert(struct free_blocks *self, struct block *block)
{
    struct block **place = root_for(self, block->size);
    self->random = self->random * 6364136223846793005u + 1442695040888963407u; /* Knuth's MMIX (TAOCP 3.3.4) */
    block->priority = self->random >> 32;
    block->gc_count_base = self->counters->searches;
    block->free = true;
    while (*place && (*place)->priority > block->priority)
        place = is_before(*place, block) ? &(*place)->child[1] : &(*place)->child[0];
    /* Split the subtree at `place` into the children of this block. */
    struct block *rest = *place, **end[2] = {&block->child[0], &block->child[1]};
    put(place, block);
    while (rest) {
        bool before = is_before(rest, block);
        put(end[!before], rest);
        end[!before] = &rest->child[before];
        rest = rest->child[before];
    }
    *end[0] = *end[1] = NULL;
}

/* Remove a block of the tree; the caller gets its reference. */
static struct block *take(struct block *block)
{
    struct block **place = block->place, *half[2] = {block->child[0], block->child[1]};
    while (half[0] && half[1]) { /* join both subtrees */
        bool upper = half[1]->priority > half[0]->priority;
        put(place, half[upper]);
        place = &half[upper]->child[!upper];
        half[upper] = *place;
    }
    put(place, half[0] ? half[0] : half[1]);
    block->child[0] = block->child[1] = NULL;
    block->place = NULL;
    block->free = false;
    return block;
}

/* Append the blocks of at least a size to a list, in order. */
static int append_from(const struct block *block, long long size, PyObject *list)
{
    for (; block; block = block->child[1])
        if (block->size >= size &&
            (append_from(block->child[0], size, list) < 0 || PyList_Append(list, (PyObject *)block) < 0))
            return -1;
    return 0;
}

/* ---- free blocks: the type ------------------------------------------------------------------------------- */

static int free_blocks_bool(PyObject *self)
{
    return best_fit((struct free_blocks *)self, 0) != NULL;
}

/* Return a list of the blocks of at least a size, which does not see later changes. */
static PyObject *free_blocks_from_size(PyObject *self, PyObject *size)
{
    long long least = PyLong_AsLongLong(size);
    PyObject *list = least == -1 && PyErr_Occurred() ? NULL : PyList_New(0);
    for (int i = 0; list && i < CLASSES; i++)
        if (append_from(((struct free_blocks *)self)->roots[i], least, list) < 0)
            Py_CLEAR(list);
    return list;
}

/* Return the object as a block of this pool and stream, free as requested; NULL with an exception otherwise. */
static struct block *checked_block(PyObject *self, PyObject *object, bool free)
{
    struct block *block = (struct block *)object;
    if (!PyObject_TypeCheck(object, state_of(Py_TYPE(self))->types[BLOCK]) ||
        (PyObject *)block->free_blocks != self || block->free != free) {
        PyErr_Format(PyExc_ValueError, "not a block of this pool and stream that is%s free", free ? "" : " not");
        return NULL;
    }
    return block;
}

static PyObject *free_blocks_add(PyObject *self, PyObject *object)
{
    struct block *block = checked_block(self, object, false);
    if (!block)
        return NULL;
    insert((struct free_blocks *)self, (struct block *)Py_NewRef(object));
    Py_RETURN_NONE;
}

static PyObject *free_blocks_remove(PyObject *self, PyObject *object)
{
    struct block *block = checked_block(self, object, true);
    if (!block)
        return NULL;
    Py_DECREF(take(block));
    Py_RETURN_NONE;
}

static PyObject *free_blocks_take(PyObject *self, PyObject *args)
{
    long long size, limit;
    if (!PyArg_ParseTuple(args, "LL", &size, &limit))
        return NULL;
    struct block *block = best_fit((struct free_blocks *)self, size);
    if (!block || block->size >= limit)
        Py_RETURN_NONE;
    return (PyObject *)take(block);
}

#define FREE_BLOCKS_FIELDS(DO) DO(pool) DO(pool_id) DO(stream) DO(counters)
#define FOR_ROOTS(DO) \
    for (int i = 0; i < CLASSES; i++) { \
        DO(roots[i]) \
    }
#define VISIT_ROOTS(DO) FREE_BLOCKS_FIELDS(DO) FOR_ROOTS(DO)
COLLECTED(free_blocks, VISIT_ROOTS)

static PyObject *free_blocks_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"pool", "pool_id", "stream", "counters", NULL};
    struct free_blocks parsed, *self;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO!O!", names, &parsed.pool, &parsed.pool_id, &PyLong_Type,
                                     &parsed.stream, state_of(type)->types[COUNTERS], &parsed.counters) ||
        !(self = (struct free_blocks *)type->tp_alloc(type, 0)))
        return NULL;
    FREE_BLOCKS_FIELDS(COPY)
    return (PyObject *)self;
}

static PyMemberDef free_blocks_members[] = {
    MEMBER(free_blocks, pool, T_OBJECT, READONLY),
    MEMBER(free_blocks, counters, T_OBJECT, READONLY),
    MEMBER(free_blocks, stream, T_OBJECT, READONLY),
    END,
};

static PyMethodDef free_blocks_methods[] = {
    {"from_size", free_blocks_from_size, METH_O, NULL},
    {"add", free_blocks_add, METH_O, NULL},
    {"remove", free_blocks_remove, METH_O, NULL},
    {"take", free_blocks_take, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot free_blocks_slots[] = {
    {Py_tp_new, free_blocks_new},   {Py_tp_members, free_blocks_members}, {Py_tp_methods, free_blocks_methods},
    {Py_nb_bool, free_blocks_bool}, COLLECTED_SLOTS(free_blocks),
};

#endif
