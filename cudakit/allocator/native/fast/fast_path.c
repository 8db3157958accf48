/* The fast path of the caching allocator: alloc and free in C, and the data that they work on.
 *
 * Scope. A program allocates and frees memory millions of times, and nearly every call is the usual case: a free
 * block of the request's stream is large enough, no block waits for another stream, and no option is on. This
 * extension performs exactly these calls. All other calls are passed unchanged to slow_alloc and slow_free, the
 * methods alloc and free of allocator.py, which handle every case in Python. So the rules for the other cases are
 * written only once.
 *
 * Plain Python. blocks.py, stats.py, history.py and guard.py have plain types with the same attributes and methods as
 * the types here. They are used if no C compiler was available at installation, and are the reference of the tests
 * (tests/allocator/test_fast_path.py). The rest of the allocator is written in Python, and uses the plain or the
 * native types through attributes and methods only.
 *
 * The types (types.h, blocks.h, events.h, and this file):
 *
 *   Gate           whether the fast path may be used: not while the allocator is busy or an option is on
 *   BlockCounters  counters of the small or the large pools, for the statistics
 *   Block          a part of a segment, linked with the blocks before and after it
 *   FreeBlocks     the free blocks of one pool and stream, sorted by size and address
 *   Events         the ring of the latest events, while history is recorded
 *   FastPath       alloc and free, which use objects of the five other types
 *
 * FreeBlocks has a treap for each size class, a power of two: a binary search tree by size and address that is also
 * a heap by a random priority, and therefore balanced on average (Seidel and Aragon 1996). A search descends one
 * path; insertion and removal split and join subtrees. A sorted array would need less code, but with 100,000 free
 * blocks each call would move a megabyte. In a treap, neither insertion nor removal allocates memory, so they cannot
 * fail.
 *
 * References. The tree owns a reference to each free block. `live_blocks`, the dictionary of allocated blocks by
 * address, which Python code uses too, owns a reference to each allocated block. prev and next own references too,
 * so that they never point to released memory, even if Python code changes them.
 *
 * Threads and finalizers. The interpreter's lock makes a call atomic, as long as the call runs no Python code.
 * Python code may run whenever an object is released or the garbage collector starts: a finalizer may then call this
 * allocator. So every call has three phases:
 *
 *   1. prepare: gather the call stack, create the block for the rest of a split (`spare`). This may run Python code.
 *   2. change:  check the gate again; then change blocks, tree, counters and `live_blocks`. No Python code runs.
 *   3. finish:  record events, and release replaced objects. This may run Python code: the change is complete.
 *
 * A finalizer therefore sees the allocator before or after a change, never in the middle. A request that fails
 * for lack of host memory fails in phase 1, before anything has changed.
 *
 * alloc_found_block and free_block do the same as in PyTorch's c10/cuda/CUDACachingAllocator.cpp. */
#include "events.h"

#include <time.h>

/* The largest small request, and the largest rest of a large block that is not split off: the same values as
 * MAX_SMALL_BYTES and MIB in torch_rules/settings.py. */
enum { MAX_SMALL_BYTES = 1 << 20, LARGE_SLACK = 1 << 20 };
static const long long TOO_MANY_BYTES = 1LL << 60;
/* CU_STREAM_LEGACY and CU_STREAM_PER_THREAD (CUDA Driver API, data types). */
enum { LEGACY_STREAM = 1, PER_THREAD_STREAM = 2 };
/* Levels of call-stack recording: the same values as in history.Level. */
enum { LEVEL_STATE = 1, LEVEL_ALLOC = 2, LEVEL_ALL = 3 };

/* ---- alloc and free, phase 2: change ----------------------------------------------------------------------- */

/* alloc and free of one allocator. */
struct fast_path {
    PyObject_HEAD
    struct state *state;
    struct gate *gate;
    PyObject *live_blocks, *slow_alloc, *slow_free;
    PyObject *small_by_stream, *large_by_stream; /* FreeBlocks of the default pool by stream */
    struct counters *small_counters, *large_counters, *total_counters;
    struct block *spare;   /* created in advance for the rest of a split */
    struct events *events; /* the history; NULL while none is recorded */
    PyObject *gather;      /* returns the call stack of its caller */
    long level;            /* history.Level: the events whose stacks are gathered */
};

