/* The fast path of the allocator: native types with their own data for blocks, free blocks and counters, and the
 * usual case of alloc and free. blocks.py, pool_stats.py and fast_path.py define what each does; they are the
 * fallback without a compiler, and the oracle of the tests. Everything unusual goes to the same slow calls.
 *
 * A change of the state runs no Python: the objects it needs are made before, and those it drops are released
 * after. So with the interpreter's lock a finalizer or another thread sees the state before it or after it. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stddef.h>
#include <structmember.h>
#include <time.h>

/* As in torch_rules/sizes.py. */
enum { SMALLEST_BLOCK = 512, MOST_SMALL = 1 << 20, LARGE_SLACK = 1 << 20 };
static const long long TOO_MANY_BYTES = 1LL << 60;
/* CU_STREAM_LEGACY and CU_STREAM_PER_THREAD (CUDA Driver API, data types). */
enum { LEGACY_STREAM = 1, PER_THREAD_STREAM = 2 };
/* As in history.Level. */
enum { LEVEL_STATE = 1, LEVEL_ALLOC = 2, LEVEL_ALL = 3 };

#define MEMBER(type, name, kind, flags) {#name, kind, offsetof(struct type, name), flags, NULL}
#define END {NULL, 0, 0, 0, NULL}

/* The names of attributes and methods, and the actions of events. */
#define NAMES(DO) \
    DO(busy) \
    DO(searches) \
    DO(id) \
    DO(metadata) DO(events) DO(level) DO(slow_alloc) DO(slow_free) DO(alloc) DO(free_requested) DO(free_completed)
#define DECLARE(name) *name,

struct state {
    PyTypeObject *counters, *block, *free_blocks, *events_type;
    PyObject NAMES(DECLARE) * zero;
};
static struct PyModuleDef module;

static struct state *state_of(PyTypeObject *type)
{
    return PyModule_GetState(PyType_GetModuleByDef(type, &module));
}

/* Deallocate an object that refers to others. */
static void dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    type->tp_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

/* ---- counters -------------------------------------------------------------------------------------------- */

struct counter {
    long long current, sum, peak;
};

/* Counters of the small or the large pools. Of the total of both, only the peaks are used. */
struct counters {
    PyObject_HEAD
    struct counter allocation, allocated_bytes, requested_bytes, inactive_split, inactive_split_bytes;
};

static void count(struct counter *counter, const struct counter *other, struct counter *total, long long change)
{
    counter->current += change;
    if (change <= 0)
        return;
    counter->sum += change;
    if (counter->current > counter->peak)
        counter->peak = counter->current;
    if (counter->current + other->current > total->peak)
        total->peak = counter->current + other->current;
}

#define STAT(name) \
    {#name, T_LONGLONG, offsetof(struct counters, name.current), 0, NULL}, \
        {#name "_sum", T_LONGLONG, offsetof(struct counters, name.sum), 0, NULL}, \
    { \
        #name "_peak", T_LONGLONG, offsetof(struct counters, name.peak), 0, NULL \
    }

static PyMemberDef counters_members[] = {
    STAT(allocation),     STAT(allocated_bytes),      STAT(requested_bytes),
    STAT(inactive_split), STAT(inactive_split_bytes), END,
};

static PyType_Slot counters_slots[] = {{Py_tp_members, counters_members}, {0, NULL}};

/* ---- blocks ---------------------------------------------------------------------------------------------- */

struct block {
    PyObject_HEAD
    long long ptr, size;
    /* In the tree of its free blocks, which owns the references. First, to share a cache line with the keys. */
    struct block *below, *above;
    uint64_t priority;
    long long requested, gc_count_base;
    struct free_blocks *free_blocks;
    struct block *prev, *next;
    PyObject *expandable_segment, *stream_uses, *stack, *segment_stack;
    int event_count;
    char free, allocated, mapped;
};

/* Sorted by size and address: a treap (Seidel and Aragon 1996), whose random priorities keep it balanced. */
struct free_blocks {
    PyObject_HEAD
    PyObject *pool, *stream;
    struct counters *counters;
    struct block *root;
};

static int block_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"ptr", "size", "free_blocks", "expandable_segment", NULL};
    struct block *self = (struct block *)object;
    PyObject *free_blocks, *expandable_segment = Py_None;
    PyTypeObject *type = state_of(Py_TYPE(object))->free_blocks;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "LLO!|O", names, &self->ptr, &self->size, type, &free_blocks,
                                     &expandable_segment))
        return -1;
    self->mapped = true;
    Py_XSETREF(self->free_blocks, (struct free_blocks *)Py_NewRef(free_blocks));
    Py_XSETREF(self->expandable_segment, Py_NewRef(expandable_segment));
    return 0;
}

