/* Block, and FreeBlocks: the free blocks of one pool and stream, sorted by size and address. */
#ifndef CUDAKIT_FAST_BLOCKS_H
#define CUDAKIT_FAST_BLOCKS_H

#include "types.h"

enum { SMALLEST_BLOCK = 512 }; /* the same value as in torch_rules/settings.py */
enum { SIZE_CLASSES = 55 };    /* number of powers of two from 512 bytes to the largest size of 64 bits */

/* ---- blocks ---------------------------------------------------------------------------------------------- */

struct block {
    PyObject_HEAD
    long long ptr, size;
    /* The links of the tree are next to its keys, size and ptr, to share a cache line with the keys. */
    struct block *child[2]; /* the subtrees of blocks with smaller and with larger keys */
    uint64_t priority;      /* random; no child has a higher priority */
    struct block **link;    /* the child or root pointer to this block; NULL if the block is in no tree */
    long long requested, gc_count_base;
    struct free_blocks *free_blocks;
    struct block *prev, *next;
    PyObject *expandable_segment, *stream_uses, *stack, *segment_stack;
    int event_count;
    char is_free, is_allocated, is_mapped;
};

struct free_blocks {
    PyObject_HEAD
    PyObject *pool, *pool_id, *stream;
    struct counters *counters;
    struct block
        *roots[SIZE_CLASSES]; /* a tree for the sizes from 512 to 1,023 bytes, from 1 to 2 KiB, and so on */
    uint64_t random_state;    /* state of the random number generator of the priorities */
};

#define BLOCK_FIELDS(DO) \
    DO(child[0]) \
    DO(child[1]) \
    DO(free_blocks) DO(prev) DO(next) DO(expandable_segment) DO(stream_uses) DO(stack) DO(segment_stack)
DEFINE_GC_FUNCTIONS(block, BLOCK_FIELDS)

/* Block(ptr, size, free_blocks, expandable_segment=None): create a block that is neither free nor allocated. */
static PyObject *block_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *argument_names[] = {"ptr", "size", "free_blocks", "expandable_segment", NULL};
    struct block parsed_fields = {.expandable_segment = Py_None}, *self;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "LLO!|O", argument_names, &parsed_fields.ptr,
                                     &parsed_fields.size, state_of(type)->types[FREE_BLOCKS],
                                     &parsed_fields.free_blocks, &parsed_fields.expandable_segment) ||
        !(self = (struct block *)type->tp_alloc(type, 0)))
        return NULL;
    self->ptr = parsed_fields.ptr;
    self->size = parsed_fields.size;
    self->is_mapped = true;
    BLOCK_FIELDS(COPY)
    return (PyObject *)self;
}

/* Set the attribute prev or next; `offset` is the offset of its field. Raises TypeError for other objects. */
static int set_adjacent(PyObject *self, PyObject *value, void *offset)
{
    PyObject **field = (PyObject **)((char *)self + (size_t)offset);
    bool is_block = value && value != Py_None;
    if (is_block && Py_TYPE(value) != Py_TYPE(self)) {
        PyErr_SetString(PyExc_TypeError, "not a block of the same type");
        return -1;
    }
    Py_XSETREF(*field, is_block ? Py_NewRef(value) : NULL);
    return 0;
}

/* Return the attribute prev or next; `offset` is the offset of its field. */
static PyObject *get_adjacent(PyObject *self, void *offset)
{
    PyObject *adjacent = *(PyObject **)((char *)self + (size_t)offset);
    return Py_NewRef(adjacent ? adjacent : Py_None);
}

/* Return the free blocks to which a block belongs; NULL with an AttributeError for a block that was discarded. */
static struct free_blocks *free_blocks_of(PyObject *self)
{
    struct free_blocks *free_blocks = ((struct block *)self)->free_blocks;
    if (!free_blocks)
        PyErr_SetString(PyExc_AttributeError, "the block was discarded");
    return free_blocks;
}