/* Add a change to a counter of the small or the large pools, and update the peak of both kinds of pools. */
static void add_to_counter(const struct fast_path *self, struct counters *counters, enum counter_index index,
                           long long change)
{
    const struct counters *other_counters =
        counters == self->small_counters ? self->large_counters : self->small_counters;
    struct counter *counter = &counters->values[index];
    long long *peak = &self->total_counters->values[index].peak;
    counter->current += change;
    if (change <= 0)
        return;
    counter->sum += change;
    counter->peak = Py_MAX(counter->peak, counter->current);
    *peak = Py_MAX(*peak, counter->current + other_counters->values[index].current);
}

/* Count an allocated block (sign 1) or a freed block (sign -1). */
static void count_block(const struct fast_path *self, const struct block *block, int sign)
{
    struct counters *counters = block->free_blocks->counters;
    add_to_counter(self, counters, ALLOCATION, sign);
    add_to_counter(self, counters, ALLOCATED_BYTES, sign * block->size);
    add_to_counter(self, counters, REQUESTED_BYTES, sign * block->requested);
}

/* Count a change of the number and the size of free blocks in split segments. */
static void count_split(const struct fast_path *self, const struct block *block, int blocks, long long size)
{
    add_to_counter(self, block->free_blocks->counters, INACTIVE_SPLIT, blocks);
    add_to_counter(self, block->free_blocks->counters, INACTIVE_SPLIT_BYTES, size);
}

/* Shrink a block to a size. The rest becomes a free block, for which the spare block is used. */
static void split_block(struct fast_path *self, struct block *block, long long size)
{
    struct block *rest_block = self->spare, *next_block = block->next;
    bool is_whole = !next_block && !block->prev;
    self->spare = NULL;
    rest_block->ptr = block->ptr + size;
    rest_block->size = block->size - size;
    rest_block->requested = block->requested; /* size of the last request, as in PyTorch's inactive blocks */
    rest_block->event_count = 0;
    rest_block->is_mapped = true;
    rest_block->free_blocks = (struct free_blocks *)Py_NewRef(block->free_blocks);
    rest_block->segment_stack = block->segment_stack;
    block->segment_stack = NULL;
    rest_block->prev = (struct block *)Py_NewRef(block);
    rest_block->next = next_block; /* takes over the reference of block->next */
    if (next_block)
        Py_SETREF(next_block->prev, (struct block *)Py_NewRef(rest_block));
    block->next = (struct block *)Py_NewRef(rest_block);
    block->size = size;
    count_split(self, block, is_whole, is_whole ? rest_block->size : -size);
    insert_block(block->free_blocks, rest_block);
}

/* Allocate a block that was removed from its tree, and split it if the rest is large enough. */
static void alloc_found_block(struct fast_path *self, struct block *block, long long size, long long requested)
{
    long long rest_bytes = block->size - size;
    if (size <= MAX_SMALL_BYTES ? rest_bytes >= SMALLEST_BLOCK : rest_bytes > LARGE_SLACK)
        split_block(self, block, size);
    else if (block->prev || block->next)
        count_split(self, block, -1, -block->size);
    block->is_allocated = true;
    block->requested = requested;
    count_block(self, block, 1);
}

/* Merge the next block into a block; return the absorbed block with the reference of self->next. */
static struct block *absorb_next(struct block *self)
{
    struct block *absorbed_block = self->next, *next_block = absorbed_block->next;
    self->size += absorbed_block->size;
    self->next = next_block; /* takes over the reference of absorbed_block->next */
    absorbed_block->next = NULL;
    Py_CLEAR(absorbed_block->prev); /* not the last reference to `self`, because the caller holds one */
    if (next_block) {
        next_block->prev = (struct block *)Py_NewRef(self);
        Py_DECREF(
            absorbed_block); /* reference of next_block->prev; not the last one, because the caller gets one */
    }
    return absorbed_block;
}

/* Remove an adjacent block from the tree, so that it can be merged; return false if it is not free. */
static bool take_adjacent(struct free_blocks *free_blocks, struct block *adjacent)
{
    return adjacent && adjacent->is_free && adjacent->free_blocks == free_blocks && remove_block(adjacent);
}

/* Free an allocated block, and merge it with adjacent free blocks. The caller gets references to up to two absorbed
 * blocks, and must have saved block->stack, whose reference it then owns. */
