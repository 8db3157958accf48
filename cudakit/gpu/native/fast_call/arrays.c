#include "arrays.h"

#include <stddef.h>
#include <structmember.h>

/* Device memory that is allocated and freed in the order of one stream. */
typedef struct {
    PyObject_HEAD
    handle context, stream;
    word address; /* 0 if the memory is not allocated */
} StreamMemory;

/* Return a new StreamMemory object with memory of a context. Raise MemoryError if the driver cannot allocate it. */
static StreamMemory *allocate_memory(PyTypeObject *type, handle context, Py_ssize_t size_bytes, handle stream)
{
    StreamMemory *self = (StreamMemory *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->context = context;
    self->stream = stream;
    word address = 0;
    bool was_current, is_allocated = false;
    Py_BEGIN_ALLOW_THREADS;
    if (driver.allocate && enter_context(self->context, &was_current)) {
        is_allocated = !driver.allocate(&address, (size_t)size_bytes, self->stream);
        leave_context(was_current);
    }
    Py_END_ALLOW_THREADS;
    if (!is_allocated) {
        Py_DECREF(self);
        PyErr_NoMemory();
        return NULL;
    }
    self->address = address;
    return self;
}

/* Create a StreamMemory object: allocate memory. */
static PyObject *new_memory(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    unsigned long long context, stream;
    Py_ssize_t size_bytes;
    (void)keywords;
    if (!PyArg_ParseTuple(args, "KnK", &context, &size_bytes, &stream))
        return NULL;
    return (PyObject *)allocate_memory(type, (handle)(uintptr_t)context, size_bytes, (handle)(uintptr_t)stream);
}

/* Free the memory of a StreamMemory object, and the object. A failed free is ignored: the context may be lost. */
static void delete_memory(PyObject *object)
{
    StreamMemory *self = (StreamMemory *)object;
    bool was_current;
    if (self->address &&enter_context(self->context, &was_current)) {
        driver.free(self->address, self->stream);
        leave_context(was_current);
    }
    Py_TYPE(object)->tp_free(object);
}

static PyMemberDef memory_members[] = {
    {"ptr", T_ULONGLONG, offsetof(StreamMemory, address), READONLY, PyDoc_STR("The address of the memory.")},
    {NULL, 0, 0, 0, NULL}};

PyTypeObject stream_memory_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "cudakit.gpu._fast_call.StreamMemory",
    .tp_doc = PyDoc_STR("StreamMemory(context, size_bytes, stream)\n--\n\n"
                        "Device memory, which is freed on the stream when the last reference is deleted.\n\n"
                        "Raises MemoryError if the driver cannot allocate it, or use_driver() was not called."),
    .tp_basicsize = sizeof(StreamMemory),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = new_memory,
    .tp_dealloc = delete_memory,
    .tp_members = memory_members,
};

/* Items of the tuple that describes a new array. */
enum {
    LAYOUT_GPU,
    LAYOUT_CUDA_INDEX,
    LAYOUT_DTYPE,
    LAYOUT_SHAPE,
    LAYOUT_STRIDES,
    LAYOUT_SIZE_BYTES,
    LAYOUT_ITEMS
};

/* Return a new object of a class whose __init__ is not called, or NULL with an exception. */
static PyObject *new_instance(PyObject *class)
{
    PyTypeObject *type = (PyTypeObject *)class;
    PyObject *no_arguments = PyTuple_New(0);
    PyObject *instance = no_arguments ? type->tp_new(type, no_arguments, NULL) : NULL;
    Py_XDECREF(no_arguments);
    return instance;
}

/* Return a new ArrayView, a frozen dataclass: its attributes are set without its __setattr__. */
static PyObject *new_view(const ArrayFactory *self, PyObject *layout, word address)
{
    PyObject *view = new_instance(self->view_class), *pointer = PyLong_FromUnsignedLongLong(address);
    bool is_valid = view && pointer && !PyObject_GenericSetAttr(view, names.ptr, pointer) &&
                    !PyObject_GenericSetAttr(view, names.dtype, PyTuple_GET_ITEM(layout, LAYOUT_DTYPE)) &&
                    !PyObject_GenericSetAttr(view, names.shape, PyTuple_GET_ITEM(layout, LAYOUT_SHAPE)) &&
                    !PyObject_GenericSetAttr(view, names.strides, PyTuple_GET_ITEM(layout, LAYOUT_STRIDES)) &&
                    !PyObject_GenericSetAttr(view, names.read_only, Py_False);
    Py_XDECREF(pointer);
    if (!is_valid)
        Py_CLEAR(view);
    return view;
}

/* Return a new DeviceArray in memory of a stream, whose address is stored; return NULL with an exception if there is no
 * memory. The attributes are those that DeviceArray.__init__ sets. */
