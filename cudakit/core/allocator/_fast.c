/* The fast path of the caching allocator: alloc and free in C, and the data that they work on.
 *
 * Scope. A program allocates and frees memory millions of times, and nearly every call is the usual case: a free
 * block of the request's stream is large enough, no block waits for another stream, and no option is on. This file
 * performs exactly these calls. All others are passed unchanged to slow_alloc and slow_free of oom.py, which handle
 * every case in Python. So the rules for the other cases are written only once.
 *
 * Plain Python. blocks.py, pool_stats.py, history.py, guard.py and fast_path.py have plain types with the same
 * attributes and methods as the types here. They define the behaviour, are used if no C compiler was available at
 * installation, and are the reference of the tests (tests/core/allocator/test_fast_path.py). native.py derives the
 * types that the allocator uses from those below. The rest of the allocator is written in Python, and works on
 * either kind through attributes and methods.
 *
 * The types, each with data of its own:
 *
 *   Gate           whether the fast path may be used: not while the allocator is busy or an option is on
 *   BlockCounters  counters of the small or the large pools, for the statistics
 *   Block          a piece of a segment, linked with the pieces before and after it
 *   FreeBlocks     the free blocks of one pool and stream, sorted by size and address
 *   Events         the ring of the latest events, while history is recorded
 *   FastPath       alloc and free, which use the five other types
 *
 * FreeBlocks has a treap for each power of two of the sizes: a binary search tree by size and address that is also
 * a heap by a random priority, and therefore balanced on average (Seidel and Aragon 1996). A search descends one
 * path; insertion and removal split and join subtrees. A sorted array would need less code, but with 100,000 free
 * blocks it would move a megabyte in each call. Removal cannot fail, and insertion needs no memory.
 *
 * A free block belongs to its tree, which owns a reference to it. An allocated block belongs to `live`, the
 * dictionary of blocks by address, which the Python code shares. prev and next own references too, so that a
 * block never points to released memory, whatever Python code does with it.
 *
 * Threads and finalizers. The interpreter's lock makes a call atomic, as long as it runs no Python code. Python
 * code may run wherever an object is released or the garbage collector starts: a finalizer may then call this
 * allocator. So every call has three phases:
 *
 *   1. prepare: gather the call stack, create the block for the rest of a split (`spare`). May run Python code.
 *   2. change:  first check the gate again; then change blocks, tree, counters and `live`. Runs no Python code.
 *   3. finish:  record events, and release replaced objects. May run Python code: the change is complete.
 *
 * A finalizer therefore sees the allocator before or after a change, never in the middle. A request that fails
 * for lack of host memory fails in phase 1, before anything has changed.
 *
 * alloc_found_block and free_block do the same as in PyTorch's c10/cuda/CUDACachingAllocator.cpp. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <structmember.h>
#include <time.h>

/* As in torch_rules/sizes.py. */
enum { CLASSES = 55 }; /* of the sizes of 63 bits */
enum { SMALLEST_BLOCK = 512, MOST_SMALL = 1 << 20, LARGE_SLACK = 1 << 20 };
static const long long TOO_MANY_BYTES = 1LL << 60;
/* CU_STREAM_LEGACY and CU_STREAM_PER_THREAD (CUDA Driver API, data types). */
enum { LEGACY_STREAM = 1, PER_THREAD_STREAM = 2 };
/* As in history.Level. */
enum { LEVEL_STATE = 1, LEVEL_ALLOC = 2, LEVEL_ALL = 3 };

#define MEMBER(type, name, kind, flags) {#name, kind, offsetof(struct type, name), flags, NULL}
#define END {NULL, 0, 0, 0, NULL}
/* To apply to each field of a list of references. */
#define VISIT(field) Py_VISIT(self->field);
#define CLEAR(field) Py_CLEAR(self->field);
#define COPY(field) self->field = (void *)Py_XNewRef((PyObject *)given.field);
/* The functions of the garbage collector for a type, of which FIELDS lists the references. */
#define COLLECTED(type, FIELDS) \
    static int type##_traverse(PyObject *object, visitproc visit, void *arg) \
    { \
        struct type *self = (struct type *)object; \
        Py_VISIT(Py_TYPE(object)); \
        FIELDS(VISIT) \
        return 0; \
    } \
    static int type##_clear(PyObject *object) \
    { \
        struct type *self = (struct type *)object; \
        FIELDS(CLEAR) \
        return 0; \
    }
