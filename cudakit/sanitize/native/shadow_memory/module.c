/* The shadow memory of the race detector in C, as a Python type: NativeShadow.
 *
 * PythonShadow (shadow.py) defines the behaviour. It is used if no C compiler was available at installation,
 * and it is the reference of the tests (tests/sanitize/test_native_shadow.py): both find the same conflicts.
 *
 *   access.h     clocks, operations, accesses, lists of accesses
 *   state.h      the accesses to some bytes, or through a pointer
 *   state_map.h  the states of all bytes, sorted by address
 *   strided.h    strided ranges
 *   shadow.h     checking and storing an access; pruning and merging states (compaction.c)
 *
 * An access that races with nothing runs no Python code. Unordered accesses are passed to the ConflictChecker.
 * The interpreter's lock is held in all functions. Records of accesses come from a file and may have any content:
 * no function relies on their order or their values, and the lengths of buffers are checked. */
#include "shadow.h"

#include <string.h>

/* The record of an access, as in trace/trace_file.py. The recorder is on the same machine or writes little-endian. */
struct access_record {
    uint8_t common_fields[38];
    uint16_t kind;
    uint64_t lo, hi;
    uint8_t mode, precision;
    uint8_t padding[6];
    int64_t stride_bytes;
    uint64_t count;
    uint32_t node;
    uint8_t unused[12];
};
_Static_assert(sizeof(struct access_record) == 96, "records have 96 bytes");

/* The same value as EventKind.ACCESS in trace/kinds.py. */
enum { KIND_ACCESS = 4 };

struct native_shadow {
    PyObject_HEAD
    struct shadow shadow;
};

/* Begin a call. Return -1 with an exception if a call is in progress. */
static int begin_call(struct native_shadow *self)
{
    if (self->shadow.is_busy || !self->shadow.checker) {
        PyErr_SetString(PyExc_RuntimeError, "a call of this shadow memory is in progress");
        return -1;
    }
    self->shadow.is_busy = true;
    return 0;
}

/* End a call that returns None. */
static PyObject *end_call(struct native_shadow *self, int result)
{
    self->shadow.is_busy = false;
    return result ? NULL : Py_NewRef(Py_None);
}

/* ---- arguments --------------------------------------------------------------------------------------------- */

/* Convert an integer of Python. Return -1 with an exception if it is out of range. */
static int convert_number(PyObject *value, uint64_t maximum, uint64_t *result)
{
    *result = PyLong_AsUnsignedLongLong(value);
    if (*result == (uint64_t)-1 && PyErr_Occurred())
        return -1;
    if (*result > maximum) {
        PyErr_SetString(PyExc_OverflowError, "a number of an access is too large");
        return -1;
    }
    return 0;
}

static int read_number(PyObject *object, const char *name, uint64_t maximum, uint64_t *result_value)
{
    PyObject *value = PyObject_GetAttrString(object, name);
    int result = value ? convert_number(value, maximum, result_value) : -1;
    Py_XDECREF(value);
    return result;
}

/* Return an access for a MemoryAccess of Python, or NULL with an exception. */
static struct access *access_from_object(PyObject *object)
{
    uint64_t slot, tick, lo, hi, mode, precision;
    if (read_number(object, "slot", UINT32_MAX, &slot) || read_number(object, "tick", UINT64_MAX, &tick) ||
        read_number(object, "lo", UINT64_MAX, &lo) || read_number(object, "hi", UINT64_MAX, &hi) ||
        read_number(object, "mode", UINT8_MAX, &mode) || read_number(object, "precision", UINT8_MAX, &precision))
        return NULL;
    PyObject *call = PyObject_GetAttrString(object, "call");
    struct operation *operation = call ? operation_new(call) : NULL;
    Py_XDECREF(call);
    if (!operation)
        return NULL;
    struct access *access = access_new(operation, (uint32_t)slot, tick, lo, hi, (uint8_t)mode, (uint8_t)precision);
    operation_release(operation);
    if (access)
        access->object = Py_NewRef(object);
    return access;
}

