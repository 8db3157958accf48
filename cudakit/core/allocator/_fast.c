/* The fast path of the allocator: native types with their own data for blocks, free blocks and counters, and the
 * usual case of alloc and free. blocks.py, pool_stats.py and fast_path.py define what each does; they are the
 * fallback without a compiler, and the oracle of the tests. Everything unusual goes to the same slow calls.
 *
 * A change of the state runs no Python: the objects it needs are made before, and those it drops are released
 * after. So with the interpreter's lock a finalizer or another thread sees the state before it or after it. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <limits.h>
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
/* For lists of the fields that are references. */
#define VISIT(field) Py_VISIT(self->field);
#define CLEAR(field) Py_CLEAR(self->field);
#define COPY(field) Py_XINCREF(self->field = given.field);

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

enum counted { ALLOCATION, ALLOCATED_BYTES, REQUESTED_BYTES, INACTIVE_SPLIT, INACTIVE_SPLIT_BYTES, COUNTED };

/* Counters of the small or the large pools. Of the total of both, only the peaks are used. */
struct counters {
    PyObject_HEAD
    struct counter of[COUNTED];
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
    END,
};

static PyType_Slot counters_slots[] = {{Py_tp_members, counters_members}, {0, NULL}};

/* ---- blocks ---------------------------------------------------------------------------------------------- */

struct block {
    PyObject_HEAD
    long long ptr, size;
    /* In the tree of its free blocks, which owns the references. First, to share a cache line with the keys. */
    struct block *child[2]; /* blocks before this one, and after it */
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
    uint64_t random;
};

#define BLOCK_FIELDS(DO) \
    DO(free_blocks) DO(prev) DO(next) DO(expandable_segment) DO(stream_uses) DO(stack) DO(segment_stack)

static PyObject *block_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"ptr", "size", "free_blocks", "expandable_segment", NULL};
    struct block given = {.expandable_segment = Py_None}, *self;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "LLO!|O", names, &given.ptr, &given.size,
                                     state_of(type)->free_blocks, &given.free_blocks, &given.expandable_segment) ||
        !(self = (struct block *)type->tp_alloc(type, 0)))
        return NULL;
    self->ptr = given.ptr;
    self->size = given.size;
    self->mapped = true;
    BLOCK_FIELDS(COPY)
    return (PyObject *)self;
}

static int block_traverse(PyObject *object, visitproc visit, void *arg)
{
    struct block *self = (struct block *)object;
    Py_VISIT(Py_TYPE(object));
    BLOCK_FIELDS(VISIT)
    return 0;
}

static int block_clear(PyObject *object)
{
    struct block *self = (struct block *)object;
    BLOCK_FIELDS(CLEAR)
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
    {Py_tp_new, block_new},
    {Py_tp_members, block_members},
    {Py_tp_getset, block_getset},
    {Py_tp_traverse, block_traverse},
    {Py_tp_clear, block_clear},
    {Py_tp_dealloc, dealloc},
    {0, NULL},
};

/* ---- free blocks ----------------------------------------------------------------------------------------- */

/* Return 1 if a block comes before a size and address. A branch here would be mispredicted half the time. */
static int is_before(const struct block *block, long long size, long long ptr)
{
    return (block->size < size) | ((block->size == size) & (block->ptr < ptr));
}

/* Return the place of the smallest block of at least a size, of equal ones that at the lowest address; or NULL. */
static struct block **best_fit(struct free_blocks *self, long long size)
{
    struct block **found = NULL;
    for (struct block **place = &self->root; *place;) {
        bool is_small = (*place)->size < size;
        found = is_small ? found : place;
        place = &(*place)->child[is_small];
    }
    return found;
}

