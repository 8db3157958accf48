/* Events: the ring of the latest events, while history is recorded. */
#ifndef CUDAKIT_FAST_EVENTS_H
#define CUDAKIT_FAST_EVENTS_H

#include "blocks.h"

/* One event. If Python code appended it, action is NULL and stack is the event as a tuple. */
struct event {
    PyObject *action;
    PyObject *stack, *metadata;
    struct free_blocks *free_blocks; /* free blocks of the event's stream and pool */
    long long address, size, time_ns;
};
#define EVENT_FIELDS(DO) DO(action) DO(stack) DO(metadata) DO(free_blocks)

/* A ring of the latest maxlen events. */
struct events {
    PyObject_HEAD
    struct event *ring; /* if full, the next event replaces item count % maxlen */
    PyObject *metadata; /* stored in each event that is appended */
    Py_ssize_t maxlen;  /* maximum number of events in the ring */
    Py_ssize_t length;  /* allocated items of the ring, which grows up to maxlen */
    Py_ssize_t count;   /* number of all appended events, including dropped ones */
};

/* tp_traverse: visit the references of all events. */
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

/* tp_clear: drop all events. The fields are reset first, because dropping an event may run Python code. */
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

/* Events(maxlen, metadata): create an empty ring. */
static PyObject *events_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *argument_names[] = {"maxlen", "metadata", NULL};
    struct events parsed_fields, *self;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "nO", argument_names, &parsed_fields.maxlen,
                                     &parsed_fields.metadata) ||
        !(self = (struct events *)type->tp_alloc(type, 0)))
        return NULL;
    self->maxlen = Py_MAX(parsed_fields.maxlen, 1);
    self->metadata = Py_NewRef(parsed_fields.metadata);
    return (PyObject *)self;
}

/* Append an event; return false with an exception if no memory is left. Dropping the oldest event may run a
 * finalizer. */
static bool append_event(struct events *self, struct event event)
{
    if (self->count == self->length && self->length < self->maxlen) {
        Py_ssize_t new_length = Py_MIN(self->maxlen, self->length * 2 + 64);
        struct event *new_ring = PyMem_Realloc(self->ring, (size_t)new_length * sizeof *new_ring);
        if (!new_ring)
            return PyErr_NoMemory();
        memset(new_ring + self->length, 0, (size_t)(new_length - self->length) * sizeof *new_ring);
        self->ring = new_ring;
        self->length = new_length;
    }
    struct event *slot = self->ring + self->count++ % self->maxlen, dropped = *slot;
#define INCREF(field) Py_XINCREF(event.field);
#define DECREF(field) Py_XDECREF(dropped.field);
    EVENT_FIELDS(INCREF)
    *slot = event;
    EVENT_FIELDS(DECREF)
    return true;
}

/* append(event): append an event that Python code created, a tuple. */
static PyObject *events_append(PyObject *self, PyObject *event)
{
    if (!PyTuple_Check(event))
        return PyErr_Format(PyExc_TypeError, "an event is a tuple");
    if (!append_event((struct events *)self, (struct event){.stack = event}))
        return NULL;
    Py_RETURN_NONE;
}

/* iter(events): return an iterator over the events as tuples, the oldest first. Creating a tuple may run a finalizer
 * that appends events and so drops others; so each event's references are held while its tuple is
 * created. */
static PyObject *events_iter(PyObject *object)
{
    struct events *self = (struct events *)object;
    Py_ssize_t length = Py_MIN(self->count, self->maxlen), first_index = self->count - length;
    PyObject *event_list = PyList_New(length), *iterator = NULL;
    for (Py_ssize_t i = 0; event_list && i < length; i++) {
        const struct event event = self->ring[(first_index + i) % self->maxlen], dropped = event;
        EVENT_FIELDS(INCREF)
        PyObject *event_tuple = event.action ? Py_BuildValue("OLLOLOOO", event.action, event.address, event.size,
                                                             event.free_blocks->stream, event.time_ns, event.stack,
                                                             event.free_blocks->pool_id, event.metadata)
                                             : Py_NewRef(event.stack);
        EVENT_FIELDS(DECREF)
        if (event_tuple)
            PyList_SET_ITEM(event_list, i, event_tuple);
        else
            Py_CLEAR(event_list);
    }
    if (event_list)
        iterator = PyObject_GetIter(event_list);
    Py_XDECREF(event_list);
    return iterator;
}

static PyMemberDef events_members[] = {
    MEMBER(events, maxlen, T_PYSSIZET, READONLY),
    MEMBER(events, count, T_PYSSIZET, READONLY),
    MEMBER(events, metadata, T_OBJECT, 0),
    END_OF_MEMBERS,
};

static PyMethodDef events_methods[] = {{"append", events_append, METH_O, NULL}, {NULL, NULL, 0, NULL}};

static PyType_Slot events_slots[] = {
    {Py_tp_new, events_new},
    {Py_tp_members, events_members},
    {Py_tp_methods, events_methods},
    {Py_tp_iter, events_iter},
    GC_SLOTS(events),
};

#endif