/* Load the slot, the tick and the clock of a ClockPosition. Return -1 with an exception on errors. */
static int load_position(struct shadow *shadow, PyObject *position, uint64_t *slot, uint64_t *tick)
{
    if (read_number(position, "slot", UINT32_MAX, slot) || read_number(position, "tick", UINT64_MAX, tick))
        return -1;
    PyObject *clock = PyObject_GetAttrString(position, "clock");
    int result = clock ? clock_load(&shadow->clock, clock) : -1;
    Py_XDECREF(clock);
    return result;
}

/* ---- methods ----------------------------------------------------------------------------------------------- */

/* Check and store an access; a free (`is_free`) gets a tick that no later access is ordered after. */
static int add_object(struct shadow *shadow, PyObject *object, PyObject *clock, long long stride, uint64_t count,
                      bool is_free)
{
    if (clock_load(&shadow->clock, clock))
        return -1;
    struct access *access = access_from_object(object);
    if (!access)
        return -1;
    int result = shadow_add(shadow, access, stride, count);
    if (is_free) {
        PyObject *never_tick = PyLong_FromUnsignedLongLong(TICK_NEVER);
        access->tick = TICK_NEVER;
        if (!never_tick || PyObject_SetAttrString(object, "tick", never_tick))
            result = -1;
        Py_XDECREF(never_tick);
    }
    access_release(access);
    return result;
}

static PyObject *native_shadow_add(struct native_shadow *self, PyObject *arguments)
{
    PyObject *access, *clock, *count_object = NULL;
    long long stride = 0;
    uint64_t count = 0;
    if (!PyArg_ParseTuple(arguments, "OO|LO:add", &access, &clock, &stride, &count_object) ||
        (count_object && convert_number(count_object, UINT64_MAX, &count)) || begin_call(self))
        return NULL;
    return end_call(self, add_object(&self->shadow, access, clock, stride, count, false));
}

static PyObject *native_shadow_add_free(struct native_shadow *self, PyObject *arguments)
{
    PyObject *access, *clock;
    if (!PyArg_ParseTuple(arguments, "OO:add_free", &access, &clock) || begin_call(self))
        return NULL;
    return end_call(self, add_object(&self->shadow, access, clock, 0, 0, true));
}

/* Check and store the accesses of an operation among some records. */
static int add_records(struct shadow *shadow, const char *records, Py_ssize_t size_bytes,
                       struct operation *operation, uint64_t slot, uint64_t tick)
{
    if (size_bytes % (Py_ssize_t)sizeof(struct access_record)) {
        PyErr_SetString(PyExc_ValueError, "the size of the rows is not a multiple of the size of a record");
        return -1;
    }
    int result = 0;
    for (Py_ssize_t offset = 0; !result && offset < size_bytes;
         offset += (Py_ssize_t)sizeof(struct access_record)) {
        struct access_record record; /* a copy, because the buffer may not be aligned */
        memcpy(&record, records + offset, sizeof record);
        if (record.kind != KIND_ACCESS)
            continue;
        struct access *access =
            access_new(operation, (uint32_t)slot, tick, record.lo, record.hi, record.mode, record.precision);
        result = access ? shadow_add(shadow, access, record.stride_bytes, record.count) : -1;
        access_release(access);
    }
    return result;
}

/* Check and store the accesses of a launch. */
static int add_launch(struct shadow *shadow, const Py_buffer *record_buffer, PyObject *call, PyObject *position)
{
    uint64_t slot, tick;
    if (load_position(shadow, position, &slot, &tick))
        return -1;
    struct operation *operation = operation_new(call);
    int result =
        operation ? add_records(shadow, record_buffer->buf, record_buffer->len, operation, slot, tick) : -1;
    operation_release(operation);
    return result;
}