static int block_traverse(PyObject *object, visitproc visit, void *arg)
{
    struct block *self = (struct block *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->free_blocks);
    Py_VISIT(self->prev);
    Py_VISIT(self->next);
    Py_VISIT(self->expandable_segment);
    Py_VISIT(self->stream_uses);
    Py_VISIT(self->stack);
    Py_VISIT(self->segment_stack);
    return 0;
}

static int block_clear(PyObject *object)
{
    struct block *self = (struct block *)object;
    Py_CLEAR(self->free_blocks);
    Py_CLEAR(self->prev);
    Py_CLEAR(self->next);
    Py_CLEAR(self->expandable_segment);
    Py_CLEAR(self->stream_uses);
    Py_CLEAR(self->stack);
    Py_CLEAR(self->segment_stack);
    return 0;
}

/* The closure is the offset of prev or next. */
static PyObject *get_neighbor(PyObject *self, void *offset)
{
    PyObject *found = *(PyObject **)((char *)self + (size_t)offset);
    return Py_NewRef(found ? found : Py_None);
}

static int set_neighbor(PyObject *self, PyObject *value, void *offset)
{
    PyObject **place = (PyObject **)((char *)self + (size_t)offset);
    if (value && value != Py_None && Py_TYPE(value) != Py_TYPE(self)) {
        PyErr_SetString(PyExc_TypeError, "not a block of the same type");
        return -1;
    }
    Py_XSETREF(*place, value && value != Py_None ? Py_NewRef(value) : NULL);
    return 0;
}

/* Merge the next block, which is in no tree, into this one; return it with a reference of the caller's. */
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
    {Py_tp_init, block_init},
    {Py_tp_members, block_members},
    {Py_tp_getset, block_getset},
    {Py_tp_traverse, block_traverse},
    {Py_tp_clear, block_clear},
    {Py_tp_dealloc, dealloc},
    {0, NULL},
};

/* ---- free blocks ----------------------------------------------------------------------------------------- */

static bool is_before(const struct block *block, long long size, long long ptr)
{
    return block->size < size || (block->size == size && block->ptr < ptr);
}

/* Return the place of the smallest block of at least a size, of equal ones that at the lowest address; or NULL. */
static struct block **best_fit(struct free_blocks *self, long long size)
{
    struct block **found = NULL;
    for (struct block **place = &self->root; *place;)
        if ((*place)->size < size) {
            place = &(*place)->above;
        } else {
            found = place;
            place = &(*place)->below;
        }
    return found;
}

/* Insert a block, whose reference the tree takes. */
static void insert(struct free_blocks *self, struct block *block)
{
    static const uint64_t MULTIPLIER = 0x9E3779B97F4A7C15u; /* Fibonacci hashing (Knuth, TAOCP 6.4) */
    uint64_t hash = ((uint64_t)block->ptr >> 9) * MULTIPLIER;
    struct block **place = &self->root;
    block->priority = (hash ^ hash >> 32) * MULTIPLIER;
    while (*place && (*place)->priority > block->priority)
        place = is_before(*place, block->size, block->ptr) ? &(*place)->above : &(*place)->below;
    /* Split the subtree there: what is before the block goes below it, the rest above. */
    struct block *rest = *place, **below = &block->below, **above = &block->above;
    *place = block;
    while (rest) {
        bool before = is_before(rest, block->size, block->ptr);
        struct block ***end = before ? &below : &above;
        **end = rest;
        *end = before ? &rest->above : &rest->below;
        rest = **end;
    }
    *below = *above = NULL;
    block->free = true;
}

/* Remove the block of a place, whose reference the caller gets. */
static struct block *take_from(struct block **place)
{
    struct block *block = *place, *below = block->below, *above = block->above;
    while (below && above) { /* join both subtrees */
        bool lower = below->priority > above->priority;
        *place = lower ? below : above;
        place = lower ? &below->above : &above->below;
        if (lower)
            below = *place;
        else
            above = *place;
    }
    *place = below ? below : above;
    block->below = block->above = NULL;
    block->free = false;
    return block;
}

/* Remove a block, whose reference the caller gets; false if it is not in the tree. */
static bool remove_block(struct free_blocks *self, struct block *block)
{
    struct block **place = &self->root;
    while (*place && *place != block)
        place = is_before(*place, block->size, block->ptr) ? &(*place)->above : &(*place)->below;
    bool found = *place;
    if (found)
        take_from(place);
    return found;
}

/* Append the blocks of at least a size to a list, in order. */
static int list_from(const struct block *block, long long size, PyObject *list)
{
    if (!block)
        return 0;
    if (block->size >= size &&
        (list_from(block->below, size, list) < 0 || PyList_Append(list, (PyObject *)block) < 0))
        return -1;
    return list_from(block->above, size, list);
}