#define COLLECTED_SLOTS(type) \
    {Py_tp_traverse, type##_traverse}, {Py_tp_clear, type##_clear}, {Py_tp_dealloc, dealloc}, \
    { \
        0, NULL \
    }

enum type { GATE, COUNTERS, BLOCK, FREE_BLOCKS, EVENTS, FAST_PATH, TYPES };

struct state {
    PyTypeObject *types[TYPES];
    PyObject *zero, *stream, *alloc, *free_requested, *free_completed;
};
static struct PyModuleDef module;

static struct state *state_of(PyTypeObject *type)
{
    return PyModule_GetState(PyType_GetModuleByDef(type, &module));
}

static void dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    type->tp_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

/* ---- gate and counters ----------------------------------------------------------------------------------- */

struct gate {
    PyObject_HEAD
    char busy; /* a call changes the allocator */
    char slow; /* an option is on that the fast path does not know */
};

static PyMemberDef gate_members[] = {MEMBER(gate, busy, T_BOOL, 0), MEMBER(gate, slow, T_BOOL, 0), END};
static PyType_Slot gate_slots[] = {{Py_tp_members, gate_members}, {0, NULL}};

struct counter {
    long long current, sum, peak;
};

enum counted { ALLOCATION, ALLOCATED_BYTES, REQUESTED_BYTES, INACTIVE_SPLIT, INACTIVE_SPLIT_BYTES, COUNTED };

/* Counters of the small or the large pools. Of the total of both, only the peaks are used. */
struct counters {
    PyObject_HEAD
    struct counter of[COUNTED];
    long long searches;
};

#define STAT(name, counted) \
    {name, T_LONGLONG, offsetof(struct counters, of[counted].current), 0, NULL}, \
        {name "_sum", T_LONGLONG, offsetof(struct counters, of[counted].sum), 0, NULL}, \
    { \
        name "_peak", T_LONGLONG, offsetof(struct counters, of[counted].peak), 0, NULL \
    }

static PyMemberDef counters_members[] = {
    STAT("allocation", ALLOCATION),
    STAT("allocated_bytes", ALLOCATED_BYTES),
    STAT("requested_bytes", REQUESTED_BYTES),
    STAT("inactive_split", INACTIVE_SPLIT),
    STAT("inactive_split_bytes", INACTIVE_SPLIT_BYTES),
    MEMBER(counters, searches, T_LONGLONG, 0),
    END,
};

static PyType_Slot counters_slots[] = {{Py_tp_members, counters_members}, {0, NULL}};

/* ---- blocks ---------------------------------------------------------------------------------------------- */

struct block {
    PyObject_HEAD
    long long ptr, size;
    /* In the tree of its free blocks. First, to share a cache line with the keys. */
    struct block *child[2]; /* blocks before this one, and after it */
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
    struct block given = {.expandable_segment = Py_None}, *self;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "LLO!|O", names, &given.ptr, &given.size,
                                     state_of(type)->types[FREE_BLOCKS], &given.free_blocks,
                                     &given.expandable_segment) ||
        !(self = (struct block *)type->tp_alloc(type, 0)))
        return NULL;
    self->ptr = given.ptr;
    self->size = given.size;
    self->mapped = true;
    BLOCK_FIELDS(COPY)
    return (PyObject *)self;
}

/* Set prev or next; the closure is its offset. */
static int set_neighbor(PyObject *self, PyObject *value, void *offset)
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

