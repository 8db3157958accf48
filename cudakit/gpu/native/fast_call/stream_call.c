/* Calls of functions of other libraries. */
#include "stream_call.h"

#include <stddef.h>

enum { FIXED_ARGUMENTS = 15 };

/* A call of a C function with 16 arguments of 64 bits, of which only the last one, a stream, differs between calls. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    int (*function)(word, word, word, word, word, word, word, word, word, word, word, word, word, word, word,
                    handle stream);
    word arguments[FIXED_ARGUMENTS];
} StreamCall;

/* Implement the call of a StreamCall object with the handle of a stream: return the status of the function. */
static PyObject *call_function(PyObject *object, PyObject *const *args, size_t flags, PyObject *keyword_names)
{
    const StreamCall *self = (StreamCall *)object;
    const word *arguments = self->arguments;
    if (PyVectorcall_NARGS(flags) != 1 || (keyword_names && PyTuple_GET_SIZE(keyword_names))) {
        PyErr_SetString(PyExc_TypeError, "the only argument is the handle of a stream");
        return NULL;
    }
    handle stream = PyLong_AsVoidPtr(args[0]);
    if (PyErr_Occurred())
        return NULL;
    int status;
    Py_BEGIN_ALLOW_THREADS;
    status = self->function(arguments[0], arguments[1], arguments[2], arguments[3], arguments[4], arguments[5],
                            arguments[6], arguments[7], arguments[8], arguments[9], arguments[10], arguments[11],
                            arguments[12], arguments[13], arguments[14], stream);
    Py_END_ALLOW_THREADS;
    return PyLong_FromLong(status);
}

/* Create a StreamCall object. */
static PyObject *new_stream_call(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    unsigned long long function;
    PyObject *arguments;
    (void)keywords;
    if (!PyArg_ParseTuple(args, "KO!", &function, &PyTuple_Type, &arguments))
        return NULL;
    if (PyTuple_GET_SIZE(arguments) != FIXED_ARGUMENTS) {
        PyErr_SetString(PyExc_ValueError, "the function has 15 arguments before the stream");
        return NULL;
    }
    StreamCall *self = (StreamCall *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->vectorcall = call_function;
    *(void **)&self->function = (void *)(uintptr_t)function;
    for (int i = 0; i < FIXED_ARGUMENTS; i++)
        self->arguments[i] = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(arguments, i));
    if (PyErr_Occurred())
        Py_CLEAR(self);
    return (PyObject *)self;
}

PyTypeObject stream_call_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "cudakit.gpu._fast_call.StreamCall",
    .tp_doc = PyDoc_STR("StreamCall(function, arguments)\n--\n\n"
                        "A call of the C function at an address, with 15 fixed arguments of 64 bits.\n\n"
                        "The call takes the handle of a stream, which is the last argument of the function, and\n"
                        "returns the status of the function."),
    .tp_basicsize = sizeof(StreamCall),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_new = new_stream_call,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(StreamCall, vectorcall),
};