static PyObject *free_blocks_from_size(PyObject *self, PyObject *size)
{
    long long least = PyLong_AsLongLong(size);
    PyObject *list = least == -1 && PyErr_Occurred() ? NULL : PyList_New(0);
    if (list && list_from(((struct free_blocks *)self)->root, least, list) < 0)
        Py_CLEAR(list);
    return list;
}

static PyObject *free_blocks_iter(PyObject *self)
{
    PyObject *list = PyList_New(0), *iterator = NULL;
    if (list && list_from(((struct free_blocks *)self)->root, 0, list) == 0)
        iterator = PyObject_GetIter(list);
    Py_XDECREF(list);
    return iterator;
}

static int free_blocks_bool(PyObject *self)
{
    return ((struct free_blocks *)self)->root != NULL;
}

/* Return the number of searches of the pool, from which the age of its blocks follows; -1 with an exception. */
static long long searches_of(const struct free_blocks *self, const struct state *state)
{
    PyObject *found = PyObject_GetAttr(self->pool, state->searches);
    long long searches = found ? PyLong_AsLongLong(found) : -1;
    Py_XDECREF(found);
    return searches;
}

static bool is_own(PyObject *self, PyObject *block)
{
    if (PyObject_TypeCheck(block, state_of(Py_TYPE(self))->block) &&
        (PyObject *)((struct block *)block)->free_blocks == self)
        return true;
    PyErr_SetString(PyExc_ValueError, "not a block of this pool and stream");
    return false;
}

static PyObject *free_blocks_add(PyObject *self, PyObject *block)
{
    if (!is_own(self, block))
        return NULL;
    long long searches = searches_of((struct free_blocks *)self, state_of(Py_TYPE(self)));
    if (searches < 0 || ((struct block *)block)->free)
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "the block is free already");
    ((struct block *)block)->gc_count_base = searches;
    insert((struct free_blocks *)self, (struct block *)Py_NewRef(block));
    Py_RETURN_NONE;
}

static PyObject *free_blocks_remove(PyObject *self, PyObject *block)
{
    if (!is_own(self, block))
        return NULL;
    if (!remove_block((struct free_blocks *)self, (struct block *)block))
        return PyErr_Format(PyExc_ValueError, "the block is not free");
    Py_DECREF(block);
    Py_RETURN_NONE;
}

static PyObject *free_blocks_take(PyObject *self, PyObject *args)
{
    long long size, limit;
    if (!PyArg_ParseTuple(args, "LL", &size, &limit))
        return NULL;
    struct block **place = best_fit((struct free_blocks *)self, size);
    if (!place || (*place)->size >= limit)
        Py_RETURN_NONE;
    return (PyObject *)take_from(place);
}

static int free_blocks_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"pool", "stream", "counters", NULL};
    struct free_blocks *self = (struct free_blocks *)object;
    PyObject *pool, *stream, *counters;
    PyTypeObject *type = state_of(Py_TYPE(object))->counters;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!O!", names, &pool, &PyLong_Type, &stream, type, &counters))
        return -1;
    Py_XSETREF(self->pool, Py_NewRef(pool));
    Py_XSETREF(self->stream, Py_NewRef(stream));
    Py_XSETREF(self->counters, (struct counters *)Py_NewRef(counters));
    return 0;
}

static int visit_tree(struct block *block, visitproc visit, void *arg)
{
    if (!block)
        return 0;
    Py_VISIT(block);
    int result = visit_tree(block->below, visit, arg);
    return result ? result : visit_tree(block->above, visit, arg);
}

static int free_blocks_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((struct free_blocks *)object)->pool);
    Py_VISIT(((struct free_blocks *)object)->counters);
    return visit_tree(((struct free_blocks *)object)->root, visit, arg);
}

static int free_blocks_clear(PyObject *object)
{
    struct free_blocks *self = (struct free_blocks *)object;
    Py_CLEAR(self->pool);
    Py_CLEAR(self->stream);
    Py_CLEAR(self->counters);
    while (self->root)
        Py_DECREF(take_from(&self->root));
    return 0;
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
    {Py_tp_init, free_blocks_init},
    {Py_tp_members, free_blocks_members},
    {Py_tp_methods, free_blocks_methods},
    {Py_tp_iter, free_blocks_iter},
    {Py_nb_bool, free_blocks_bool},
    {Py_tp_traverse, free_blocks_traverse},
    {Py_tp_clear, free_blocks_clear},
    {Py_tp_dealloc, dealloc},
    {0, NULL},
};

/* ---- events ---------------------------------------------------------------------------------------------- */

struct event {
    PyObject *action, *stream, *stack, *pool, *metadata;
    long long address, size, time_ns;
};

/* The last maxlen events of all that were appended. */
struct events {
    PyObject_HEAD
    struct event *items;
    Py_ssize_t maxlen, room, count; /* count: of all; while it is below maxlen, room grows */
};