static PyObject *get_neighbor(PyObject *self, void *offset)
{
    PyObject *found = *(PyObject **)((char *)self + (size_t)offset);
    return Py_NewRef(found ? found : Py_None);
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
    {"prev", get_neighbor, set_neighbor, NULL, (void *)offsetof(struct block, prev)},
    {"next", get_neighbor, set_neighbor, NULL, (void *)offsetof(struct block, next)},
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

/* Return the smallest block of at least a size, of equal ones that at the lowest address; or NULL. The branch is
 * predicted when a way is taken again; to compute the index of the child would wait for the comparison. */
static struct block *best_fit(struct free_blocks *self, long long size)
{
    struct block *found = NULL;
    for (struct block **root = root_for(self, size); !found && root < self->roots + CLASSES; root++)
        for (struct block *block = *root; block;)
            if (block->size < size) {
                block = block->child[1];
            } else {
                found = block;
                block = block->child[0];
            }
    return found;
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
    /* Split the subtree there: the blocks before this one become its first child, the others its second. */
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

/* Return a block of this pool and stream that is free, or not; NULL with an exception for any other object. */
static struct block *own_block(PyObject *self, PyObject *object, bool free)
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
    struct block *block = own_block(self, object, false);
    if (!block)
        return NULL;
    insert((struct free_blocks *)self, (struct block *)Py_NewRef(object));
    Py_RETURN_NONE;
}

static PyObject *free_blocks_remove(PyObject *self, PyObject *object)
{
    struct block *block = own_block(self, object, true);
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
    struct free_blocks given, *self;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO!O!", names, &given.pool, &given.pool_id, &PyLong_Type,
                                     &given.stream, state_of(type)->types[COUNTERS], &given.counters) ||
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

/* ---- events ---------------------------------------------------------------------------------------------- */

struct event {
    PyObject *action; /* NULL: Python code appended the event, and `stack` is all of it, a tuple */
    PyObject *stack, *metadata;
    struct free_blocks *free_blocks; /* which knows the stream and the pool */
    long long address, size, time_ns;
};
#define EVENT_FIELDS(DO) DO(action) DO(stack) DO(metadata) DO(free_blocks)

/* The last maxlen events of all that were appended. */
struct events {
    PyObject_HEAD
    struct event *ring;               /* the next event replaces that at count % maxlen */
    PyObject *metadata;               /* of the next events */
    Py_ssize_t maxlen, length, count; /* count: of all; until it reaches maxlen, the length of the ring grows */
};

static int events_traverse(PyObject *object, visitproc visit, void *arg)
{
    struct events *events = (struct events *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(events->metadata);
    for (struct event *self = events->ring; self < events->ring + events->length; self++) {
        EVENT_FIELDS(VISIT)
    }
    return 0;
}

static int events_clear(PyObject *object)
{
    struct events *events = (struct events *)object;
    struct event *ring = events->ring, *end = ring + events->length;
    events->ring = NULL;
    events->length = events->count = 0;
    for (struct event *self = ring; self < end; self++) {
        EVENT_FIELDS(CLEAR)
    }
    PyMem_Free(ring);
    Py_CLEAR(events->metadata);
    return 0;
}

static PyObject *events_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"maxlen", "metadata", NULL};
    struct events given, *self;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "nO", names, &given.maxlen, &given.metadata) ||
        !(self = (struct events *)type->tp_alloc(type, 0)))
        return NULL;
    self->maxlen = Py_MAX(given.maxlen, 1);
    self->metadata = Py_NewRef(given.metadata);
    return (PyObject *)self;
}

/* Append an event; false with an exception if no memory is left. This may run a finalizer of a dropped event. */
static bool append_event(struct events *self, struct event given)
{
    if (self->count == self->length && self->length < self->maxlen) {
        Py_ssize_t length = Py_MIN(self->maxlen, self->length * 2 + 64);
        struct event *ring = PyMem_Realloc(self->ring, (size_t)length * sizeof *ring);
        if (!ring)
            return PyErr_NoMemory();
        memset(ring + self->length, 0, (size_t)(length - self->length) * sizeof *ring);
        self->ring = ring;
        self->length = length;
    }
    struct event *place = self->ring + self->count++ % self->maxlen, dropped = *place;
#define INCREF(field) Py_XINCREF(given.field);
#define DECREF(field) Py_XDECREF(dropped.field);
    EVENT_FIELDS(INCREF)
    *place = given;
    EVENT_FIELDS(DECREF)
    return true;
}