static void free_block(struct fast_path *self, struct block *block, struct block *absorbed_blocks[2])
{
    struct free_blocks *free_blocks = block->free_blocks;
    struct block *previous_block = block->prev, *next_block = block->next;
    int count_change = 0; /* changes of the number and the size of free blocks by merging */
    long long size_change = 0;
    block->is_allocated = false;
    block->stack = NULL;
    count_block(self, block, -1);
    if (take_adjacent(free_blocks, next_block)) {
        count_change--;
        size_change -= next_block->size;
        Py_DECREF(next_block); /* reference of the tree; not the last one, because block->next has one */
        absorbed_blocks[0] = absorb_next(block);
    }
    if (take_adjacent(free_blocks, previous_block)) { /* insert_block below takes over the reference of the tree */
        count_change--;
        size_change -= previous_block->size;
        previous_block->requested = block->requested;
        absorbed_blocks[1] = absorb_next(previous_block);
        block = previous_block;
    } else {
        Py_INCREF(block);
    }
    insert_block(free_blocks, block);
    if (block->prev || block->next)
        count_split(self, block, count_change + 1, size_change + block->size);
    else
        count_split(self, block, count_change, size_change);
}

/* ---- alloc and free, phases 1 and 3: prepare, finish ---------------------------------------------------- */

/* Return whether the fast path may change the allocator. */
static bool is_open(const struct fast_path *self)
{
    return self->gate && !self->gate->busy && !self->gate->slow;
}

/* Gather the call stack if stacks of a level are recorded; return false with an exception on failure. */
static bool gather_stack(const struct fast_path *self, long level, PyObject **stack)
{
    if (self->level < level)
        return true;
    PyObject *gather = Py_NewRef(self->gather); /* the call may replace self->gather */
    *stack = PyObject_CallNoArgs(gather);
    Py_DECREF(gather);
    return *stack;
}

/* Create the spare block for the rest of a split, if it is missing; return false with an exception on failure. */
static bool create_spare(struct fast_path *self)
{
    PyTypeObject *block_type = self->state->types[BLOCK];
    struct block *spare = self->spare ? NULL : (struct block *)block_type->tp_alloc(block_type, 0);
    if (spare)
        Py_XSETREF(self->spare, spare); /* tp_alloc may have run a finalizer that created a spare */
    return self->spare;
}

/* Reuse an absorbed block as the spare if no other reference to it exists. Takes over a reference. */
static void reuse_as_spare(struct fast_path *self, struct block *block)
{
    if (block && Py_REFCNT(block) == 1)
        block_clear((PyObject *)block);
    if (block && !block->free_blocks && !self->spare)
        self->spare = block;
    else
        Py_XDECREF(block);
}

/* Return the event of an allocated block, with borrowed references. If stack is NULL, the block's stack is used. */
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

/* Record an event with an action and, unless NULL, a second one with next_action. Exceptions are reported by
 * sys.unraisablehook, because the allocator was changed already. */
static void record_events(const struct fast_path *self, struct event event, PyObject *action,
                          PyObject *next_action)
{
    struct events *events =
        (struct events *)Py_XNewRef((PyObject *)self->events); /* a finalizer may replace self->events */
    struct timespec now;                                       /* the clock of time.perf_counter_ns */
    if (!events)
        return;
    clock_gettime(CLOCK_MONOTONIC, &now);
    event.time_ns = now.tv_sec * 1000000000LL + now.tv_nsec;
    event.metadata = Py_NewRef(events->metadata ? events->metadata : Py_None);
    event.action = action;
    bool is_recorded = append_event(events, event);
    event.action = next_action;
    if (!is_recorded || (next_action && !append_event(events, event)))
        PyErr_WriteUnraisable((PyObject *)events);
    Py_DECREF(event.metadata);
    Py_DECREF(events);
}

/* Read a size, an address or a stream; return false if the object is not an int of 64 bits. */
static bool read_int(PyObject *object, long long *value)
{
    int overflow = 1;
    if (PyLong_CheckExact(object))
        *value = PyLong_AsLongLongAndOverflow(object, &overflow);
    return !overflow;
}

/* Return the number of arguments: one, or two if the second is positional or named stream; 0 for all other calls. */
static Py_ssize_t count_arguments(const struct fast_path *self, Py_ssize_t nargs, PyObject *kwnames)
{
    if (!kwnames)
        return nargs <= 2 ? nargs : 0;
    bool names_stream = nargs == 1 && PyTuple_GET_SIZE(kwnames) == 1;
    return names_stream && PyTuple_GET_ITEM(kwnames, 0) == self->state->stream ? 2 : 0;
}

/* Pass a call on to slow_alloc or slow_free, unless an exception is set. */
static PyObject *call_slow(PyObject *call, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    if (PyErr_Occurred())
        return NULL;
    return call ? PyObject_Vectorcall(call, args, (size_t)nargs, kwnames)
                : PyErr_Format(PyExc_RuntimeError, "the allocator was garbage-collected");
}