static PyObject *native_shadow_add_all(struct native_shadow *self, PyObject *arguments)
{
    Py_buffer record_buffer;
    PyObject *call, *position, *result = NULL;
    if (!PyArg_ParseTuple(arguments, "y*OO:add_all", &record_buffer, &call, &position))
        return NULL;
    if (!begin_call(self))
        result = end_call(self, add_launch(&self->shadow, &record_buffer, call, position));
    PyBuffer_Release(&record_buffer);
    return result;
}

/* The attributes of a conflicts.GraphAccesses and of its order. */
struct graph_accesses {
    PyObject *calls; /* a tuple with the Call of each node */
    Py_buffer packed_nodes, rows, ancestor_bytes;
    uint64_t bytes_per_node;
};

/* Get a buffer from an attribute. Return -1 with an exception, and an empty buffer. */
static int read_buffer(PyObject *object, const char *name, Py_buffer *buffer)
{
    PyObject *value = PyObject_GetAttrString(object, name);
    int result = value ? PyObject_GetBuffer(value, buffer, PyBUF_SIMPLE) : -1;
    Py_XDECREF(value);
    return result;
}

static void release_graph_accesses(struct graph_accesses *accesses)
{
    Py_XDECREF(accesses->calls);
    PyBuffer_Release(&accesses->packed_nodes);
    PyBuffer_Release(&accesses->rows);
    PyBuffer_Release(&accesses->ancestor_bytes);
}

/* Read a GraphAccesses into an empty structure, which the caller then releases. Return -1 with an exception on errors. */
static int read_graph_accesses(struct graph_accesses *accesses, PyObject *object)
{
    PyObject *order = PyObject_GetAttrString(object, "order");
    int result = order && !read_number(order, "bytes_per_node", UINT32_MAX, &accesses->bytes_per_node) &&
                         !read_buffer(order, "ancestor_bytes", &accesses->ancestor_bytes) &&
                         !read_buffer(object, "packed_nodes", &accesses->packed_nodes) &&
                         !read_buffer(object, "rows", &accesses->rows) &&
                         (accesses->calls = PyObject_GetAttrString(object, "calls"))
                     ? 0
                     : -1;
    Py_XDECREF(order);
    if (!result && !PyTuple_Check(accesses->calls)) {
        PyErr_SetString(PyExc_TypeError, "the calls of a graph launch must be a tuple");
        result = -1;
    }
    return result;
}

/* Check and store the accesses of the nodes of a graph launch. */
static int add_nodes(struct shadow *shadow, const struct graph_accesses *accesses, PyObject *launch,
                     PyObject *position)
{
    uint64_t slot, tick;
    if (load_position(shadow, position, &slot, &tick))
        return -1;
    struct operation *launch_operation = operation_new(launch);
    int result = launch_operation ? 0 : -1;
    Py_ssize_t node_count = Py_MIN(PyTuple_GET_SIZE(accesses->calls),
                                   accesses->packed_nodes.len / (Py_ssize_t)sizeof(struct packed_node));
    const char *rows = accesses->rows.buf;
    uint64_t remaining_bytes = (uint64_t)accesses->rows.len;
    for (Py_ssize_t i = 0; !result && i < node_count; i++) {
        struct packed_node node; /* a copy, because the buffer may not be aligned */
        memcpy(&node, (const struct packed_node *)accesses->packed_nodes.buf + i, sizeof node);
        uint64_t row_bytes = Py_MIN(node.row_bytes, remaining_bytes);
        struct operation *operation =
            operation_new_in_launch(PyTuple_GET_ITEM(accesses->calls, i), &node, launch_operation);
        result = operation ? add_records(shadow, rows, (Py_ssize_t)row_bytes, operation, slot, tick) : -1;
        operation_release(operation);
        rows += row_bytes;
        remaining_bytes -= row_bytes;
    }
    operation_release(launch_operation);
    return result;
}