static PyObject *events_append(PyObject *self, PyObject *event)
{
    if (!PyTuple_Check(event))
        return PyErr_Format(PyExc_TypeError, "an event is a tuple");
    if (!append_event((struct events *)self, (struct event){.stack = event}))
        return NULL;
    Py_RETURN_NONE;
}

/* Return an iterator of a list of tuples. Its creation may run a finalizer that appends events, and so drops
 * others: hence the references. */
static PyObject *events_iter(PyObject *object)
{
    struct events *self = (struct events *)object;
    Py_ssize_t length = Py_MIN(self->count, self->maxlen), first = self->count - length;
    PyObject *list = PyList_New(length), *iterator = NULL;
    for (Py_ssize_t i = 0; list && i < length; i++) {
        const struct event given = self->ring[(first + i) % self->maxlen], dropped = given;
        EVENT_FIELDS(INCREF)
        PyObject *tuple = given.action ? Py_BuildValue("OLLOLOOO", given.action, given.address, given.size,
                                                       given.free_blocks->stream, given.time_ns, given.stack,
                                                       given.free_blocks->pool_id, given.metadata)
                                       : Py_NewRef(given.stack);
        EVENT_FIELDS(DECREF)
        if (tuple)
            PyList_SET_ITEM(list, i, tuple);
        else
            Py_CLEAR(list);
    }
    if (list)
        iterator = PyObject_GetIter(list);
    Py_XDECREF(list);
    return iterator;
}

static PyMemberDef events_members[] = {
    MEMBER(events, maxlen, T_PYSSIZET, READONLY),
    MEMBER(events, count, T_PYSSIZET, READONLY),
    MEMBER(events, metadata, T_OBJECT, 0),
    END,
};

static PyMethodDef events_methods[] = {{"append", events_append, METH_O, NULL}, {NULL, NULL, 0, NULL}};

static PyType_Slot events_slots[] = {
    {Py_tp_new, events_new},   {Py_tp_members, events_members}, {Py_tp_methods, events_methods},
    {Py_tp_iter, events_iter}, COLLECTED_SLOTS(events),
};

/* ---- alloc and free: the change -------------------------------------------------------------------------- */

struct fast_path {
    PyObject_HEAD
    struct state *state;
    struct gate *gate;
    PyObject *live, *slow_alloc, *slow_free;
    PyObject *small_by_stream, *large_by_stream; /* FreeBlocks of the default pool */
    struct counters *small, *large, *total;
    PyTypeObject *block_type; /* a subclass of Block */
    struct block *spare;      /* for the rest of a split */
    struct events *events;    /* NULL: no history is recorded */
    PyObject *gather;         /* returns the call stack of its caller */
    long level;               /* as in history.Level: whose stacks are gathered */
};

static void count(const struct fast_path *self, struct counters *counters, enum counted counted, long long change)
{
    const struct counters *other = counters == self->small ? self->large : self->small;
    struct counter *counter = &counters->of[counted];
    long long *peak = &self->total->of[counted].peak;
    counter->current += change;
    if (change <= 0)
        return;
    counter->sum += change;
    counter->peak = Py_MAX(counter->peak, counter->current);
    *peak = Py_MAX(*peak, counter->current + other->of[counted].current);
}

/* Count allocated blocks, or with a negative sign freed ones. */
static void count_block(const struct fast_path *self, const struct block *block, int sign)
{
    struct counters *counters = block->free_blocks->counters;
    count(self, counters, ALLOCATION, sign);
    count(self, counters, ALLOCATED_BYTES, sign * block->size);
    count(self, counters, REQUESTED_BYTES, sign * block->requested);
}

/* Count the free blocks of split segments. */
static void count_split(const struct fast_path *self, const struct block *block, int blocks, long long size)
{
    count(self, block->free_blocks->counters, INACTIVE_SPLIT, blocks);
    count(self, block->free_blocks->counters, INACTIVE_SPLIT_BYTES, size);
}