/* Append an event; false with an exception if memory is out. */
static bool append_event(struct events *self, struct event event)
{
    if (self->count == self->room && self->room < self->maxlen) {
        Py_ssize_t room = Py_MIN(self->maxlen, self->room * 2 + 64);
        struct event *items = PyMem_Realloc(self->items, (size_t)room * sizeof *items);
        if (!items) {
            PyErr_NoMemory();
            return false;
        }
        memset(items + self->room, 0, (size_t)(room - self->room) * sizeof *items);
        self->items = items;
        self->room = room;
    }
    struct event *place = self->items + self->count++ % self->maxlen, dropped = *place;
    Py_INCREF(event.action);
    Py_INCREF(event.stream);
    Py_INCREF(event.stack);
    Py_INCREF(event.pool);
    Py_INCREF(event.metadata);
    *place = event;
    Py_XDECREF(dropped.action);
    Py_XDECREF(dropped.stream);
    Py_XDECREF(dropped.stack);
    Py_XDECREF(dropped.pool);
    Py_XDECREF(dropped.metadata);
    return true;
}

static PyObject *events_append(PyObject *self, PyObject *values)
{
    struct event event;
    if (!PyArg_ParseTuple(values, "OLLOLOOO", &event.action, &event.address, &event.size, &event.stream,
                          &event.time_ns, &event.stack, &event.pool, &event.metadata) ||
        !append_event((struct events *)self, event))
        return NULL;
    Py_RETURN_NONE;
}

static Py_ssize_t events_length(PyObject *object)
{
    struct events *self = (struct events *)object;
    return Py_MIN(self->count, self->maxlen);
}

static PyObject *events_iter(PyObject *object)
{
    struct events *self = (struct events *)object;
    Py_ssize_t length = events_length(object), first = self->count - length;
    PyObject *list = PyList_New(length), *iterator = NULL;
    for (Py_ssize_t i = 0; list && i < length; i++) {
        const struct event *event = self->items + (first + i) % self->maxlen;
        PyObject *tuple = Py_BuildValue("OLLOLOOO", event->action, event->address, event->size, event->stream,
                                        event->time_ns, event->stack, event->pool, event->metadata);
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

static int events_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"maxlen", NULL};
    Py_ssize_t maxlen;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "n", names, &maxlen))
        return -1;
    ((struct events *)object)->maxlen = Py_MAX(maxlen, 1);
    return 0;
}

static int events_traverse(PyObject *object, visitproc visit, void *arg)
{
    struct events *self = (struct events *)object;
    Py_VISIT(Py_TYPE(object));
    for (Py_ssize_t i = Py_MIN(self->count, self->room); i-- > 0;) {
        Py_VISIT(self->items[i].stack);
        Py_VISIT(self->items[i].metadata);
    }
    return 0;
}

static int events_clear(PyObject *object)
{
    struct events *self = (struct events *)object;
    struct event *items = self->items;
    Py_ssize_t length = Py_MIN(self->count, self->room);
    self->items = NULL;
    self->room = self->count = 0;
    for (Py_ssize_t i = 0; i < length; i++) {
        Py_DECREF(items[i].action);
        Py_DECREF(items[i].stream);
        Py_DECREF(items[i].stack);
        Py_DECREF(items[i].pool);
        Py_DECREF(items[i].metadata);
    }
    PyMem_Free(items);
    return 0;
}

static PyMemberDef events_members[] = {
    MEMBER(events, maxlen, T_PYSSIZET, READONLY),
    MEMBER(events, count, T_PYSSIZET, READONLY),
    END,
};

static PyMethodDef events_methods[] = {{"append", events_append, METH_O, NULL}, {NULL, NULL, 0, NULL}};

static PyType_Slot events_slots[] = {
    {Py_tp_init, events_init},   {Py_tp_members, events_members}, {Py_tp_methods, events_methods},
    {Py_tp_iter, events_iter},   {Py_sq_length, events_length},   {Py_tp_traverse, events_traverse},
    {Py_tp_clear, events_clear}, {Py_tp_dealloc, dealloc},        {0, NULL},
};

/* ---- alloc and free -------------------------------------------------------------------------------------- */

struct fast_path {
    PyObject_HEAD
    struct state *state;
    char slow;
    PyObject *guard, *live, *slow_calls;
    PyObject *small_by_stream, *large_by_stream; /* FreeBlocks of the default pool */
    struct counters *small, *large, *total;
    PyObject *block_type; /* a subclass of Block */
    struct block *spare;  /* for the rest of a split */
    PyObject *history;    /* that records; None or NULL if none does */
    struct events *events;
    PyObject *gather; /* what returns the stack of its caller */
    long level;       /* as in history.Level: whose stacks are gathered */
};