/* block.stream: the stream whose requests the block serves. */
static PyObject *block_stream(PyObject *self, void *closure)
{
    (void)closure;
    struct free_blocks *free_blocks = free_blocks_of(self);
    return free_blocks ? Py_XNewRef(free_blocks->stream) : NULL;
}

/* block.pool: the pool that the block belongs to. */
static PyObject *block_pool(PyObject *self, void *closure)
{
    (void)closure;
    struct free_blocks *free_blocks = free_blocks_of(self);
    return free_blocks ? Py_XNewRef(free_blocks->pool) : NULL;
}

/* block.is_split: whether the segment contains more blocks than this one. */
static PyObject *block_is_split(PyObject *self, void *closure)
{
    (void)closure;
    return PyBool_FromLong(((struct block *)self)->prev || ((struct block *)self)->next);
}

static PyMemberDef block_members[] = {
    MEMBER(block, ptr, T_LONGLONG, 0),
    MEMBER(block, size, T_LONGLONG, 0),
    MEMBER(block, requested, T_LONGLONG, 0),
    MEMBER(block, gc_count_base, T_LONGLONG, 0),
    MEMBER(block, event_count, T_INT, 0),
    MEMBER(block, is_free, T_BOOL, READONLY),
    MEMBER(block, is_allocated, T_BOOL, 0),
    MEMBER(block, is_mapped, T_BOOL, 0),
    MEMBER(block, free_blocks, T_OBJECT_EX, READONLY),
    MEMBER(block, expandable_segment, T_OBJECT, 0),
    MEMBER(block, stream_uses, T_OBJECT, 0),
    MEMBER(block, stack, T_OBJECT, 0),
    MEMBER(block, segment_stack, T_OBJECT, 0),
    END_OF_MEMBERS,
};

static PyGetSetDef block_getset[] = {
    {"prev", get_adjacent, set_adjacent, NULL, (void *)offsetof(struct block, prev)},
    {"next", get_adjacent, set_adjacent, NULL, (void *)offsetof(struct block, next)},
    {"stream", block_stream, NULL, NULL, NULL},
    {"pool", block_pool, NULL, NULL, NULL},
    {"is_split", block_is_split, NULL, NULL, NULL},
    END_OF_MEMBERS,
};

static PyType_Slot block_slots[] = {
    {Py_tp_new, block_new},
    {Py_tp_members, block_members},
    {Py_tp_getset, block_getset},
    GC_SLOTS(block),
};

/* ---- free blocks: the tree ------------------------------------------------------------------------------- */

/* Return whether a block is sorted before another one: by size, then by address. */
static bool is_before(const struct block *block, const struct block *other)
{
    return block->size < other->size || (block->size == other->size && block->ptr < other->ptr);
}

/* Return the root of the tree for blocks of a size. */
static struct block **root_for(struct free_blocks *self, long long size)
{
    return &self->roots[63 - 9 - __builtin_clzll((unsigned long long)size | SMALLEST_BLOCK)];
}

/* Return the smallest block of at least a size, among equal sizes the one at the lowest address; NULL if there is
 * none. The `if` is faster than child[block->size < size]: the processor predicts a branch, but would wait for the
 * result of the comparison before it loads an indexed child. */
static struct block *best_fit(struct free_blocks *self, long long size)
{
    struct block *best_block = NULL;
    for (struct block **root = root_for(self, size); !best_block && root < self->roots + SIZE_CLASSES; root++)
        for (struct block *block = *root; block;)
            if (block->size < size) {
                block = block->child[1];
            } else {
                best_block = block;
                block = block->child[0];
            }
    return best_block;
}

/* Set a child or root pointer to a block or NULL. */
static void set_link(struct block **link, struct block *block)
{
    *link = block;
    if (block)
        block->link = link;
}

