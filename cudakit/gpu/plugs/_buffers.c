/* allocate and deallocate of a memory resource of cuda.core: the Calls of buffers.py, in C.
 *
 * cuda.core calls them for each Buffer that is created and closed, and two Python functions would take half of the
 * time of a Buffer. Only the form that cuda.core itself uses is written in C: `stream` is the only keyword. Calls
 * in other forms are passed to the functions in Python.
 *
 * The resource has the functions of its allocator in the attributes _alloc and _free, which saves the look-up of a
 * method for each call. A stream is given as an object with the method __cuda_stream__ (cuda.core's protocol). */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>

/* X(name): the names of attributes. */
#define NAMES(X) X(_alloc) X(_free) X(__cuda_stream__)

#define X(name) static PyObject *name_##name;
NAMES(X)
#undef X

static PyObject *allocate_in_python, *deallocate_in_python;
static PyObject *cudakit_error, *from_handle, *stream_keyword; /* ("stream",) */

/* Return the handle of a stream: the second item of the pair that __cuda_stream__ returns. */
static PyObject *handle_of(PyObject *stream)
{
    PyObject *pair = PyObject_CallMethodNoArgs(stream, name___cuda_stream__);
    PyObject *handle = pair ? PySequence_GetItem(pair, 1) : NULL;
    Py_XDECREF(pair);
    return handle;
}

/* Call _alloc or _free of a resource with two arguments. */
static PyObject *call(PyObject *self, PyObject *name, PyObject *first, PyObject *second)
{
    PyObject *function = PyObject_GetAttr(self, name), *args[] = {first, second};
    PyObject *result = function ? PyObject_Vectorcall(function, args, 2, NULL) : NULL;
    Py_XDECREF(function);
    return result;
}

/* Return whether a call has `wanted` positional arguments and the keyword `stream`. */
static bool is_usual(Py_ssize_t count, Py_ssize_t wanted, PyObject *names)
{
    return count == wanted && names && PyTuple_GET_SIZE(names) == 1 &&
           PyUnicode_Compare(PyTuple_GET_ITEM(names, 0), PyTuple_GET_ITEM(stream_keyword, 0)) == 0;
}

static PyObject *call_python(PyObject *function, PyObject *self, PyObject *const *args, Py_ssize_t count,
                             PyObject *names)
{
    Py_ssize_t all = count + (names ? PyTuple_GET_SIZE(names) : 0);
    PyObject **moved = PyMem_Malloc((size_t)(all + 1) * sizeof *moved);
    if (!moved)
        return PyErr_NoMemory();
    moved[0] = self;
    for (Py_ssize_t each = 0; each < all; each++)
        moved[each + 1] = args[each];
    PyObject *found = PyObject_Vectorcall(function, moved, (size_t)count + 1, names);
    PyMem_Free(moved);
    return found;
}

/* Free memory for which no Buffer could be created; the current exception stays set. */
static void free_without_buffer(PyObject *self, PyObject *ptr)
{
#if PY_VERSION_HEX >= 0x030C0000
    PyObject *error = PyErr_GetRaisedException();
#else
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
#endif
    PyObject *none = call(self, name__free, ptr, Py_None);
    if (!none)
        PyErr_WriteUnraisable(self);
    Py_XDECREF(none);
#if PY_VERSION_HEX >= 0x030C0000
    PyErr_SetRaisedException(error);
#else
    PyErr_Restore(type, value, traceback);
#endif
}

static PyObject *allocate(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    if (!is_usual(count, 1, names))
        return call_python(allocate_in_python, self, args, count, names);
    PyObject *size = args[0], *stream = args[1], *handle = handle_of(stream);
    PyObject *ptr = handle ? call(self, name__alloc, size, handle) : NULL;
    Py_XDECREF(handle);
    if (!ptr)
        return NULL;
    PyObject *given[] = {ptr, size, self, stream};
    PyObject *buffer = PyObject_Vectorcall(from_handle, given, 3, stream_keyword);
    if (!buffer)
        free_without_buffer(self, ptr);
    Py_DECREF(ptr);
    return buffer;
}

static PyObject *deallocate(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    if (!is_usual(count, 2, names))
        return call_python(deallocate_in_python, self, args, count, names);
    PyObject *handle = handle_of(args[2]);
    PyObject *none = handle ? call(self, name__free, args[0], handle) : NULL;
    Py_XDECREF(handle);
    if (!none && PyErr_ExceptionMatches(cudakit_error)) { /* already counted as an invalid free */
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    return none;
}

/* ---- the module --------------------------------------------------------------------------------- */

static PyMethodDef methods[] = {
    {"allocate", (PyCFunction)(void (*)(void))allocate, METH_FASTCALL | METH_KEYWORDS,
     "allocate($self, size, *, stream)\n--\n\n"
     "Allocate a Buffer of ``size`` bytes in stream order. Raises OutOfMemory."},
    {"deallocate", (PyCFunction)(void (*)(void))deallocate, METH_FASTCALL | METH_KEYWORDS,
     "deallocate($self, ptr, size, *, stream)\n--\n\n"
     "Free memory in stream order. Raises nothing: a double free is counted in ``invalid_frees``."},
    {NULL, NULL, 0, NULL},
};

/* The type has no members, so that it can be combined with any other base class. */
static PyTypeObject calls_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "cudakit.gpu.plugs._buffers.Calls",
    .tp_basicsize = sizeof(PyObject),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_methods = methods,
};

/* Return an attribute of a class or function of a module. */
static PyObject *import_attribute(const char *module, const char *class, const char *attribute)
{
    PyObject *from = PyImport_ImportModule(module);
    PyObject *found = from ? PyObject_GetAttrString(from, class) : NULL;
    Py_XDECREF(from);
    if (!found || !attribute)
        return found;
    from = found;
    found = PyObject_GetAttrString(from, attribute);
    Py_DECREF(from);
    return found;
}

static bool find_all(void)
{
#define X(name) \
    if (!(name_##name = PyUnicode_InternFromString(#name))) \
        return false;
    NAMES(X)
#undef X
    return (stream_keyword = Py_BuildValue("(s)", "stream")) &&
           (from_handle = import_attribute("cuda.core", "Buffer", "from_handle")) &&
           (cudakit_error = import_attribute("cudakit.errors", "CudakitError", NULL)) &&
           (allocate_in_python = import_attribute("cudakit.gpu.plugs.buffers", "Calls", "allocate")) &&
           (deallocate_in_python = import_attribute("cudakit.gpu.plugs.buffers", "Calls", "deallocate"));
}

static int prepare(PyObject *module)
{
    if (!find_all() || PyType_Ready(&calls_type) < 0)
        return -1;
    return PyModule_AddObjectRef(module, "Calls", (PyObject *)&calls_type);
}

static PyModuleDef_Slot SLOTS[] = {
    {Py_mod_exec, prepare},
#ifdef Py_mod_multiple_interpreters
    /* The type and the objects found by find_all are global. */
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED}, /* the globals do not change after import */
#endif
    {0},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_buffers",
    .m_slots = SLOTS,
};

PyMODINIT_FUNC PyInit__buffers(void)
{
    return PyModuleDef_Init(&MODULE);
}