/* Allocate the best fit of the default pool, and return its address. Returns NULL without an exception if no block
 * fits. */
static PyObject *alloc_best_fit(struct fast_path *self, PyObject *stream, long long requested, PyObject *stack)
{
    long long size = (requested + SMALLEST_BLOCK - 1) & -SMALLEST_BLOCK;
    PyObject *blocks_by_stream = size <= MAX_SMALL_BYTES ? self->small_by_stream : self->large_by_stream;
    PyObject *free_blocks = PyDict_GetItemWithError(blocks_by_stream, stream);
    bool is_native = free_blocks && PyObject_TypeCheck(free_blocks, self->state->types[FREE_BLOCKS]);
    struct block *block = is_native ? best_fit((struct free_blocks *)free_blocks, size) : NULL;
    PyObject *ptr = block ? PyLong_FromLongLong(block->ptr) : NULL;
    if (!ptr || PyDict_SetItem(self->live_blocks, ptr, (PyObject *)block) < 0) {
        Py_XDECREF(ptr);
        return NULL;
    }
    remove_block(block);
    PyObject *old_stack = block->stack;
    alloc_found_block(self, block, size, requested);
    block->stack = Py_XNewRef(stack);
    record_events(self, event_of(self, block, NULL), self->state->alloc, NULL);
    Py_XDECREF(old_stack);
    Py_DECREF(block); /* reference of the tree; `live_blocks` has another one */
    return ptr;
}

/* alloc(size_bytes, stream=0): allocate on the fast path if possible, else by slow_alloc. */
static PyObject *fast_path_alloc(PyObject *object, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    struct fast_path *self = (struct fast_path *)object;
    Py_ssize_t argument_count = count_arguments(self, nargs, kwnames);
    PyObject *stream = argument_count == 2 ? args[1] : self->state->zero, *stack = NULL, *ptr = NULL;
    long long requested, stream_number;
    if (argument_count && is_open(self) && read_int(args[0], &requested) && requested > 0 &&
        requested < TOO_MANY_BYTES && read_int(stream, &stream_number) && stream_number != PER_THREAD_STREAM &&
        gather_stack(self, LEVEL_STATE, &stack) && create_spare(self) && is_open(self))
        ptr = alloc_best_fit(self, stream_number == LEGACY_STREAM ? self->state->zero : stream, requested, stack);
    Py_XDECREF(stack);
    return ptr ? ptr : call_slow(self->slow_alloc, args, nargs, kwnames);
}

/* Return the live block at an address; NULL without an exception if only the slow path can free the address. */
static struct block *find_freeable(const struct fast_path *self, PyObject *ptr, PyObject *stream)
{
    struct block *block = (struct block *)PyDict_GetItemWithError(self->live_blocks, ptr);
    long long stream_number, block_stream;
    if (!block || !Py_IS_TYPE(block, self->state->types[BLOCK]) || block->is_free ||
        (block->stream_uses && block->stream_uses != Py_None) ||
        (block->expandable_segment && block->expandable_segment != Py_None))
        return NULL;
    if (stream == Py_None)
        return block;
    if (!read_int(stream, &stream_number) || !read_int(block->free_blocks->stream, &block_stream))
        return NULL;
    return block_stream == (stream_number == LEGACY_STREAM ? 0 : stream_number) ? block : NULL;
}

/* free(ptr, stream=None): free on the fast path if possible, else by slow_free. */
static PyObject *fast_path_free(PyObject *object, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    struct fast_path *self = (struct fast_path *)object;
    Py_ssize_t argument_count = count_arguments(self, nargs, kwnames);
    PyObject *stream = argument_count == 2 ? args[1] : Py_None, *stack = NULL;
    struct block *block = NULL, *absorbed_blocks[2] = {NULL, NULL};
    /* The address must be a plain int: comparing another type of key could run Python code. */
    if (argument_count && is_open(self) && PyLong_CheckExact(args[0]) && gather_stack(self, LEVEL_ALL, &stack) &&
        is_open(self))
        block = (struct block *)Py_XNewRef((PyObject *)find_freeable(self, args[0], stream));
    if (!block || PyDict_DelItem(self->live_blocks, args[0]) < 0) {
        Py_XDECREF(stack);
        Py_XDECREF(block);
        return call_slow(self->slow_free, args, nargs, kwnames);
    }
    struct event event = event_of(self, block, stack);
    PyObject *old_stack = block->stack;
    free_block(self, block, absorbed_blocks);
    record_events(self, event, self->state->free_requested, self->state->free_completed);
    Py_DECREF(block);
    reuse_as_spare(self, absorbed_blocks[0]);
    reuse_as_spare(self, absorbed_blocks[1]);
    Py_XDECREF(stack);
    Py_XDECREF(old_stack);
    Py_RETURN_NONE;
}