/* Cut a block down to a size; the rest, in the spare block, becomes free. */
static void split(struct fast_path *self, struct block *block, long long size)
{
    struct block *rest = self->spare, *after = block->next;
    bool is_whole = !after && !block->prev;
    self->spare = NULL;
    rest->ptr = block->ptr + size;
    rest->size = block->size - size;
    rest->requested = block->requested; /* of the last request, as PyTorch's inactive blocks show */
    rest->event_count = 0;
    rest->mapped = true;
    rest->free_blocks = (struct free_blocks *)Py_NewRef(block->free_blocks);
    rest->segment_stack = block->segment_stack;
    block->segment_stack = NULL;
    rest->prev = (struct block *)Py_NewRef(block);
    rest->next = after; /* with the reference of block->next */
    if (after)
        Py_SETREF(after->prev, (struct block *)Py_NewRef(rest));
    block->next = (struct block *)Py_NewRef(rest);
    block->size = size;
    count_split(self, block, is_whole, is_whole ? rest->size : -size);
    insert(block->free_blocks, rest);
}

/* Allocate a block that is in no tree. */
static void alloc_found_block(struct fast_path *self, struct block *block, long long size, long long requested)
{
    long long rest = block->size - size;
    if (size <= MOST_SMALL ? rest >= SMALLEST_BLOCK : rest > LARGE_SLACK)
        split(self, block, size);
    else if (block->prev || block->next)
        count_split(self, block, -1, -block->size);
    block->allocated = true;
    block->requested = requested;
    count_block(self, block, 1);
}

/* Merge the block after this one into it; return the merged block with a reference of the caller's. */
static struct block *absorb_next(struct block *self)
{
    struct block *absorbed = self->next, *after = absorbed->next;
    self->size += absorbed->size;
    self->next = after; /* with the reference that the absorbed block had */
    absorbed->next = NULL;
    Py_CLEAR(absorbed->prev); /* this block, which the caller holds */
    if (after) {
        after->prev = (struct block *)Py_NewRef(self);
        Py_DECREF(absorbed); /* not the last: that of self->next is the caller's now */
    }
    return absorbed;
}

/* Remove the block before or after a freed one from the tree, to merge both; false if it is not free. */
static bool take_neighbor(struct free_blocks *free, struct block *neighbor)
{
    return neighbor && neighbor->free && neighbor->free_blocks == free && take(neighbor);
}

/* Free an allocated block, merged with its free neighbors; the caller gets these, and has its stack. */
static void free_block(struct fast_path *self, struct block *block, struct block *absorbed[2])
{
    struct free_blocks *free = block->free_blocks;
    struct block *before = block->prev, *after = block->next;
    int blocks = 0;
    long long size = 0;
    block->allocated = false;
    block->stack = NULL;
    count_block(self, block, -1);
    if (take_neighbor(free, after)) {
        blocks--;
        size -= after->size;
        Py_DECREF(after); /* not the last: block->next is one */
        absorbed[0] = absorb_next(block);
    }
    if (take_neighbor(free, before)) { /* its reference goes to insert */
        blocks--;
        size -= before->size;
        before->requested = block->requested;
        absorbed[1] = absorb_next(before);
        block = before;
    } else {
        Py_INCREF(block);
    }
    insert(free, block);
    if (block->prev || block->next)
        count_split(self, block, blocks + 1, size + block->size);
    else
        count_split(self, block, blocks, size);
}

/* ---- alloc and free: prepare and finish ------------------------------------------------------------------ */

/* Return whether the allocator may be changed here. */
static bool is_open(const struct fast_path *self)
{
    return self->gate && !self->gate->busy && !self->gate->slow;
}

/* Gather the call stack if those of a level are recorded; false with an exception. */
static bool gather_stack(const struct fast_path *self, long level, PyObject **stack)
{
    if (self->level < level)
        return true;
    PyObject *gather = Py_NewRef(self->gather); /* which the call may replace */
    *stack = PyObject_CallNoArgs(gather);
    Py_DECREF(gather);
    return *stack;
}

/* Create the block for the rest of a split; false with an exception. */
static bool create_spare(struct fast_path *self)
{
    struct block *spare = self->spare ? NULL : (struct block *)self->block_type->tp_alloc(self->block_type, 0);
    if (spare)
        Py_XSETREF(self->spare, spare); /* a finalizer may have created one meanwhile */
    return self->spare;
}