/* Insert a block, which becomes free. Takes over a reference to the block. */
static void insert_block(struct free_blocks *self, struct block *block)
{
    struct block **link = root_for(self, block->size);
    self->random_state =
        self->random_state * 6364136223846793005u + 1442695040888963407u; /* Knuth's MMIX (TAOCP 3.3.4) */
    block->priority = self->random_state >> 32;
    block->gc_count_base = self->counters->searches;
    block->is_free = true;
    while (*link && (*link)->priority > block->priority)
        link = is_before(*link, block) ? &(*link)->child[1] : &(*link)->child[0];
    /* Split the subtree at `link` into the children of this block. child_links[0] and child_links[1] are the links
     * to which the next subtrees of smaller and of larger blocks are attached. */
    struct block *subtree = *link, **child_links[2] = {&block->child[0], &block->child[1]};
    set_link(link, block);
    while (subtree) {
        bool is_smaller = is_before(subtree, block);
        set_link(child_links[!is_smaller], subtree);
        child_links[!is_smaller] = &subtree->child[is_smaller];
        subtree = subtree->child[is_smaller];
    }
    *child_links[0] = *child_links[1] = NULL;
}

/* Remove a block from its tree, after which it is not free. Returns the tree's reference to the block. */
static struct block *remove_block(struct block *block)
{
    struct block **link = block->link, *subtrees[2] = {block->child[0], block->child[1]};
    while (subtrees[0] && subtrees[1]) { /* Join both subtrees: the root with the higher priority comes first. */
        bool is_larger = subtrees[1]->priority > subtrees[0]->priority;
        set_link(link, subtrees[is_larger]);
        link = &subtrees[is_larger]->child[!is_larger];
        subtrees[is_larger] = *link;
    }
    set_link(link, subtrees[0] ? subtrees[0] : subtrees[1]);
    block->child[0] = block->child[1] = NULL;
    block->link = NULL;
    block->is_free = false;
    return block;
}

/* Append the blocks of a subtree with at least a size to a list, in sorted order; return -1 with an exception on
 * failure. */
static int append_blocks_from(const struct block *block, long long size, PyObject *list)
{
    for (; block; block = block->child[1])
        if (block->size >= size &&
            (append_blocks_from(block->child[0], size, list) < 0 || PyList_Append(list, (PyObject *)block) < 0))
            return -1;
    return 0;
}

/* ---- free blocks: the type ------------------------------------------------------------------------------- */

/* bool(free_blocks): return whether there is a free block. */
static int free_blocks_bool(PyObject *self)
{
    return best_fit((struct free_blocks *)self, 0) != NULL;
}

/* blocks_from_size(size): return a list of the blocks of at least a size, in sorted order. */
static PyObject *free_blocks_blocks_from_size(PyObject *self, PyObject *size)
{
    long long min_size = PyLong_AsLongLong(size);
    PyObject *block_list = min_size == -1 && PyErr_Occurred() ? NULL : PyList_New(0);
    for (int i = 0; block_list && i < SIZE_CLASSES; i++)
        if (append_blocks_from(((struct free_blocks *)self)->roots[i], min_size, block_list) < 0)
            Py_CLEAR(block_list);
    return block_list;
}

/* iter(free_blocks): return an iterator over the present blocks, in sorted order. */
static PyObject *free_blocks_iter(PyObject *self)
{
    PyObject *block_list = free_blocks_blocks_from_size(self, state_of(Py_TYPE(self))->zero);
    PyObject *iterator = block_list ? PyObject_GetIter(block_list) : NULL;
    Py_XDECREF(block_list);
    return iterator;
}

/* new_block(ptr, size, expandable_segment=None): create a block of this pool and stream, which is not free. */
static PyObject *free_blocks_new_block(PyObject *self, PyObject *args)
{
    PyObject *ptr, *size, *expandable_segment = Py_None;
    if (!PyArg_ParseTuple(args, "OO|O", &ptr, &size, &expandable_segment))
        return NULL;
    return PyObject_CallFunctionObjArgs((PyObject *)state_of(Py_TYPE(self))->types[BLOCK], ptr, size, self,
                                        expandable_segment, NULL);
}

/* Return an object as a block of this pool and stream. Returns NULL with an exception if it is not such a block, or if
 * it is not free although `is_free` is true, or the reverse. */
