/* The basis of all types of the fast path: macros, the state of the module, and the two simplest types. */
#ifndef CUDAKIT_FAST_TYPES_H
#define CUDAKIT_FAST_TYPES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <structmember.h>

#define MEMBER(type, name, kind, flags) {#name, kind, offsetof(struct type, name), flags, NULL}
#define END {NULL, 0, 0, 0, NULL}
/* To apply to each field of a list of references. */
#define VISIT(field) Py_VISIT(self->field);
#define CLEAR(field) Py_CLEAR(self->field);
#define COPY(field) self->field = (void *)Py_XNewRef((PyObject *)parsed.field);
/* Define tp_traverse and tp_clear for a type; FIELDS lists its references. */
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

#endif