/* Insert a block, whose reference the tree takes. */
static void insert(struct free_blocks *self, struct block *block)
{
    struct block **place = &self->root;
    /* The generator of MMIX (Knuth, TAOCP 3.3.4). */
    block->priority = self->random = self->random * 6364136223846793005u + 1442695040888963407u;
    while (*place && (*place)->priority > block->priority)
        place = &(*place)->child[is_before(*place, block->size, block->ptr)];
    /* Split the subtree there: what is before the block becomes its first child, the rest its second. */
    struct block *rest = *place, **end[2] = {&block->child[0], &block->child[1]};
    *place = block;
    while (rest) {
        int before = is_before(rest, block->size, block->ptr);
        *end[!before] = rest;
        end[!before] = &rest->child[before];
        rest = rest->child[before];
    }
    *end[0] = *end[1] = NULL;
    block->free = true;
}

/* Remove the block of a place, whose reference the caller gets. */
static struct block *take_from(struct block **place)
{
    struct block *block = *place, *half[2] = {block->child[0], block->child[1]};
    while (half[0] && half[1]) { /* join both subtrees */
        bool upper = half[1]->priority > half[0]->priority;
        *place = half[upper];
        place = &half[upper]->child[!upper];
        half[upper] = *place;
    }
    *place = half[0] ? half[0] : half[1];
    block->child[0] = block->child[1] = NULL;
    block->free = false;
    return block;
}

/* Remove a block, whose reference the caller gets; false if it is not in the tree. */
static bool remove_block(struct free_blocks *self, struct block *block)
{
    struct block **place = &self->root;
    while (*place && *place != block)
        place = &(*place)->child[is_before(*place, block->size, block->ptr)];
    return *place && take_from(place);
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

/* Return an iterator of a list of the blocks, which does not see later changes. */
static PyObject *iterate_from(PyObject *self, long long size)
{
    PyObject *list = PyList_New(0), *iterator = NULL;
    if (list && append_from(((struct free_blocks *)self)->root, size, list) == 0)
        iterator = PyObject_GetIter(list);
    Py_XDECREF(list);
    return iterator;
}

static PyObject *free_blocks_from_size(PyObject *self, PyObject *size)
{
    long long least = PyLong_AsLongLong(size);
    return least == -1 && PyErr_Occurred() ? NULL : iterate_from(self, least);
}

static PyObject *free_blocks_iter(PyObject *self)
{
    return iterate_from(self, LLONG_MIN);
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

#define FREE_BLOCKS_FIELDS(DO) DO(pool) DO(stream) DO(counters)

static PyObject *free_blocks_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"pool", "stream", "counters", NULL};
    struct free_blocks given = {.root = NULL}, *self;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!O!", names, &given.pool, &PyLong_Type, &given.stream,
                                     state_of(type)->counters, &given.counters) ||
        !(self = (struct free_blocks *)type->tp_alloc(type, 0)))
        return NULL;
    FREE_BLOCKS_FIELDS(COPY)
    return (PyObject *)self;
}

static int visit_tree(struct block *block, visitproc visit, void *arg)
{
    for (; block; block = block->child[1]) {
        Py_VISIT(block);
        int result = visit_tree(block->child[0], visit, arg);
        if (result)
            return result;
    }
    return 0;
}

static int free_blocks_traverse(PyObject *object, visitproc visit, void *arg)
{
    struct free_blocks *self = (struct free_blocks *)object;
    Py_VISIT(Py_TYPE(object));
    FREE_BLOCKS_FIELDS(VISIT)
    return visit_tree(self->root, visit, arg);
}

static int free_blocks_clear(PyObject *object)
{
    struct free_blocks *self = (struct free_blocks *)object;
    FREE_BLOCKS_FIELDS(CLEAR)
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
    {Py_tp_new, free_blocks_new},
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
#define EVENT_FIELDS(DO) DO(action) DO(stream) DO(stack) DO(pool) DO(metadata)

static void incref_event(const struct event *self)
{
#define INCREF(field) Py_INCREF(self->field);
    EVENT_FIELDS(INCREF)
}

static void clear_event(struct event *self)
{
    EVENT_FIELDS(CLEAR)
}

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
    incref_event(&event);
    *place = event;
    clear_event(&dropped);
    return true;
}