static struct block *checked_block(PyObject *self, PyObject *object, bool is_free)
{
    struct block *block = (struct block *)object;
    if (!PyObject_TypeCheck(object, state_of(Py_TYPE(self))->types[BLOCK]) ||
        (PyObject *)block->free_blocks != self || block->is_free != is_free) {
        PyErr_Format(PyExc_ValueError, "not a block of this pool and stream that is%s free",
                     is_free ? "" : " not");
        return NULL;
    }
    return block;
}

/* add(block): insert a block, which becomes free. */
static PyObject *free_blocks_add(PyObject *self, PyObject *object)
{
    struct block *block = checked_block(self, object, false);
    if (!block)
        return NULL;
    insert_block((struct free_blocks *)self, (struct block *)Py_NewRef(object));
    Py_RETURN_NONE;
}

/* remove(block): remove a free block. */
static PyObject *free_blocks_remove(PyObject *self, PyObject *object)
{
    struct block *block = checked_block(self, object, true);
    if (!block)
        return NULL;
    Py_DECREF(remove_block(block));
    Py_RETURN_NONE;
}

/* take(size, limit): remove and return the best fit, or None if there is none below the limit. */
static PyObject *free_blocks_take(PyObject *self, PyObject *args)
{
    long long size, limit;
    if (!PyArg_ParseTuple(args, "LL", &size, &limit))
        return NULL;
    struct block *block = best_fit((struct free_blocks *)self, size);
    if (!block || block->size >= limit)
        Py_RETURN_NONE;
    return (PyObject *)remove_block(block);
}

/* The fields that own references and are set from the arguments of the constructor; the trees are not among them. */
#define FREE_BLOCKS_FIELDS(DO) DO(pool) DO(pool_id) DO(stream) DO(counters)
#define FOR_ROOTS(DO) \
    for (int i = 0; i < SIZE_CLASSES; i++) { \
        DO(roots[i]) \
    }
#define VISIT_ROOTS(DO) FREE_BLOCKS_FIELDS(DO) FOR_ROOTS(DO)
DEFINE_GC_FUNCTIONS(free_blocks, VISIT_ROOTS)

/* FreeBlocks(pool, pool_id, stream, counters): create the free blocks of a pool and stream, without blocks. */
static PyObject *free_blocks_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *argument_names[] = {"pool", "pool_id", "stream", "counters", NULL};
    struct free_blocks parsed_fields, *self;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO!O!", argument_names, &parsed_fields.pool,
                                     &parsed_fields.pool_id, &PyLong_Type, &parsed_fields.stream,
                                     state_of(type)->types[COUNTERS], &parsed_fields.counters) ||
        !(self = (struct free_blocks *)type->tp_alloc(type, 0)))
        return NULL;
    FREE_BLOCKS_FIELDS(COPY)
    return (PyObject *)self;
}

static PyMemberDef free_blocks_members[] = {
    MEMBER(free_blocks, pool, T_OBJECT, READONLY),
    MEMBER(free_blocks, pool_id, T_OBJECT, READONLY),
    MEMBER(free_blocks, counters, T_OBJECT, READONLY),
    MEMBER(free_blocks, stream, T_OBJECT, READONLY),
    END_OF_MEMBERS,
};

static PyMethodDef free_blocks_methods[] = {
    {"new_block", free_blocks_new_block, METH_VARARGS, NULL},
    {"blocks_from_size", free_blocks_blocks_from_size, METH_O, NULL},
    {"add", free_blocks_add, METH_O, NULL},
    {"remove", free_blocks_remove, METH_O, NULL},
    {"take", free_blocks_take, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot free_blocks_slots[] = {
    {Py_tp_new, free_blocks_new},   {Py_tp_members, free_blocks_members}, {Py_tp_methods, free_blocks_methods},
    {Py_nb_bool, free_blocks_bool}, {Py_tp_iter, free_blocks_iter},       GC_SLOTS(free_blocks),
};

#endif