/* Return whether nothing is unusual, and nobody is inside the allocator. */
static bool is_usual(const struct fast_path *self)
{
    PyObject *busy = self->slow ? NULL : PyObject_GetAttr(self->guard, self->state->busy);
    Py_XDECREF(busy);
    PyErr_Clear();
    return busy == Py_False;
}

/* Read a size or a stream; false if it is not a plain integer in range. */
static bool read_int(PyObject *object, long long *value)
{
    int overflow = 1;
    if (PyLong_CheckExact(object))
        *value = PyLong_AsLongLongAndOverflow(object, &overflow);
    return !overflow;
}

/* Return the event of an allocated block, with borrowed references; ``stack`` is that of the caller. */
static struct event event_of(const struct fast_path *self, const struct block *block, PyObject *stack)
{
    if (!stack || stack == Py_None)
        stack = block->stack;
    return (struct event){
        .stream = block->free_blocks->stream,
        .stack = stack && self->level >= LEVEL_ALLOC ? stack : Py_None,
        .address = block->ptr,
        .size = block->requested,
    };
}

/* Record an event, and the same with another action. This may run Python, so it comes after a change, not in it;
 * an exception is reported, not raised. */
static void record(const struct fast_path *self, struct event event, const struct free_blocks *free,
                   PyObject *action, PyObject *next_action)
{
    struct timespec now; /* that of time.perf_counter_ns on Linux */
    clock_gettime(CLOCK_MONOTONIC, &now);
    event.action = action;
    event.pool = PyObject_GetAttr(free->pool, self->state->id);
    event.metadata = PyObject_GetAttr(self->history, self->state->metadata);
    event.time_ns = now.tv_sec * 1000000000LL + now.tv_nsec;
    bool recorded = event.pool && event.metadata && append_event(self->events, event);
    if (recorded && next_action) {
        event.action = next_action;
        recorded = append_event(self->events, event);
    }
    if (!recorded)
        PyErr_WriteUnraisable((PyObject *)self->events);
    Py_XDECREF(event.pool);
    Py_XDECREF(event.metadata);
}

/* Keep a block that was merged away for the next split, if nobody else refers to it; this takes the reference. */
static void keep_spare(struct fast_path *self, struct block *block)
{
    if (block && !self->spare && Py_REFCNT(block) == 1) {
        Py_CLEAR(block->free_blocks);
        self->spare = block;
    } else {
        Py_XDECREF(block);
    }
}

/* Count the free blocks of split segments. */
static void count_split(const struct fast_path *self, struct counters *counters, int blocks, long long size)
{
    const struct counters *other = counters == self->small ? self->large : self->small;
    count(&counters->inactive_split, &other->inactive_split, &self->total->inactive_split, blocks);
    count(&counters->inactive_split_bytes, &other->inactive_split_bytes, &self->total->inactive_split_bytes, size);
}

/* Cut a block down to a size; the rest becomes free. */
static void split(struct fast_path *self, struct block *block, long long size, long long searches)
{
    struct block *rest = self->spare, *after = block->next;
    self->spare = NULL;
    rest->ptr = block->ptr + size;
    rest->size = block->size - size;
    rest->requested = block->requested; /* of the last request, as PyTorch's inactive blocks show */
    rest->gc_count_base = searches;
    rest->mapped = true;
    rest->free_blocks = (struct free_blocks *)Py_NewRef(block->free_blocks);
    PyObject *stack = rest->segment_stack;
    rest->segment_stack = block->segment_stack;
    block->segment_stack = stack;
    bool is_whole = !after && !block->prev;
    rest->prev = (struct block *)Py_NewRef(block);
    rest->next = after; /* with the reference of block->next */
    if (after)
        Py_SETREF(after->prev, (struct block *)Py_NewRef(rest));
    block->next = (struct block *)Py_NewRef(rest);
    block->size = size;
    count_split(self, block->free_blocks->counters, is_whole, is_whole ? rest->size : -size);
    insert(block->free_blocks, rest);
}

/* Allocate the block of a place. */
static void alloc_block(struct fast_path *self, struct block **place, long long size, long long requested,
                        long long searches)
{
    struct block *block = take_from(place);
    struct counters *counters = block->free_blocks->counters, *total = self->total;
    const struct counters *other = counters == self->small ? self->large : self->small;
    long long rest = block->size - size;
    if (size <= MOST_SMALL ? rest >= SMALLEST_BLOCK : rest > LARGE_SLACK)
        split(self, block, size, searches);
    else if (block->prev || block->next)
        count_split(self, counters, -1, -block->size);
    block->allocated = true;
    block->requested = requested;
    count(&counters->allocation, &other->allocation, &total->allocation, 1);
    count(&counters->allocated_bytes, &other->allocated_bytes, &total->allocated_bytes, block->size);
    count(&counters->requested_bytes, &other->requested_bytes, &total->requested_bytes, requested);
}