static PyObject *events_append(PyObject *self, PyObject *values)
{
    struct event event;
    if (!PyTuple_Check(values))
        return PyErr_Format(PyExc_TypeError, "an event is a tuple");
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
        /* With references of its own: to make a tuple may run finalizers, and they may append events. */
        const struct event event = self->items[(first + i) % self->maxlen];
        incref_event(&event);
        PyObject *tuple = Py_BuildValue("NLLNLNNN", event.action, event.address, event.size, event.stream,
                                        event.time_ns, event.stack, event.pool, event.metadata);
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

static PyObject *events_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"maxlen", NULL};
    Py_ssize_t maxlen;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "n", names, &maxlen))
        return NULL;
    struct events *self = (struct events *)type->tp_alloc(type, 0);
    if (self)
        self->maxlen = Py_MAX(maxlen, 1);
    return (PyObject *)self;
}

static int visit_event(const struct event *self, visitproc visit, void *arg)
{
    EVENT_FIELDS(VISIT)
    return 0;
}

static int events_traverse(PyObject *object, visitproc visit, void *arg)
{
    struct events *self = (struct events *)object;
    int result = 0;
    Py_VISIT(Py_TYPE(object));
    for (Py_ssize_t i = Py_MIN(self->count, self->room); !result && i-- > 0;)
        result = visit_event(self->items + i, visit, arg);
    return result;
}

static int events_clear(PyObject *object)
{
    struct events *self = (struct events *)object;
    struct event *items = self->items;
    Py_ssize_t length = Py_MIN(self->count, self->room);
    self->items = NULL;
    self->room = self->count = 0;
    for (Py_ssize_t i = 0; i < length; i++)
        clear_event(items + i);
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
    {Py_tp_new, events_new},     {Py_tp_members, events_members}, {Py_tp_methods, events_methods},
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
    PyTypeObject *block_type; /* a subclass of Block */
    struct block *spare;      /* for the rest of a split */
    PyObject *history;        /* that records; None or NULL if none does */
    struct events *events;
    PyObject *gather; /* what returns the stack of its caller */
    long level;       /* as in history.Level: whose stacks are gathered */
};

/* Return whether nothing is unusual, and nobody is inside the allocator; false with an exception if it fails. */
static bool is_usual(const struct fast_path *self)
{
    PyObject *busy = self->slow ? NULL : PyObject_GetAttr(self->guard, self->state->busy);
    Py_XDECREF(busy);
    return busy == Py_False;
}

/* Return the stack of the caller if the level is at least that; NULL, perhaps with an exception, if not. */
static PyObject *gather_stack(const struct fast_path *self, long level)
{
    PyObject *gather = self->level >= level ? Py_NewRef(self->gather) : NULL; /* which it may replace */
    PyObject *stack = gather ? PyObject_CallNoArgs(gather) : NULL;
    Py_XDECREF(gather);
    return stack;
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
    struct events *events = self->events;
    struct timespec now; /* that of time.perf_counter_ns on Linux */
    if (!events)
        return;
    Py_INCREF(events); /* a finalizer of a dropped event may begin another history */
    clock_gettime(CLOCK_MONOTONIC, &now);
    event.action = action;
    event.pool = PyObject_GetAttr(free->pool, self->state->id);
    event.metadata = PyObject_GetAttr(self->history, self->state->metadata);
    event.time_ns = now.tv_sec * 1000000000LL + now.tv_nsec;
    bool recorded = event.pool && event.metadata && append_event(events, event);
    if (recorded && next_action) {
        event.action = next_action;
        recorded = append_event(events, event);
    }
    if (!recorded)
        PyErr_WriteUnraisable((PyObject *)events);
    Py_XDECREF(event.pool);
    Py_XDECREF(event.metadata);
    Py_DECREF(events);
}

