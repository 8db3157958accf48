#include "stock.h"

#include <time.h>

static PyObject *actions[ACTION_COUNT], *append; /* of a deque */

bool find_actions(void)
{
    static const char *const names[ACTION_COUNT] = {"ALLOC", "FREE_REQUESTED", "FREE_COMPLETED"};
    PyObject *tracing = PyImport_ImportModule("cudakit.core.memory.allocator.tracing");
    PyObject *deque = tracing ? PyObject_GetAttrString(tracing, "deque") : NULL;
    bool found = deque != NULL;
    for (int action = 0; found && action < ACTION_COUNT; action++) {
        Py_XSETREF(actions[action], PyObject_GetAttrString(tracing, names[action]));
        found = actions[action];
    }
    Py_XSETREF(append, found ? PyObject_GetAttrString(deque, "append") : NULL);
    Py_XDECREF(deque);
    Py_XDECREF(tracing);
    return append;
}

bool stock_up(struct stock *stock, struct calls *calls, int events)
{
    *stock = (struct stock){.entry = PyTuple_New(3)};
    bool right = stock->entry;
    if (PySet_GET_SIZE(calls->unusual) != 0)
        for (int each = 0; right && each < events; each++)
            right = (stock->events[each] = PyTuple_New(8)) != NULL;
    return right;
}

void stock_drop(struct stock *stock)
{
    Py_XDECREF(stock->entry);
    for (int each = 0; each < MOST_EVENTS; each++)
        Py_XDECREF(stock->events[each]);
}

bool keep_spare(struct calls *calls)
{
    if (!is_none(calls->cache, Cache__spare))
        return true;
    PyTypeObject *class = Py_TYPE(calls->block);
    PyObject *block = class->tp_alloc(class, 0);
    if (!block)
        return false;
    for (enum slot slot = Block_age_base; slot <= Block_weight; slot++)
        *place_of(block, slot) = Py_NewRef(get(calls->block, slot));
    Py_SETREF(*place_of(calls->cache, Cache__spare), block);
    return true;
}

/* Whether the one unusual thing is a recording without stacks that leaves nothing out. */
static bool only_records(struct stock *stock, struct calls *calls)
{
    PyObject *recorder = get(calls->cache, Cache_recorder);
    if (PySet_GET_SIZE(calls->unusual) != 1 || recorder == Py_None || !stock->events[0])
        return false;
    stock->recorder = recorder;
    return PyLong_AsLong(get(recorder, Recorder_level)) == 0 &&
           PySet_GET_SIZE(get(recorder, Recorder_skipped)) == 0;
}

bool is_usual(struct stock *stock, struct calls *calls)
{
    if (is_true(calls->guard, Guard_busy) || PyObject_Size(calls->late) != 0)
        return false;
    return PySet_GET_SIZE(calls->unusual) == 0 ? is_none(calls->cache, Cache_recorder)
                                               : only_records(stock, calls);
}

PyObject *entry_of(struct stock *stock, PyObject *size, PyObject *ptr, PyObject *block)
{
    PyObject *entry = stock->entry;
    stock->entry = NULL;
    PyTuple_SET_ITEM(entry, 0, Py_NewRef(size));
    PyTuple_SET_ITEM(entry, 1, Py_NewRef(ptr));
    PyTuple_SET_ITEM(entry, 2, Py_NewRef(block));
    return entry;
}

/* As time.perf_counter_ns. */
static PyObject *now(void)
{
    struct timespec moment;
    clock_gettime(CLOCK_MONOTONIC, &moment);
    return PyLong_FromLongLong(moment.tv_sec * 1000000000LL + moment.tv_nsec);
}

bool will_record(struct changes *changes, struct stock *stock, enum action first, PyObject *block,
                 PyObject *requested)
{
    bool odd = false;
    PyObject *recorder = stock->recorder, *moment = now();
    PyObject *row = get(block, Block_row), *pool = get(row, FreeBlocks_pool);
    int64_t count = number(recorder, Recorder_count, &odd);
    if (!moment)
        return false;
    for (int each = 0; each < MOST_EVENTS && stock->events[each]; each++, count++) {
        PyObject *fields[] = {actions[first + each], get(block, Block_ptr), requested, get(row, FreeBlocks_stream),
                              moment, Py_None, get(pool, Pool_id), get(recorder, Recorder_metadata)};
        for (int field = 0; field < 8; field++)
            PyTuple_SET_ITEM(stock->events[each], field, Py_NewRef(fields[field]));
    }
    Py_DECREF(moment);
    will_count(changes, recorder, Recorder_count, count);
    return !odd;
}

void record(struct stock *stock)
{
    for (int each = 0; stock->recorder && each < MOST_EVENTS && stock->events[each]; each++) {
        PyObject *args[] = {get(stock->recorder, Recorder_events), stock->events[each]};
        PyObject *none = PyObject_Vectorcall(append, args, 2, NULL);
        if (!none) /* of memory; what was done is done */
            PyErr_WriteUnraisable(stock->recorder);
        Py_XDECREF(none);
    }
}