/* Keep a block that was merged away as the spare one, unless it is referenced elsewhere; takes the reference. */
static void keep_spare(struct fast_path *self, struct block *block)
{
    if (block && Py_REFCNT(block) == 1)
        block_clear((PyObject *)block);
    if (block && !block->free_blocks && !self->spare)
        self->spare = block;
    else
        Py_XDECREF(block);
}

/* Return the event of an allocated block, with borrowed references; without a stack, with that of the block. */
static struct event event_of(const struct fast_path *self, const struct block *block, PyObject *stack)
{
    stack = stack ? stack : block->stack;
    return (struct event){
        .stack = stack && self->level >= LEVEL_ALLOC ? stack : Py_None,
        .free_blocks = block->free_blocks,
        .address = block->ptr,
        .size = block->requested,
    };
}

/* Record an event, and the same with another action. An exception is reported, not raised: the change is made. */
static void record(const struct fast_path *self, struct event event, PyObject *action, PyObject *next_action)
{
    struct events *events = (struct events *)Py_XNewRef((PyObject *)self->events); /* finalizers may replace it */
    struct timespec now;                                                           /* as time.perf_counter_ns */
    if (!events)
        return;
    clock_gettime(CLOCK_MONOTONIC, &now);
    event.time_ns = now.tv_sec * 1000000000LL + now.tv_nsec;
    event.metadata = Py_NewRef(events->metadata ? events->metadata : Py_None);
    event.action = action;
    bool recorded = append_event(events, event);
    event.action = next_action;
    if (!recorded || (next_action && !append_event(events, event)))
        PyErr_WriteUnraisable((PyObject *)events);
    Py_DECREF(event.metadata);
    Py_DECREF(events);
}

/* Read a size, an address or a stream; false if it is not a plain integer in range. */
static bool read_int(PyObject *object, long long *value)
{
    int overflow = 1;
    if (PyLong_CheckExact(object))
        *value = PyLong_AsLongLongAndOverflow(object, &overflow);
    return !overflow;
}

/* Return the number of arguments, one or two, of which the second may be called stream; 0 for all others. */
static Py_ssize_t count_arguments(const struct fast_path *self, Py_ssize_t nargs, PyObject *kwnames)
{
    if (!kwnames)
        return nargs <= 2 ? nargs : 0;
    bool names_stream = nargs == 1 && PyTuple_GET_SIZE(kwnames) == 1;
    return names_stream && PyTuple_GET_ITEM(kwnames, 0) == self->state->stream ? 2 : 0;
}

static PyObject *call_slow(PyObject *call, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    if (PyErr_Occurred())
        return NULL;
    return call ? PyObject_Vectorcall(call, args, (size_t)nargs, kwnames)
                : PyErr_Format(PyExc_RuntimeError, "the allocator was garbage-collected");
}

/* Allocate the best fit of the default pool; NULL, perhaps with an exception, if there is none. */
static PyObject *alloc_best_fit(struct fast_path *self, PyObject *stream, long long requested, PyObject *stack)
{
    long long size = (requested + SMALLEST_BLOCK - 1) & -SMALLEST_BLOCK;
    PyObject *by_stream = size <= MOST_SMALL ? self->small_by_stream : self->large_by_stream;
    PyObject *found = PyDict_GetItemWithError(by_stream, stream);
    bool is_known = found && PyObject_TypeCheck(found, self->state->types[FREE_BLOCKS]);
    struct block *block = is_known ? best_fit((struct free_blocks *)found, size) : NULL;
    PyObject *ptr = block ? PyLong_FromLongLong(block->ptr) : NULL;
    if (!ptr || PyDict_SetItem(self->live, ptr, (PyObject *)block) < 0) {
        Py_XDECREF(ptr);
        return NULL;
    }
    take(block);
    PyObject *dropped = block->stack;
    alloc_found_block(self, block, size, requested);
    block->stack = Py_XNewRef(stack);
    record(self, event_of(self, block, NULL), self->state->alloc, NULL);
    Py_XDECREF(dropped);
    Py_DECREF(block); /* the reference of the tree; `live` has its own */
    return ptr;
}

