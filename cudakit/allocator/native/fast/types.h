/* The common definitions of the fast path: macros, the state of the module, and the types Gate and BlockCounters.
 * All functions of the fast path need the interpreter's lock (GIL). */
#ifndef CUDAKIT_FAST_TYPES_H
#define CUDAKIT_FAST_TYPES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <structmember.h>

#define MEMBER(type, name, kind, flags) {#name, kind, offsetof(struct type, name), flags, NULL}
#define END_OF_MEMBERS {NULL, 0, 0, 0, NULL}
/* Operations on one field of `self`, to apply to every field that owns a reference. */
#define VISIT(field) Py_VISIT(self->field);
#define CLEAR(field) Py_CLEAR(self->field);
#define COPY(field) self->field = (void *)Py_XNewRef((PyObject *)parsed_fields.field);
/* Define tp_traverse and tp_clear for the garbage collector; FIELDS lists the fields that own references. */
#define DEFINE_GC_FUNCTIONS(type, FIELDS) \
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
#define GC_SLOTS(type) \
    {Py_tp_traverse, type##_traverse}, {Py_tp_clear, type##_clear}, {Py_tp_dealloc, dealloc}, \
    { \
        0, NULL \
    }

/* Indices of the types in module state. TYPES is their number. */
enum type { GATE, COUNTERS, BLOCK, FREE_BLOCKS, EVENTS, FAST_PATH, TYPES };

/* The state of the module: its types, and objects that are used often. */
struct state {
    PyTypeObject *types[TYPES];
    PyObject *zero, *stream, *alloc, *free_requested, *free_completed;
};
static struct PyModuleDef module;

/* Return the state of the module that defines a type or its base. */
static struct state *state_of(PyTypeObject *type)
{
    return PyModule_GetState(PyType_GetModuleByDef(type, &module));
}

/* tp_dealloc of all types with garbage collection. */
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
    char busy; /* true while a call changes the allocator */
    char slow; /* true while an option is on that the fast path does not implement */
};

static PyMemberDef gate_members[] = {MEMBER(gate, busy, T_BOOL, 0), MEMBER(gate, slow, T_BOOL, 0), END_OF_MEMBERS};
static PyType_Slot gate_slots[] = {{Py_tp_members, gate_members}, {0, NULL}};

/* Current value, sum of the increases, and peak of one statistic. */
struct counter {
    long long current, sum, peak;
};

/* Indices of the counters; COUNTERS_PER_KIND is their number. */
enum counter_index {
    ALLOCATION,
    ALLOCATED_BYTES,
    REQUESTED_BYTES,
    INACTIVE_SPLIT,
    INACTIVE_SPLIT_BYTES,
    COUNTERS_PER_KIND
};

/* Counters of the small pools, of the large pools, or of both. In the counters of both, only peaks are used. */
struct counters {
    PyObject_HEAD
    struct counter values[COUNTERS_PER_KIND];
    long long searches;
};

#define STAT(name, index) \
    {name, T_LONGLONG, offsetof(struct counters, values[index].current), 0, NULL}, \
        {name "_sum", T_LONGLONG, offsetof(struct counters, values[index].sum), 0, NULL}, \
    { \
        name "_peak", T_LONGLONG, offsetof(struct counters, values[index].peak), 0, NULL \
    }

static PyMemberDef counters_members[] = {
    STAT("allocation", ALLOCATION),
    STAT("allocated_bytes", ALLOCATED_BYTES),
    STAT("requested_bytes", REQUESTED_BYTES),
    STAT("inactive_split", INACTIVE_SPLIT),
    STAT("inactive_split_bytes", INACTIVE_SPLIT_BYTES),
    MEMBER(counters, searches, T_LONGLONG, 0),
    END_OF_MEMBERS,
};

static PyType_Slot counters_slots[] = {{Py_tp_members, counters_members}, {0, NULL}};

#endif