/* Free an allocated block, merged with its free neighbors. The caller has taken its stack. */
static void free_block(struct fast_path *self, struct block *block, long long searches)
{
    struct free_blocks *free = block->free_blocks;
    struct counters *counters = free->counters;
    struct block *before = block->prev, *after = block->next, *absorbed[2] = {NULL, NULL};
    int blocks = 0;
    long long size = 0;
    block->allocated = false;
    block->stack = NULL;
    counters->allocation.current--;
    counters->allocated_bytes.current -= block->size;
    counters->requested_bytes.current -= block->requested;
    if (after && after->free) {
        blocks--;
        size -= after->size;
        remove_block(free, after);
        Py_DECREF(after); /* not the last: block->next is one */
        absorbed[0] = absorb_next(block);
    }
    if (before && before->free) {
        blocks--;
        size -= before->size;
        remove_block(free, before); /* its reference goes to insert */
        before->requested = block->requested;
        absorbed[1] = absorb_next(before);
        block = before;
    } else {
        Py_INCREF(block);
    }
    block->gc_count_base = searches;
    insert(free, block);
    if (block->prev || block->next)
        count_split(self, counters, blocks + 1, size + block->size);
    else
        count_split(self, counters, blocks, size);
    keep_spare(self, absorbed[0]);
    keep_spare(self, absorbed[1]);
}

/* Find the place of the block for a request, and make what its allocation needs. NULL, perhaps with an exception,
 * if the request is not a usual one. */
static struct block **prepare_alloc(struct fast_path *self, PyObject *stream, long long size, PyObject **ptr,
                                    long long *searches)
{
    if (!self->spare) {
        /* This may run the garbage collector, and finalizers that use this allocator. */
        PyTypeObject *type = (PyTypeObject *)self->block_type;
        self->spare = (struct block *)type->tp_alloc(type, 0);
        if (!self->spare || !is_usual(self))
            return NULL;
    }
    PyObject *by_stream = size <= MOST_SMALL ? self->small_by_stream : self->large_by_stream;
    struct free_blocks *free = (struct free_blocks *)PyDict_GetItemWithError(by_stream, stream);
    struct block **place = free ? best_fit(free, size) : NULL;
    if (!place)
        return NULL;
    *searches = searches_of(free, self->state);
    *ptr = PyLong_FromLongLong((*place)->ptr);
    if (*searches >= 0 && *ptr && PyDict_SetItem(self->live, *ptr, (PyObject *)*place) == 0)
        return place;
    Py_CLEAR(*ptr);
    return NULL;
}

/* Read one or two arguments, by position or by name. */
static bool parse(PyObject *const *args, Py_ssize_t count, PyObject *keywords, const char *const *names,
                  PyObject *values[2])
{
    bool known = count <= 2;
    for (Py_ssize_t i = 0; known && i < count; i++)
        values[i] = args[i];
    for (Py_ssize_t i = 0; known && keywords && i < PyTuple_GET_SIZE(keywords); i++) {
        PyObject *name = PyTuple_GET_ITEM(keywords, i);
        int place = !PyUnicode_CompareWithASCIIString(name, names[1]);
        known = place >= count && (place || !PyUnicode_CompareWithASCIIString(name, names[0]));
        if (known)
            values[place] = args[count + i];
    }
    if (!known || !values[0])
        PyErr_Format(PyExc_TypeError, "the arguments are %s and, optionally, %s", names[0], names[1]);
    return known && values[0];
}

static PyObject *fast_path_alloc(PyObject *object, PyObject *const *args, Py_ssize_t given, PyObject *keywords)
{
    static const char *const names[] = {"size_bytes", "stream"};
    struct fast_path *self = (struct fast_path *)object;
    PyObject *values[2] = {NULL, self->state->zero}, *ptr = NULL;
    long long requested, stream, searches;
    if (!parse(args, given, keywords, names, values))
        return NULL;
    PyObject *stack = self->level >= LEVEL_STATE ? PyObject_CallNoArgs(self->gather) : NULL;
    if (PyErr_Occurred())
        return NULL;
    if (read_int(values[0], &requested) && requested > 0 && requested < TOO_MANY_BYTES &&
        read_int(values[1], &stream) && stream != PER_THREAD_STREAM && is_usual(self)) {
        long long size = (requested + SMALLEST_BLOCK - 1) & -SMALLEST_BLOCK;
        PyObject *key = stream == LEGACY_STREAM ? self->state->zero : values[1];
        struct block **place = prepare_alloc(self, key, size, &ptr, &searches);
        if (place) {
            struct block *block = *place;
            PyObject *dropped = block->stack;
            alloc_block(self, place, size, requested, searches);
            block->stack = stack;
            Py_XDECREF(dropped);
            if (self->events)
                record(self, event_of(self, block, stack), block->free_blocks, self->state->alloc, NULL);
            Py_DECREF(block); /* the reference of the tree; the live blocks have one */
            return ptr;
        }
    }
    Py_XDECREF(stack);
    if (PyErr_Occurred())
        return NULL;
    return PyObject_CallMethodObjArgs(self->slow_calls, self->state->slow_alloc, values[0], values[1], NULL);
}