/* Keep a block that was merged away for the next split, if nobody else refers to it; this takes the reference. */
static void keep_spare(struct fast_path *self, struct block *block)
{
    if (block && Py_REFCNT(block) == 1)
        block_clear((PyObject *)block);
    if (block && !block->free_blocks && !self->spare)
        self->spare = block;
    else
        Py_XDECREF(block);
}

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

/* Cut a block down to a size; the rest becomes free. */
static void split(struct fast_path *self, struct block *block, long long size, long long searches)
{
    struct block *rest = self->spare, *after = block->next;
    self->spare = NULL;
    rest->ptr = block->ptr + size;
    rest->size = block->size - size;
    rest->requested = block->requested; /* of the last request, as PyTorch's inactive blocks show */
    rest->gc_count_base = searches;
    rest->event_count = 0;
    rest->mapped = true;
    rest->free_blocks = (struct free_blocks *)Py_NewRef(block->free_blocks);
    rest->segment_stack = block->segment_stack;
    block->segment_stack = NULL;
    bool is_whole = !after && !block->prev;
    rest->prev = (struct block *)Py_NewRef(block);
    rest->next = after; /* with the reference of block->next */
    if (after)
        Py_SETREF(after->prev, (struct block *)Py_NewRef(rest));
    block->next = (struct block *)Py_NewRef(rest);
    block->size = size;
    count_split(self, block, is_whole, is_whole ? rest->size : -size);
    insert(block->free_blocks, rest);
}

/* Allocate the block of a place. */
static void alloc_block(struct fast_path *self, struct block **place, long long size, long long requested,
                        long long searches)
{
    struct block *block = take_from(place);
    long long rest = block->size - size;
    if (size <= MOST_SMALL ? rest >= SMALLEST_BLOCK : rest > LARGE_SLACK)
        split(self, block, size, searches);
    else if (block->prev || block->next)
        count_split(self, block, -1, -block->size);
    block->allocated = true;
    block->requested = requested;
    count_block(self, block, 1);
}

/* Free an allocated block, merged with its free neighbors, which the caller gets. The caller has its stack. */
static void free_block(struct fast_path *self, struct block *block, long long searches, struct block *absorbed[2])
{
    struct free_blocks *free = block->free_blocks;
    struct block *before = block->prev, *after = block->next;
    int blocks = 0;
    long long size = 0;
    block->allocated = false;
    block->stack = NULL;
    count_block(self, block, -1);
    if (after && after->free && remove_block(free, after)) {
        blocks--;
        size -= after->size;
        Py_DECREF(after); /* not the last: block->next is one */
        absorbed[0] = absorb_next(block);
    }
    if (before && before->free && remove_block(free, before)) { /* its reference goes to insert */
        blocks--;
        size -= before->size;
        before->requested = block->requested;
        absorbed[1] = absorb_next(before);
        block = before;
    } else {
        Py_INCREF(block);
    }
    block->gc_count_base = searches;
    insert(free, block);
    if (block->prev || block->next)
        count_split(self, block, blocks + 1, size + block->size);
    else
        count_split(self, block, blocks, size);
}

/* Find the place of the block for a request, and make what its allocation needs. NULL, perhaps with an exception,
 * if the request is not a usual one. */