/* set_history(events, level, gather): record the events of alloc and free in `events` (None: record nothing), with
 * the stacks that gather() returns. */
static PyObject *fast_path_set_history(PyObject *object, PyObject *args)
{
    struct fast_path *self = (struct fast_path *)object, parsed_fields = {.level = 0};
    PyObject *events;
    if (!PyArg_ParseTuple(args, "OlO", &events, &parsed_fields.level, &parsed_fields.gather))
        return NULL;
    if (events != Py_None && !PyObject_TypeCheck(events, self->state->types[EVENTS]))
        return PyErr_Format(PyExc_TypeError, "the events of the history are not native");
    self->level = parsed_fields.level;
    Py_XSETREF(self->gather, Py_NewRef(parsed_fields.gather));
    Py_XSETREF(self->events, events == Py_None ? NULL : (struct events *)Py_NewRef(events));
    Py_RETURN_NONE;
}

/* The fields that own references. The gate is cleared first: without a gate, alloc and free change nothing. */
#define FAST_PATH_FIELDS(DO) \
    DO(gate) \
    DO(live_blocks) \
    DO(slow_alloc) \
    DO(slow_free) \
    DO(small_by_stream) \
    DO(large_by_stream) \
    DO(small_counters) DO(large_counters) DO(total_counters) DO(spare) DO(events) DO(gather)
DEFINE_GC_FUNCTIONS(fast_path, FAST_PATH_FIELDS)

/* FastPath(gate, live, ...): create the fast path of an allocator; see _fast.pyi for the arguments. */
static PyObject *fast_path_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *argument_names[] = {"gate",  "live_blocks", "small_by_stream", "large_by_stream", "small",
                                     "large", "total",       "slow_alloc",      "slow_free",       NULL};
    struct state *state = state_of(type);
    PyTypeObject *dict_type = &PyDict_Type, **types = state->types;
    struct fast_path parsed_fields = {.level = 0}, *self;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!O!O!O!O!O!OO", argument_names, types[GATE],
                                     &parsed_fields.gate, dict_type, &parsed_fields.live_blocks, dict_type,
                                     &parsed_fields.small_by_stream, dict_type, &parsed_fields.large_by_stream,
                                     types[COUNTERS], &parsed_fields.small_counters, types[COUNTERS],
                                     &parsed_fields.large_counters, types[COUNTERS], &parsed_fields.total_counters,
                                     &parsed_fields.slow_alloc, &parsed_fields.slow_free))
        return NULL;
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
    GC_SLOTS(fast_path),
};

/* ---- the module ------------------------------------------------------------------------------------------ */

#define SPEC(name, type, flags) \
    {"cudakit.allocator._fast." name, sizeof(struct type), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | (flags), \
     type##_slots}

/* Initialize the module: create its types and the objects in its state. */
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
    bool is_created = (state->zero = PyLong_FromLong(0)) &&
                      (state->stream = PyUnicode_InternFromString("stream")) &&
                      (state->alloc = PyUnicode_InternFromString("alloc")) &&
                      (state->free_requested = PyUnicode_InternFromString("free_requested")) &&
                      (state->free_completed = PyUnicode_InternFromString("free_completed"));
    return is_created ? 0 : -1;
}

/* m_traverse: visit the types. The strings and the int in the state cannot be part of reference cycles. */
static int traverse_module(PyObject *self, visitproc visit, void *arg)
{
    struct state *state = PyModule_GetState(self);
    for (int i = 0; i < TYPES; i++)
        Py_VISIT(state->types[i]);
    return 0;
}

/* m_clear: release the types. */
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
    {0, NULL}, /* Py_mod_gil is not declared, because a change is atomic only with the interpreter's lock. */
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,   .m_name = "cudakit.allocator._fast", .m_size = sizeof(struct state),
    .m_slots = module_slots, .m_traverse = traverse_module,       .m_clear = clear_module,
};

PyMODINIT_FUNC PyInit__fast(void)
{
    return PyModuleDef_Init(&module);
}
