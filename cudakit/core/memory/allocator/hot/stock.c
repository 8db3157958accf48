#include "stock.h"

#include <time.h>

PyObject *action_alloc, *action_free_requested, *action_free_completed;
static PyObject *append_name;

static bool find_action(PyObject *tracing, const char *name, PyObject **action)
{
    Py_XSETREF(*action, tracing ? PyObject_GetAttrString(tracing, name) : NULL);
    return *action;
}

bool find_actions(void)
{
    PyObject *tracing = PyImport_ImportModule("cudakit.core.memory.allocator.tracing");
    bool found = find_action(tracing, "ALLOC", &action_alloc) &&
                 find_action(tracing, "FREE_REQUESTED", &action_free_requested) &&
                 find_action(tracing, "FREE_COMPLETED", &action_free_completed);
    Py_XDECREF(tracing);
    Py_XSETREF(append_name, PyUnicode_InternFromString("append"));
    return found && append_name;
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

bool will_record(struct changes *changes, struct stock *stock, int event, PyObject *action, PyObject *block,
                 PyObject *requested)
{
    PyObject *recorder = stock->recorder, *made = stock->events[event], *moment = now();
    PyObject *row = get(block, Block_row), *pool = get(row, FreeBlocks_pool);
    if (!moment)
        return false;
    PyObject *fields[] = {action, get(block, Block_ptr), requested, get(row, FreeBlocks_stream), moment, Py_None,
                          get(pool, Pool_id), get(recorder, Recorder_metadata)};
    for (int field = 0; field < 8; field++)
        PyTuple_SET_ITEM(made, field, Py_NewRef(fields[field]));
    Py_DECREF(moment);
    bool odd = false;
    will_count(changes, recorder, Recorder_count, number(recorder, Recorder_count, &odd) + event + 1);
    return !odd;
}

void record(struct stock *stock)
{
    for (int each = 0; stock->recorder && each < MOST_EVENTS && stock->events[each]; each++) {
        PyObject *events = get(stock->recorder, Recorder_events);
        PyObject *none = PyObject_CallMethodOneArg(events, append_name, stock->events[each]);
        if (!none) /* of memory; what was done is done */
            PyErr_WriteUnraisable(stock->recorder);
        Py_XDECREF(none);
    }
}