static PyObject *new_array(const ArrayFactory *self, PyObject *layout, PyObject *stream_number, handle stream,
                           word *address)
{
    Py_ssize_t size_bytes = PyLong_AsSsize_t(PyTuple_GET_ITEM(layout, LAYOUT_SIZE_BYTES));
    StreamMemory *memory =
        size_bytes > 0 ? allocate_memory(&stream_memory_type, self->context, size_bytes, stream) : NULL;
    if (!memory)
        return NULL;
    *address = memory->address;
    PyObject *array = new_instance(self->array_class), *view = new_view(self, layout, memory->address);
    bool is_valid = array && view && !PyObject_SetAttr(array, names.gpu, PyTuple_GET_ITEM(layout, LAYOUT_GPU)) &&
                    !PyObject_SetAttr(array, names.cuda_index, PyTuple_GET_ITEM(layout, LAYOUT_CUDA_INDEX)) &&
                    !PyObject_SetAttr(array, names.stream, stream_number) &&
                    !PyObject_SetAttr(array, names.allocation_stream, stream_number) &&
                    !PyObject_SetAttr(array, names.memory, (PyObject *)memory) &&
                    !PyObject_SetAttr(array, names.other_streams, Py_None) &&
                    !PyObject_SetAttr(array, names.view, view);
    Py_DECREF(memory);
    Py_XDECREF(view);
    if (!is_valid)
        Py_CLEAR(array);
    return array;
}

PyObject *new_arrays(const ArrayFactory *self, handle stream, word *addresses)
{
    int capture_status = 0;
    if (stream != LEGACY_STREAM &&
        (!driver.is_capturing || driver.is_capturing(stream, &capture_status) || capture_status))
        return NULL;
    Py_ssize_t array_count = PyTuple_GET_SIZE(self->layouts);
    PyObject *stream_number = PyLong_FromVoidPtr(stream),
             *arrays = stream_number ? PyTuple_New(array_count) : NULL;
    for (Py_ssize_t i = 0; arrays && i < array_count; i++) {
        PyObject *array =
            new_array(self, PyTuple_GET_ITEM(self->layouts, i), stream_number, stream, &addresses[i]);
        if (array)
            PyTuple_SET_ITEM(arrays, i, array);
        else
            Py_CLEAR(arrays);
    }
    Py_XDECREF(stream_number);
    return arrays;
}

/* Create an ArrayFactory object. */
static PyObject *new_factory(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *array_class, *view_class, *layouts;
    unsigned long long context;
    (void)keywords;
    if (!PyArg_ParseTuple(args, "O!O!KO!", &PyType_Type, &array_class, &PyType_Type, &view_class, &context,
                          &PyTuple_Type, &layouts))
        return NULL;
    bool is_valid = PyTuple_GET_SIZE(layouts) <= MAX_OPERANDS;
    for (Py_ssize_t i = 0; is_valid && i < PyTuple_GET_SIZE(layouts); i++) {
        PyObject *layout = PyTuple_GET_ITEM(layouts, i);
        is_valid = PyTuple_CheckExact(layout) && PyTuple_GET_SIZE(layout) == LAYOUT_ITEMS &&
                   PyLong_Check(PyTuple_GET_ITEM(layout, LAYOUT_SIZE_BYTES));
    }
    if (!is_valid) {
        PyErr_SetString(PyExc_ValueError, "the layouts are not tuples of six items");
        return NULL;
    }
    ArrayFactory *self = (ArrayFactory *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->context = (handle)(uintptr_t)context;
    self->array_class = Py_NewRef(array_class);
    self->view_class = Py_NewRef(view_class);
    self->layouts = Py_NewRef(layouts);
    return (PyObject *)self;
}

/* Implement the call of an ArrayFactory object. */
static PyObject *call_factory(PyObject *object, PyObject *args, PyObject *keywords)
{
    unsigned long long stream;
    word addresses[MAX_OPERANDS];
    (void)keywords;
    if (!PyArg_ParseTuple(args, "K", &stream))
        return NULL;
    PyObject *arrays = new_arrays((ArrayFactory *)object, (handle)(uintptr_t)stream, addresses);
    return arrays || PyErr_Occurred() ? arrays : PyErr_NoMemory();
}

/* Free an ArrayFactory object. */
static void delete_factory(PyObject *object)
{
    ArrayFactory *self = (ArrayFactory *)object;
    Py_DECREF(self->array_class);
    Py_DECREF(self->view_class);
    Py_DECREF(self->layouts);
    Py_TYPE(object)->tp_free(object);
}

PyTypeObject array_factory_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "cudakit.gpu._fast_call.ArrayFactory",
    .tp_doc = PyDoc_STR("ArrayFactory(array_class, view_class, context, layouts)\n--\n\n"
                        "A function of a stream that returns a tuple of new arrays of cudakit.\n\n"
                        "Each layout is a tuple of the device, its CUDA index, dtype, shape, strides and size in\n"
                        "bytes, which is not 0. The call raises MemoryError if the driver cannot allocate the\n"
                        "memory, or the stream is captured."),
    .tp_basicsize = sizeof(ArrayFactory),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = new_factory,
    .tp_dealloc = delete_factory,
    .tp_call = call_factory,
};