static bool is_usual_free(const struct fast_path *self, const struct block *block, PyObject *stream)
{
    long long number;
    if ((block->stream_uses && block->stream_uses != Py_None) ||
        (block->expandable_segment && block->expandable_segment != Py_None) || !is_usual(self))
        return false;
    if (stream == Py_None)
        return true;
    if (!read_int(stream, &number))
        return false;
    if (number == LEGACY_STREAM)
        stream = self->state->zero;
    return PyObject_RichCompareBool(stream, block->free_blocks->stream, Py_EQ) == 1;
}

static PyObject *fast_path_free(PyObject *object, PyObject *const *args, Py_ssize_t given, PyObject *keywords)
{
    static const char *const names[] = {"ptr", "stream"};
    struct fast_path *self = (struct fast_path *)object;
    PyObject *values[2] = {NULL, Py_None};
    if (!parse(args, given, keywords, names, values))
        return NULL;
    PyObject *stack = self->level >= LEVEL_ALL ? PyObject_CallNoArgs(self->gather) : NULL;
    PyObject *found = PyErr_Occurred() ? NULL : PyDict_GetItemWithError(self->live, values[0]), *result = NULL;
    struct block *block = (struct block *)Py_XNewRef(found);
    long long searches = block ? searches_of(block->free_blocks, self->state) : 0;
    bool usual = block && is_usual_free(self, block, values[1]);
    bool removed = block && !PyErr_Occurred() && PyDict_DelItem(self->live, values[0]) == 0;
    if (usual && removed) {
        struct free_blocks *free = (struct free_blocks *)Py_NewRef(block->free_blocks);
        struct event event = event_of(self, block, stack);
        PyObject *dropped = block->stack;
        free_block(self, block, searches);
        if (self->events)
            record(self, event, free, self->state->free_requested, self->state->free_completed);
        Py_XDECREF(dropped);
        Py_DECREF(free);
        result = Py_NewRef(Py_None);
    } else if (!PyErr_Occurred()) {
        result = PyObject_CallMethodObjArgs(self->slow_calls, self->state->slow_free, values[0],
                                            block ? found : Py_None, values[1], NULL);
    }
    Py_XDECREF(stack);
    Py_XDECREF(block);
    return result;
}

/* set_history(history, gather): record the events of alloc and free in a History, with the stacks that gather
 * returns; None: record none. */
static PyObject *fast_path_set_history(PyObject *object, PyObject *args)
{
    struct fast_path *self = (struct fast_path *)object;
    PyObject *history, *gather, *events = NULL;
    long level = 0;
    if (!PyArg_ParseTuple(args, "OO", &history, &gather))
        return NULL;
    if (history != Py_None) {
        PyObject *found = PyObject_GetAttr(history, self->state->level);
        level = found ? PyLong_AsLong(found) : -1;
        Py_XDECREF(found);
        events = level < 0 ? NULL : PyObject_GetAttr(history, self->state->events);
        if (events && !PyObject_TypeCheck(events, self->state->events_type)) {
            PyErr_SetString(PyExc_TypeError, "the events of the history are not native");
            Py_CLEAR(events);
        }
        if (!events)
            return NULL;
    }
    self->level = level;
    Py_XSETREF(self->events, (struct events *)events);
    Py_XSETREF(self->history, Py_NewRef(history));
    Py_XSETREF(self->gather, Py_NewRef(gather));
    Py_RETURN_NONE;
}

static int fast_path_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"guard", "live",  "small_by_stream", "large_by_stream", "small",
                            "large", "total", "slow_calls",      "block_type",      NULL};
    struct fast_path *self = (struct fast_path *)object;
    struct state *state = self->state = state_of(Py_TYPE(object));
    PyObject *own[9];
    if (self->guard || !PyArg_ParseTupleAndKeywords(args, kwargs, "OO!O!O!O!O!O!OO!", names, &own[0], &PyDict_Type,
                                                    &own[1], &PyDict_Type, &own[2], &PyDict_Type, &own[3],
                                                    state->counters, &own[4], state->counters, &own[5],
                                                    state->counters, &own[6], &own[7], &PyType_Type, &own[8]))
        return -1;
    self->guard = Py_NewRef(own[0]);
    self->live = Py_NewRef(own[1]);
    self->small_by_stream = Py_NewRef(own[2]);
    self->large_by_stream = Py_NewRef(own[3]);
    self->small = (struct counters *)Py_NewRef(own[4]);
    self->large = (struct counters *)Py_NewRef(own[5]);
    self->total = (struct counters *)Py_NewRef(own[6]);
    self->slow_calls = Py_NewRef(own[7]);
    self->block_type = Py_NewRef(own[8]);
    return 0;
}