static PyObject *fast_path_alloc(PyObject *object, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    struct fast_path *self = (struct fast_path *)object;
    Py_ssize_t given = count_arguments(self, nargs, kwnames);
    PyObject *stream = given == 2 ? args[1] : self->state->zero, *stack = NULL, *ptr = NULL;
    long long requested, number;
    if (given && is_open(self) && read_int(args[0], &requested) && requested > 0 && requested < TOO_MANY_BYTES &&
        read_int(stream, &number) && number != PER_THREAD_STREAM && gather_stack(self, LEVEL_STATE, &stack) &&
        create_spare(self) && is_open(self))
        ptr = alloc_best_fit(self, number == LEGACY_STREAM ? self->state->zero : stream, requested, stack);
    Py_XDECREF(stack);
    return ptr ? ptr : call_slow(self->slow_alloc, args, nargs, kwnames);
}

/* Return the live block at an address, if its free is a usual one; NULL, perhaps with an exception, if not. */
static struct block *find_usual(const struct fast_path *self, PyObject *ptr, PyObject *stream)
{
    struct block *block = (struct block *)PyDict_GetItemWithError(self->live, ptr);
    long long number, own;
    if (!block || !Py_IS_TYPE(block, self->block_type) || block->free ||
        (block->stream_uses && block->stream_uses != Py_None) ||
        (block->expandable_segment && block->expandable_segment != Py_None))
        return NULL;
    if (stream == Py_None)
        return block;
    if (!read_int(stream, &number) || !read_int(block->free_blocks->stream, &own))
        return NULL;
    return own == (number == LEGACY_STREAM ? 0 : number) ? block : NULL;
}

static PyObject *fast_path_free(PyObject *object, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    struct fast_path *self = (struct fast_path *)object;
    Py_ssize_t given = count_arguments(self, nargs, kwnames);
    PyObject *stream = given == 2 ? args[1] : Py_None, *stack = NULL;
    struct block *block = NULL, *absorbed[2] = {NULL, NULL};
    /* Only plain integers: to compare another key could run Python code. */
    if (given && is_open(self) && PyLong_CheckExact(args[0]) && gather_stack(self, LEVEL_ALL, &stack) &&
        is_open(self))
        block = (struct block *)Py_XNewRef((PyObject *)find_usual(self, args[0], stream));
    if (!block || PyDict_DelItem(self->live, args[0]) < 0) {
        Py_XDECREF(stack);
        Py_XDECREF(block);
        return call_slow(self->slow_free, args, nargs, kwnames);
    }
    struct event event = event_of(self, block, stack);
    PyObject *dropped = block->stack;
    free_block(self, block, absorbed);
    record(self, event, self->state->free_requested, self->state->free_completed);
    Py_DECREF(block);
    keep_spare(self, absorbed[0]);
    keep_spare(self, absorbed[1]);
    Py_XDECREF(stack);
    Py_XDECREF(dropped);
    Py_RETURN_NONE;
}

/* set_history(events, level, gather): record the events of alloc and free, with the stacks that gather returns. */
static PyObject *fast_path_set_history(PyObject *object, PyObject *args)
{
    struct fast_path *self = (struct fast_path *)object, given = {.level = 0};
    PyObject *events;
    if (!PyArg_ParseTuple(args, "OlO", &events, &given.level, &given.gather))
        return NULL;
    if (events != Py_None && !PyObject_TypeCheck(events, self->state->types[EVENTS]))
        return PyErr_Format(PyExc_TypeError, "the events of the history are not native");
    self->level = given.level;
    Py_XSETREF(self->gather, Py_NewRef(given.gather));
    Py_XSETREF(self->events, events == Py_None ? NULL : (struct events *)Py_NewRef(events));
    Py_RETURN_NONE;
}

#define FAST_PATH_FIELDS(DO) \
    DO(gate) /* first: after it, calls change nothing */ \
    DO(live) \
    DO(slow_alloc) \
    DO(slow_free) \
    DO(small_by_stream) \
    DO(large_by_stream) DO(small) DO(large) DO(total) DO(block_type) DO(spare) DO(events) DO(gather)
COLLECTED(fast_path, FAST_PATH_FIELDS)

