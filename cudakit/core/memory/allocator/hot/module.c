/* cudakit.core.memory.allocator._hot: the two calls of an allocator for when everything is usual. */
#include "calls.h"
#include "counts.h"
#include "stock.h"

#ifdef Py_GIL_DISABLED
#error "nothing here is done by two threads at once: Python's global lock sees to that"
#endif

/* ---- what was asked for ------------------------------------------------------------------------- */

static PyObject *zero;

static bool understand_request(PyObject *const *args, Py_ssize_t count, struct request *request)
{
    bool odd = false;
    if (count < 1 || count > 2)
        return false;
    request->size_object = args[0];
    request->size = number_of(args[0], &odd);
    request->stream_object = count == 2 ? args[1] : zero;
    request->stream = number_of(request->stream_object, &odd);
    if (request->stream == LEGACY) {
        request->stream_object = zero;
        request->stream = 0;
    }
    return !odd;
}

static bool understand_release(PyObject *const *args, Py_ssize_t count, struct release *release)
{
    bool odd = false;
    if (count < 1 || count > 2 || !PyLong_CheckExact(args[0]))
        return false;
    release->ptr = args[0];
    release->has_stream = count == 2 && args[1] != Py_None;
    release->stream = release->has_stream ? number_of(args[1], &odd) : 0;
    if (release->stream == LEGACY)
        release->stream = 0;
    return !odd;
}

static PyObject *alloc(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    struct calls *calls = (struct calls *)self;
    struct request request;
    if (!names && understand_request(args, count, &request)) {
        PyObject *ptr = calls->most ? alloc_from_bin(calls, &request) : NULL;
        if (!ptr && !PyErr_Occurred())
            ptr = alloc_from_pool(calls, &request);
        if (ptr || PyErr_Occurred())
            return ptr;
    }
    return PyObject_Vectorcall(calls->alloc, args, (size_t)count, names);
}

static PyObject *release(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    struct calls *calls = (struct calls *)self;
    struct release release;
    if (!names && understand_release(args, count, &release)) {
        PyObject *none = calls->most ? free_to_bin(calls, &release) : NULL;
        if (!none && !PyErr_Occurred())
            none = free_to_pool(calls, &release);
        if (none || PyErr_Occurred())
            return none;
    }
    return PyObject_Vectorcall(calls->free, args, (size_t)count, names);
}

/* ---- what the calls of one allocator need ------------------------------------------------------- */

/* X(member): in the order in which ``calls`` takes them. */
#define GIVEN(X) X(alloc) X(free) X(cache) X(front) X(guard) X(late) X(live) X(unusual) X(block)
#define OWNED(X) GIVEN(X) X(small) X(large) X(ledger)

static int traverse(PyObject *self, visitproc visit, void *arg)
{
    struct calls *calls = (struct calls *)self;
#define X(member) Py_VISIT(calls->member);
    OWNED(X)
#undef X
    return 0;
}

static int clear(PyObject *self)
{
    struct calls *calls = (struct calls *)self;
#define X(member) Py_CLEAR(calls->member);
    OWNED(X)
#undef X
    return 0;
}

static void dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    clear(self);
    PyObject_GC_Del(self);
}

static PyTypeObject calls_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "cudakit.core.memory.allocator._hot.Calls",
    .tp_basicsize = sizeof(struct calls),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_traverse = traverse,
    .tp_clear = clear,
    .tp_dealloc = dealloc,
};

static PyMethodDef alloc_method = {"alloc", (PyCFunction)(void (*)(void))alloc, METH_FASTCALL | METH_KEYWORDS,
                                   "alloc(size_bytes, stream=0)\n--\n\n"};
static PyMethodDef free_method = {"free", (PyCFunction)(void (*)(void))release, METH_FASTCALL | METH_KEYWORDS,
                                  "free(ptr, stream=None)\n--\n\n"};

static bool fill(struct calls *calls)
{
    PyObject *pools = get(calls->cache, Cache_default);
    calls->small = Py_NewRef(get(pools, Pools_small));
    calls->large = Py_NewRef(get(pools, Pools_large));
    calls->ledger = Py_NewRef(get(get(calls->small, Pool_tally), Tally_ledger));
    calls->tally_class = Py_TYPE(get(calls->small, Pool_tally));
    calls->most = PyLong_AsSsize_t(get(calls->front, FrontCache_most));
    return !PyErr_Occurred();
}

PyDoc_STRVAR(calls_doc,
             "calls(alloc, free, cache, front, guard, late, live, unusual, block)\n--\n\n"
             "Return both calls of an allocator: they do what is usual, and call those given for all else.");

static PyObject *calls_of(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    struct calls *calls;
#define X(member) +1
    if (count != GIVEN(X))
        return PyErr_Format(PyExc_TypeError, "calls takes %d arguments", GIVEN(X));
#undef X
    calls = (struct calls *)calls_type.tp_alloc(&calls_type, 0);
    if (!calls)
        return NULL;
    int next = 0;
#define X(member) calls->member = Py_NewRef(args[next++]);
    GIVEN(X)
#undef X
    PyObject *both = NULL;
    if (fill(calls)) {
        PyObject *first = PyCFunction_New(&alloc_method, (PyObject *)calls);
        PyObject *second = PyCFunction_New(&free_method, (PyObject *)calls);
        both = first && second ? PyTuple_Pack(2, first, second) : NULL;
        Py_XDECREF(first);
        Py_XDECREF(second);
    }
    Py_DECREF(calls);
    return both;
}

/* ---- the module --------------------------------------------------------------------------------- */

static PyMethodDef methods[] = {
    {"calls", (PyCFunction)(void (*)(void))calls_of, METH_FASTCALL, calls_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_hot",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__hot(void)
{
    zero = PyLong_FromLong(0);
    if (!zero || !find_slots() || !find_constants() || !find_actions() || PyType_Ready(&calls_type) < 0)
        return NULL;
    return PyModule_Create(&module);
}
