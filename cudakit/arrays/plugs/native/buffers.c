/* The class Calls of buffers.py in C: the methods allocate and deallocate of a memory resource of cuda.core.
 *
 * cuda.core calls these methods for each Buffer that is created and closed. In Python, they would take half of the
 * time of a Buffer. The C code handles only calls with the arguments that cuda.core passes: `stream` as the only
 * keyword argument. It passes other calls to the functions in Python.
 *
 * The attributes _alloc and _free of the resource are bound methods of its allocator, so that no method has to be
 * looked up for each call. A stream is an object with the method __cuda_stream__ (stream protocol of cuda.core). */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>

/* X(name) for each attribute that is looked up. */
#define NAMES(X) X(_alloc) X(_free) X(__cuda_stream__)

#define X(name) static PyObject *name_##name;
NAMES(X)
#undef X

static PyObject *allocate_in_python, *deallocate_in_python;
static PyObject *cudakit_error, *from_handle, *stream_keyword; /* stream_keyword: the tuple ("stream",) */

/* Return the handle of a stream: the second item of the pair that __cuda_stream__ returns. */
static PyObject *stream_handle(PyObject *stream)
{
    PyObject *pair = PyObject_CallMethodNoArgs(stream, name___cuda_stream__);
    PyObject *handle = pair ? PySequence_GetItem(pair, 1) : NULL;
    Py_XDECREF(pair);
    return handle;
}

/* Call _alloc or _free of a resource with two arguments. */
static PyObject *call_allocator(PyObject *self, PyObject *name, PyObject *first_argument,
                                PyObject *second_argument)
{
    PyObject *function = PyObject_GetAttr(self, name), *args[] = {first_argument, second_argument};
    PyObject *result = function ? PyObject_Vectorcall(function, args, 2, NULL) : NULL;
    Py_XDECREF(function);
    return result;
}

/* Return whether a call has the expected number of positional arguments, and `stream` as its only keyword argument. */
static bool has_usual_arguments(Py_ssize_t count, Py_ssize_t expected_count, PyObject *keyword_names)
{
    return count == expected_count && keyword_names && PyTuple_GET_SIZE(keyword_names) == 1 &&
           PyUnicode_Compare(PyTuple_GET_ITEM(keyword_names, 0), PyTuple_GET_ITEM(stream_keyword, 0)) == 0;
}

static PyObject *call_python(PyObject *function, PyObject *self, PyObject *const *args, Py_ssize_t count,
                             PyObject *keyword_names)
{
    Py_ssize_t total = count + (keyword_names ? PyTuple_GET_SIZE(keyword_names) : 0);
    PyObject **arguments = PyMem_Malloc((size_t)(total + 1) * sizeof *arguments);
    if (!arguments)
        return PyErr_NoMemory();
    arguments[0] = self;
    for (Py_ssize_t i = 0; i < total; i++)
        arguments[i + 1] = args[i];
    PyObject *result = PyObject_Vectorcall(function, arguments, (size_t)count + 1, keyword_names);
    PyMem_Free(arguments);
    return result;
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
    PyObject *result = call_allocator(self, name__free, ptr, Py_None);
    if (!result)
        PyErr_WriteUnraisable(self);
    Py_XDECREF(result);
#if PY_VERSION_HEX >= 0x030C0000
    PyErr_SetRaisedException(error);
#else
    PyErr_Restore(type, value, traceback);
#endif
}

static PyObject *allocate(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *keyword_names)
{
    if (!has_usual_arguments(count, 1, keyword_names))
        return call_python(allocate_in_python, self, args, count, keyword_names);
    PyObject *size = args[0], *stream = args[1], *handle = stream_handle(stream);
    PyObject *ptr = handle ? call_allocator(self, name__alloc, size, handle) : NULL;
    Py_XDECREF(handle);
    if (!ptr)
        return NULL;
    PyObject *buffer_arguments[] = {ptr, size, self, stream};
    PyObject *buffer = PyObject_Vectorcall(from_handle, buffer_arguments, 3, stream_keyword);
    if (!buffer)
        free_without_buffer(self, ptr);
    Py_DECREF(ptr);
    return buffer;
}

static PyObject *deallocate(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *keyword_names)
{
    if (!has_usual_arguments(count, 2, keyword_names))
        return call_python(deallocate_in_python, self, args, count, keyword_names);
    PyObject *handle = stream_handle(args[2]);
    PyObject *result = handle ? call_allocator(self, name__free, args[0], handle) : NULL;
    Py_XDECREF(handle);
    if (!result && PyErr_ExceptionMatches(cudakit_error)) { /* the allocator has counted an invalid free */
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    return result;
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

/* The type Calls has no members, so that it can be combined with any other base class. */
static PyTypeObject calls_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "cudakit.arrays.plugs._buffers.Calls",
    .tp_basicsize = sizeof(PyObject),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_methods = methods,
};

/* Return a class of a module, or an attribute of that class if `attribute` is not NULL. */
static PyObject *import_attribute(const char *module, const char *class, const char *attribute)
{
    PyObject *container = PyImport_ImportModule(module);
    PyObject *object = container ? PyObject_GetAttrString(container, class) : NULL;
    Py_XDECREF(container);
    if (!object || !attribute)
        return object;
    container = object;
    object = PyObject_GetAttrString(container, attribute);
    Py_DECREF(container);
    return object;
}

static bool load_globals(void)
{
#define X(name) \
    if (!(name_##name = PyUnicode_InternFromString(#name))) \
        return false;
    NAMES(X)
#undef X
    return (stream_keyword = Py_BuildValue("(s)", "stream")) &&
           (from_handle = import_attribute("cuda.core", "Buffer", "from_handle")) &&
           (cudakit_error = import_attribute("cudakit.errors", "CudakitError", NULL)) &&
           (allocate_in_python = import_attribute("cudakit.arrays.plugs.buffers", "Calls", "allocate")) &&
           (deallocate_in_python = import_attribute("cudakit.arrays.plugs.buffers", "Calls", "deallocate"));
}

static int initialize_module(PyObject *module)
{
    if (!load_globals() || PyType_Ready(&calls_type) < 0)
        return -1;
    return PyModule_AddObjectRef(module, "Calls", (PyObject *)&calls_type);
}

static PyModuleDef_Slot SLOTS[] = {
    {Py_mod_exec, initialize_module},
#ifdef Py_mod_multiple_interpreters
    /* The type Calls, and the objects that load_globals() finds, are in global variables. */
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