static PyObject *fast_path_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"gate",  "live",       "small_by_stream", "large_by_stream", "small", "large",
                            "total", "block_type", "slow_alloc",      "slow_free",       NULL};
    struct state *state = state_of(type);
    PyTypeObject *dict = &PyDict_Type, **types = state->types;
    struct fast_path given = {.level = 0}, *self;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!O!O!O!O!O!O!OO", names, types[GATE], &given.gate, dict,
                                     &given.live, dict, &given.small_by_stream, dict, &given.large_by_stream,
                                     types[COUNTERS], &given.small, types[COUNTERS], &given.large, types[COUNTERS],
                                     &given.total, &PyType_Type, &given.block_type, &given.slow_alloc,
                                     &given.slow_free))
        return NULL;
    if (!PyType_IsSubtype(given.block_type, types[BLOCK]))
        return PyErr_Format(PyExc_TypeError, "the type of blocks is not a subclass of Block");
    if (!(self = (struct fast_path *)type->tp_alloc(type, 0)))
        return NULL;
    self->state = state;
    FAST_PATH_FIELDS(COPY)
    return (PyObject *)self;
}

static PyMethodDef fast_path_methods[] = {
    {"alloc", (PyCFunction)(void (*)(void))fast_path_alloc, METH_FASTCALL | METH_KEYWORDS, NULL},
    {"free", (PyCFunction)(void (*)(void))fast_path_free, METH_FASTCALL | METH_KEYWORDS, NULL},
    {"set_history", fast_path_set_history, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot fast_path_slots[] = {
    {Py_tp_new, fast_path_new},
    {Py_tp_methods, fast_path_methods},
    COLLECTED_SLOTS(fast_path),
};

/* ---- the module ------------------------------------------------------------------------------------------ */

#define SPEC(name, type, flags) \
    {"cudakit.core.allocator._fast." name, sizeof(struct type), 0, \
     Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | (flags), type##_slots}

static int exec_module(PyObject *self)
{
    static PyType_Spec specs[TYPES] = {
        [GATE] = SPEC("Gate", gate, 0),
        [COUNTERS] = SPEC("BlockCounters", counters, 0),
        [BLOCK] = SPEC("Block", block, Py_TPFLAGS_HAVE_GC),
        [FREE_BLOCKS] = SPEC("FreeBlocks", free_blocks, Py_TPFLAGS_HAVE_GC),
        [EVENTS] = SPEC("Events", events, Py_TPFLAGS_HAVE_GC),
        [FAST_PATH] = SPEC("FastPath", fast_path, Py_TPFLAGS_HAVE_GC),
    };
    struct state *state = PyModule_GetState(self);
    for (int i = 0; i < TYPES; i++) {
        state->types[i] = (PyTypeObject *)PyType_FromModuleAndSpec(self, &specs[i], NULL);
        if (!state->types[i] || PyModule_AddType(self, state->types[i]) < 0)
            return -1;
    }
    bool made = (state->zero = PyLong_FromLong(0)) && (state->stream = PyUnicode_InternFromString("stream")) &&
                (state->alloc = PyUnicode_InternFromString("alloc")) &&
                (state->free_requested = PyUnicode_InternFromString("free_requested")) &&
                (state->free_completed = PyUnicode_InternFromString("free_completed"));
    return made ? 0 : -1;
}

static int traverse_module(PyObject *self, visitproc visit, void *arg)
{
    struct state *state = PyModule_GetState(self);
    for (int i = 0; i < TYPES; i++)
        Py_VISIT(state->types[i]);
    return 0;
}

static int clear_module(PyObject *self)
{
    struct state *state = PyModule_GetState(self);
    for (int i = 0; i < TYPES; i++)
        Py_CLEAR(state->types[i]);
    return 0;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, exec_module},
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_PER_INTERPRETER_GIL_SUPPORTED},
#endif
    {0, NULL}, /* Py_mod_gil stays undeclared: the interpreter's lock makes a change atomic */
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,          .m_name = "cudakit.core.allocator._fast",
    .m_size = sizeof(struct state), .m_slots = module_slots,
    .m_traverse = traverse_module,  .m_clear = clear_module,
};

PyMODINIT_FUNC PyInit__fast(void)
{
    return PyModuleDef_Init(&module);
}