static PyObject *native_shadow_add_graph_launch(struct native_shadow *self, PyObject *arguments)
{
    PyObject *object, *launch, *position, *result = NULL;
    struct graph_accesses accesses = {0};
    if (!PyArg_ParseTuple(arguments, "OOO:add_graph_launch", &object, &launch, &position))
        return NULL;
    if (!read_graph_accesses(&accesses, object) && !begin_call(self)) {
        size_t node_count =
            accesses.bytes_per_node ? (size_t)accesses.ancestor_bytes.len / accesses.bytes_per_node : 0;
        self->shadow.node_order =
            (struct node_order){accesses.ancestor_bytes.buf,
                                Py_MIN(node_count, 8 * (size_t)accesses.bytes_per_node), accesses.bytes_per_node};
        result = end_call(self, add_nodes(&self->shadow, &accesses, launch, position));
        self->shadow.node_order = (struct node_order){0};
    }
    release_graph_accesses(&accesses);
    return result;
}

/* Append the release of a stream-ordered free to a list. Return -1 with an exception on errors. */
static int append_release(PyObject *releases, const struct access *free_access)
{
    PyObject *call = operation_call(free_access->operation);
    PyObject *release = call ? PyObject_GetAttrString(call, "release") : NULL;
    int result = release ? 0 : -1;
    if (release && release != Py_None)
        result = PyList_Append(releases, release);
    Py_XDECREF(release);
    return result;
}

static PyObject *native_shadow_free_releases(struct native_shadow *self, PyObject *arguments)
{
    unsigned long long lo, hi;
    if (!PyArg_ParseTuple(arguments, "KK:free_releases", &lo, &hi) || begin_call(self))
        return NULL;
    struct state_map *map = &self->shadow.range_states;
    PyObject *releases = PyList_New(0);
    const struct state *state;
    for (struct position position = map_first_ending_above(map, lo);
         releases && (state = map_state(map, position)) && state->lo < hi; position = map_next(map, position))
        if (state->write && state->write->tick == TICK_NEVER && append_release(releases, state->write))
            Py_CLEAR(releases);
    self->shadow.is_busy = false;
    return releases;
}

static PyObject *native_shadow_find_unordered(struct native_shadow *self, PyObject *arguments)
{
    unsigned long long lo, hi;
    unsigned mode;
    PyObject *clock;
    if (!PyArg_ParseTuple(arguments, "KKIO:find_unordered", &lo, &hi, &mode, &clock) || begin_call(self))
        return NULL;
    PyObject *found =
        clock_load(&self->shadow.clock, clock) ? NULL : shadow_find_unordered(&self->shadow, lo, hi, mode);
    self->shadow.is_busy = false;
    return found;
}

static PyObject *native_shadow_clear(struct native_shadow *self, PyObject *arguments)
{
    unsigned long long lo, hi;
    if (!PyArg_ParseTuple(arguments, "KK:clear", &lo, &hi) || begin_call(self))
        return NULL;
    return end_call(self, shadow_clear(&self->shadow, lo, hi));
}

static PyObject *native_shadow_prune(struct native_shadow *self, PyObject *past_list)
{
    struct clock past_clock = {0};
    if (begin_call(self))
        return NULL;
    int result = clock_load(&past_clock, past_list) || shadow_prune(&self->shadow, &past_clock) ? -1 : 0;
    clock_release(&past_clock);
    return end_call(self, result);
}

static PyObject *native_shadow_coarsen(struct native_shadow *self, PyObject *arguments)
{
    PyObject *allocation_at;
    Py_ssize_t max_states;
    if (!PyArg_ParseTuple(arguments, "On:coarsen", &allocation_at, &max_states))
        return NULL;
    if (max_states < 2) {
        PyErr_SetString(PyExc_ValueError, "max_states must be at least 2");
        return NULL;
    }
    if (begin_call(self))
        return NULL;
    return end_call(self, shadow_coarsen(&self->shadow, allocation_at, (size_t)max_states));
}

static PyObject *get_checker(struct native_shadow *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(self->shadow.checker ? self->shadow.checker : Py_None);
}

static PyObject *get_range_state_count(struct native_shadow *self, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(self->shadow.range_states.state_count);
}

static PyObject *get_pointer_state_count(struct native_shadow *self, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(self->shadow.pointer_states.state_count);
}