static struct block **prepare_alloc(struct fast_path *self, PyObject *stream, long long size, PyObject **ptr,
                                    long long *searches)
{
    if (!self->spare) {
        /* This may run the garbage collector, and finalizers that use this allocator. */
        struct block *spare = (struct block *)self->block_type->tp_alloc(self->block_type, 0);
        if (!spare)
            return NULL;
        Py_XSETREF(self->spare, spare);
        if (!is_usual(self))
            return NULL;
    }
    PyObject *by_stream = size <= MOST_SMALL ? self->small_by_stream : self->large_by_stream;
    PyObject *found = PyDict_GetItemWithError(by_stream, stream);
    bool is_known = found && PyObject_TypeCheck(found, self->state->free_blocks);
    struct free_blocks *free = is_known ? (struct free_blocks *)found : NULL;
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
    PyObject *stack = gather_stack(self, LEVEL_STATE);
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
            record(self, event_of(self, block, stack), block->free_blocks, self->state->alloc, NULL);
            Py_XDECREF(dropped);
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
    if (block->free || (block->stream_uses && block->stream_uses != Py_None) ||
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
    PyObject *stack = gather_stack(self, LEVEL_ALL), *result = NULL;
    PyObject *found = PyErr_Occurred() || !self->live ? NULL : PyDict_GetItemWithError(self->live, values[0]);
    struct block *block = found && Py_IS_TYPE(found, self->block_type) ? (struct block *)Py_NewRef(found) : NULL;
    long long searches = block ? searches_of(block->free_blocks, self->state) : 0;
    bool usual = block && searches >= 0 && is_usual_free(self, block, values[1]);
    /* To compare another key than an integer could run Python here. */
    PyObject *key = !block || PyErr_Occurred()     ? NULL
                    : PyLong_CheckExact(values[0]) ? Py_NewRef(values[0])
                                                   : PyLong_FromLongLong(block->ptr);
    bool removed = key && PyDict_DelItem(self->live, key) == 0;
    Py_XDECREF(key);
    if (usual && removed) {
        struct free_blocks *free = (struct free_blocks *)Py_NewRef(block->free_blocks);
        struct event event = event_of(self, block, stack);
        PyObject *dropped = block->stack;
        struct block *absorbed[2] = {NULL, NULL};
        free_block(self, block, searches, absorbed);
        record(self, event, free, self->state->free_requested, self->state->free_completed);
        keep_spare(self, absorbed[0]);
        keep_spare(self, absorbed[1]);
        Py_XDECREF(dropped);
        Py_DECREF(free);
        result = Py_NewRef(Py_None);
    } else if (!PyErr_Occurred()) {
        result = PyObject_CallMethodObjArgs(self->slow_calls, self->state->slow_free, values[0],
                                            block ? (PyObject *)block : Py_None, values[1], NULL);
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

#define FAST_PATH_FIELDS(DO) \
    DO(guard) \
    DO(live) \
    DO(slow_calls) \
    DO(small_by_stream) \
    DO(large_by_stream) DO(small) DO(large) DO(total) DO(spare) DO(history) DO(events) DO(gather) DO(block_type)

static PyObject *fast_path_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"guard", "live",  "small_by_stream", "large_by_stream", "small",
                            "large", "total", "slow_calls",      "block_type",      NULL};
    struct state *state = state_of(type);
    struct fast_path given = {.slow = false}, *self;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!O!O!O!O!O!OO!", names, &given.guard, &PyDict_Type,
                                     &given.live, &PyDict_Type, &given.small_by_stream, &PyDict_Type,
                                     &given.large_by_stream, state->counters, &given.small, state->counters,
                                     &given.large, state->counters, &given.total, &given.slow_calls, &PyType_Type,
                                     &given.block_type))
        return NULL;
    if (!PyType_IsSubtype(given.block_type, state->block))
        return PyErr_Format(PyExc_TypeError, "the type of blocks is not a subclass of Block");
    if (!(self = (struct fast_path *)type->tp_alloc(type, 0)))
        return NULL;
    self->state = state;
    FAST_PATH_FIELDS(COPY)
    return (PyObject *)self;
}

static int fast_path_traverse(PyObject *object, visitproc visit, void *arg)
{
    struct fast_path *self = (struct fast_path *)object;
    Py_VISIT(Py_TYPE(object));
    FAST_PATH_FIELDS(VISIT)
    return 0;
}

static int fast_path_clear(PyObject *object)
{
    struct fast_path *self = (struct fast_path *)object;
    self->slow = true; /* a call that comes later finds nothing to work on */
    FAST_PATH_FIELDS(CLEAR)
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
    {Py_tp_new, fast_path_new},
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