#define FIELDS(DO) \
    DO(guard) \
    DO(live) \
    DO(slow_calls) \
    DO(small_by_stream) \
    DO(large_by_stream) DO(small) DO(large) DO(total) DO(spare) DO(history) DO(events) DO(gather) DO(block_type)
#define VISIT(name) Py_VISIT(self->name);
#define CLEAR(name) Py_CLEAR(self->name);

static int fast_path_traverse(PyObject *object, visitproc visit, void *arg)
{
    struct fast_path *self = (struct fast_path *)object;
    Py_VISIT(Py_TYPE(object));
    FIELDS(VISIT)
    return 0;
}

static int fast_path_clear(PyObject *object)
{
    struct fast_path *self = (struct fast_path *)object;
    self->slow = true; /* a call that comes later finds nothing to work on */
    FIELDS(CLEAR)
    return 0;
}

static PyMemberDef fast_path_members[] = {MEMBER(fast_path, slow, T_BOOL, 0), END};

static PyMethodDef fast_path_methods[] = {
    {"alloc", (PyCFunction)(void (*)(void))fast_path_alloc, METH_FASTCALL | METH_KEYWORDS, NULL},
    {"free", (PyCFunction)(void (*)(void))fast_path_free, METH_FASTCALL | METH_KEYWORDS, NULL},
    {"set_history", fast_path_set_history, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot fast_path_slots[] = {
    {Py_tp_init, fast_path_init},
    {Py_tp_members, fast_path_members},
    {Py_tp_methods, fast_path_methods},
    {Py_tp_traverse, fast_path_traverse},
    {Py_tp_clear, fast_path_clear},
    {Py_tp_dealloc, dealloc},
    {0, NULL},
};

/* ---- the module ------------------------------------------------------------------------------------------ */

#define SPEC(name, type, slots, flags) \
    {"cudakit.core.allocator._fast." name, sizeof(struct type), 0, \
     Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | (flags), slots}

static PyTypeObject *add_type(PyObject *self, PyType_Spec *spec)
{
    PyObject *type = PyType_FromModuleAndSpec(self, spec, NULL);
    if (type && PyModule_AddType(self, (PyTypeObject *)type) < 0)
        Py_CLEAR(type);
    return (PyTypeObject *)type;
}

static int exec_module(PyObject *self)
{
    static PyType_Spec counters = SPEC("BlockCounters", counters, counters_slots, 0);
    static PyType_Spec block = SPEC("Block", block, block_slots, Py_TPFLAGS_HAVE_GC);
    static PyType_Spec free_blocks = SPEC("FreeBlocks", free_blocks, free_blocks_slots, Py_TPFLAGS_HAVE_GC);
    static PyType_Spec events = SPEC("Events", events, events_slots, Py_TPFLAGS_HAVE_GC);
    static PyType_Spec fast_path = SPEC("FastPath", fast_path, fast_path_slots, Py_TPFLAGS_HAVE_GC);
    struct state *state = PyModule_GetState(self);
    bool named = (state->zero = PyLong_FromLong(0));
#define INTERN(name) named = named && (state->name = PyUnicode_InternFromString(#name));
    NAMES(INTERN)
    state->counters = add_type(self, &counters);
    state->block = add_type(self, &block);
    state->free_blocks = add_type(self, &free_blocks);
    state->events_type = add_type(self, &events);
    PyTypeObject *last = add_type(self, &fast_path);
    Py_XDECREF(last);
    return named && state->counters && state->block && state->free_blocks && state->events_type && last ? 0 : -1;
}

static int traverse_module(PyObject *self, visitproc visit, void *arg)
{
    struct state *state = PyModule_GetState(self);
    Py_VISIT(state->counters);
    Py_VISIT(state->block);
    Py_VISIT(state->free_blocks);
    Py_VISIT(state->events_type);
    return 0;
}

static int clear_module(PyObject *self)
{
    struct state *state = PyModule_GetState(self);
    Py_CLEAR(state->counters);
    Py_CLEAR(state->block);
    Py_CLEAR(state->free_blocks);
    Py_CLEAR(state->events_type);
    return 0;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, exec_module},
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_PER_INTERPRETER_GIL_SUPPORTED},
#endif
    {0, NULL}, /* Py_mod_gil stays undeclared: the interpreter's lock is what keeps changes whole */
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