static PyObject *get_strided_state_count(struct native_shadow *self, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(self->shadow.strided_states.state_count);
}

/* ---- the type ---------------------------------------------------------------------------------------------- */

static PyObject *native_shadow_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    static char *parameter_names[] = {"checker", "find_possible_races", NULL};
    PyObject *checker;
    int finds_possible = 0;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O|p:NativeShadow", parameter_names, &checker,
                                     &finds_possible))
        return NULL;
    PyObject *clocks = PyImport_ImportModule("cudakit.sanitize.ordering");
    PyObject *access_type = clocks ? PyObject_GetAttrString(clocks, "MemoryAccess") : NULL;
    Py_XDECREF(clocks);
    struct native_shadow *self = access_type ? (struct native_shadow *)type->tp_alloc(type, 0) : NULL;
    if (!self) {
        Py_XDECREF(access_type);
        return NULL;
    }
    self->shadow.checker = Py_NewRef(checker);
    self->shadow.access_type = access_type;
    self->shadow.finds_possible = finds_possible;
    return (PyObject *)self;
}

/* The checker refers to the engine, and the engine to this object. Calls and accesses never refer to the engine. */
static int native_shadow_traverse(struct native_shadow *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->shadow.checker);
    return 0;
}

/* Release all states and references. Afterwards all methods raise RuntimeError. */
static int native_shadow_tp_clear(struct native_shadow *self)
{
    shadow_release(&self->shadow);
    return 0;
}

static void native_shadow_dealloc(struct native_shadow *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    shadow_release(&self->shadow);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"add", (PyCFunction)native_shadow_add, METH_VARARGS, NULL},
    {"add_all", (PyCFunction)native_shadow_add_all, METH_VARARGS, NULL},
    {"add_graph_launch", (PyCFunction)native_shadow_add_graph_launch, METH_VARARGS, NULL},
    {"add_free", (PyCFunction)native_shadow_add_free, METH_VARARGS, NULL},
    {"free_releases", (PyCFunction)native_shadow_free_releases, METH_VARARGS, NULL},
    {"find_unordered", (PyCFunction)native_shadow_find_unordered, METH_VARARGS, NULL},
    {"clear", (PyCFunction)native_shadow_clear, METH_VARARGS, NULL},
    {"prune", (PyCFunction)native_shadow_prune, METH_O, NULL},
    {"coarsen", (PyCFunction)native_shadow_coarsen, METH_VARARGS, NULL},
    {0},
};

static PyGetSetDef attributes[] = {
    {"checker", (getter)get_checker, NULL, NULL, NULL},
    {"range_state_count", (getter)get_range_state_count, NULL, NULL, NULL},
    {"pointer_state_count", (getter)get_pointer_state_count, NULL, NULL, NULL},
    {"strided_state_count", (getter)get_strided_state_count, NULL, NULL, NULL},
    {0},
};

static PyType_Slot slots[] = {
    {Py_tp_new, native_shadow_new},
    {Py_tp_dealloc, native_shadow_dealloc},
    {Py_tp_traverse, native_shadow_traverse},
    {Py_tp_clear, native_shadow_tp_clear},
    {Py_tp_methods, methods},
    {Py_tp_getset, attributes},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "cudakit.sanitize._shadow_memory.NativeShadow",
    .basicsize = sizeof(struct native_shadow),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};

static int execute_module(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &spec, NULL);
    if (!type)
        return -1;
    int result = PyModule_AddObjectRef(module, "NativeShadow", type);
    Py_DECREF(type);
    if (result || PyModule_AddIntConstant(module, "MAX_POINTER_STATES", MAX_POINTER_STATES) ||
        PyModule_AddIntConstant(module, "MAX_STRIDED_STATES", MAX_STRIDED_STATES))
        return -1;
    return 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, execute_module}, {0, NULL}};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_shadow_memory",
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__shadow_memory(void)
{
    return PyModuleDef_Init(&module_definition);
}
