/* The allocator's objects, as C reads and changes them.
 *
 * They are those of the classes written in Python, and nothing is kept twice: where the slots of a class lie is
 * asked of it once. What is to change is noted first and then changed in one go, in which nothing can fail. From
 * the first look to the last change no Python may run: no objects of the garbage collection are made, which may
 * begin it, and no integers multiplied, which looks for signals. So nobody sees but all of it or nothing.
 */
#ifndef CUDAKIT_HOT_SLOTS_H
#define CUDAKIT_HOT_SLOTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>

/* X(module, class, slot) */
#define SLOTS(X) \
    X(block, Block, age_base) \
    X(block, Block, allocated) \
    X(block, Block, bin) \
    X(block, Block, counted) \
    X(block, Block, free) \
    X(block, Block, next) \
    X(block, Block, origin) \
    X(block, Block, other_streams) \
    X(block, Block, previous) \
    X(block, Block, ptr) \
    X(block, Block, requested) \
    X(block, Block, row) \
    X(block, Block, size) \
    X(block, Block, stack) \
    X(block, Block, tab) \
    X(block, Block, waits) \
    X(block, Block, weighed_request) \
    X(block, Block, weighed_size) \
    X(block, Block, weight) \
    X(cache, Cache, _spare) \
    X(cache, Cache, default) \
    X(cache, Cache, divisions) \
    X(cache, Cache, max_split_bytes) \
    X(cache, Cache, recorder) \
    X(cache, Cache, simple) \
    X(cache, Cache, unsplit_bytes) \
    X(front_cache, FrontCache, _others) \
    X(front_cache, FrontCache, counts) \
    X(front_cache, FrontCache, default) \
    X(front_cache, FrontCache, most) \
    X(guard, Guard, busy) \
    X(ledger, Ledger, _tabs) \
    X(ledger, Ledger, added) \
    X(ledger, Ledger, pending) \
    X(ledger, Ledger, used) \
    X(ledger, Tab, times) \
    X(pools, FreeBlocks, part) \
    X(pools, FreeBlocks, parts) \
    X(pools, FreeBlocks, pool) \
    X(pools, FreeBlocks, stream) \
    X(pools, Pool, id) \
    X(pools, Pool, rows) \
    X(pools, Pool, searches) \
    X(pools, Pool, slack_bytes) \
    X(pools, Pool, splits) \
    X(pools, Pool, tally) \
    X(pools, Pools, large) \
    X(pools, Pools, small) \
    X(tally, Peaks, inactive_split_bytes_peak) \
    X(tally, Peaks, inactive_split_peak) \
    X(tally, Tally, inactive_split) \
    X(tally, Tally, inactive_split_added) \
    X(tally, Tally, inactive_split_bytes) \
    X(tally, Tally, inactive_split_bytes_added) \
    X(tally, Tally, kind) \
    X(tally, Tally, ledger) \
    X(tally, Tally, other) \
    X(tally, Tally, whole) \
    X(tracing, Recorder, count) \
    X(tracing, Recorder, events) \
    X(tracing, Recorder, level) \
    X(tracing, Recorder, metadata) \
    X(tracing, Recorder, skipped)

#define X(module, class, slot) class##_##slot,
enum slot { SLOTS(X) SLOT_COUNT };
#undef X

extern Py_ssize_t slot_offsets[SLOT_COUNT];

/* Ask the classes. Raises ImportError where they have other slots. */
bool find_slots(void);

static inline PyObject **place_of(PyObject *object, enum slot slot)
{
    return (PyObject **)((char *)object + slot_offsets[slot]);
}

/* Return what a slot has, borrowed. */
static inline PyObject *get(PyObject *object, enum slot slot)
{
    return *place_of(object, slot);
}

static inline bool is_true(PyObject *object, enum slot slot)
{
    return get(object, slot) == Py_True;
}

static inline bool is_none(PyObject *object, enum slot slot)
{
    return get(object, slot) == Py_None;
}

/* Return an int; ``odd`` is set where it is none, or has more than 64 bits. */
static inline int64_t number_of(PyObject *value, bool *odd)
{
    int overflow = 0;
    if (!PyLong_CheckExact(value)) {
        *odd = true;
        return 0;
    }
    int64_t number = PyLong_AsLongLongAndOverflow(value, &overflow);
    *odd |= overflow != 0;
    return number;
}

static inline int64_t number(PyObject *object, enum slot slot, bool *odd)
{
    return number_of(get(object, slot), odd);
}

/* ---- changes ------------------------------------------------------------------------------------ */

enum { MOST_CHANGES = 48 };

struct changes {
    int count;
    bool failed; /* there is an exception */
    struct change {
        PyObject **place, *value;
    } all[MOST_CHANGES];
};

static inline void begin(struct changes *changes)
{
    changes->count = 0;
    changes->failed = false;
}

/* Note that a slot is to have a value, which is taken; NULL fails. */
static inline void will_take(struct changes *changes, PyObject *object, enum slot slot, PyObject *value)
{
    changes->failed |= !value;
    changes->all[changes->count++] = (struct change){place_of(object, slot), value};
}

static inline void will_be(struct changes *changes, PyObject *object, enum slot slot, PyObject *value)
{
    Py_INCREF(value);
    will_take(changes, object, slot, value);
}

static inline void will_count(struct changes *changes, PyObject *object, enum slot slot, int64_t value)
{
    will_take(changes, object, slot, PyLong_FromLongLong(value));
}

/* Change what was noted, in its order. */
static inline void make(struct changes *changes)
{
    for (int each = 0; each < changes->count; each++) {
        struct change *change = &changes->all[each];
        PyObject *old = *change->place;
        *change->place = change->value;
        change->value = old;
    }
}

/* Let go of what was changed, or of what was noted where nothing was. */
static inline void forget(struct changes *changes)
{
    for (int each = 0; each < changes->count; each++)
        Py_XDECREF(changes->all[each].value);
}

#endif
