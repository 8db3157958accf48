/* Calls of compiled kernels with arguments of a layout that an earlier call had: no Python code runs between the call
 * and cuLaunchKernel.
 *
 * FastCall is the base class of callables. A call whose arguments have the dtypes, shapes, strides and alignments of a
 * prepared launch is launched here. Every other call goes to the method _call of the subclass, which checks the
 * arguments, launches the kernel, and passes the launch to _prepare(). This file therefore raises no errors of its own.
 *
 * Arrays are read through the DLPack exchange API of their class: a table of C functions in the class attribute
 * __dlpack_c_exchange_api__ (dlpack.h, DLPackExchangeAPI, version 1.3). PyTorch implements it since 2.10. CuPy 14 does
 * not; its arrays and those of cudakit are read through attributes. All functions are called with the GIL held, except
 * cuLaunchKernel, which can wait for a full queue. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef uint64_t word;
typedef void *handle; /* CUcontext, CUfunction, CUstream */

enum {
    MAX_OPERANDS = 16,
    MAX_PARAMETERS = 24,
    MAX_KEY_WORDS = 128,
    MAX_CONSTANT_BYTES = 1024, /* maximum size of all constants of one launch, in bytes */
    MAX_PLANS = 256,
    MAX_SCRATCH = 16, /* maximum number of streams that have scratch memory for one plan */
    CACHED_CLASSES = 8,
    MAX_DIMENSIONS = 32, /* maximum number of dimensions of arrays that are read through attributes */
    ALIGNMENT = 16       /* remainders of addresses modulo this number are part of a key */
};

/* --- structures of dlpack.h --- */

typedef struct {
    void *data;
    int32_t device_type, device_id;
    int32_t dimensions;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} dl_tensor;

typedef struct managed_tensor {
    uint32_t major, minor;
    void *context;
    void (*deleter)(struct managed_tensor *self);
    uint64_t flags;
    dl_tensor tensor;
} managed_tensor;

typedef struct {
    uint32_t major, minor;
    void *previous;
    int (*allocate)(dl_tensor *prototype, managed_tensor **out, void *error_context,
                    void (*set_error)(void *error_context, const char *kind, const char *message));
    int (*managed_from_object)(void *object, managed_tensor **out);
    int (*object_from_managed)(managed_tensor *tensor, void **out_object);
    int (*tensor_from_object)(void *object, dl_tensor *out);
    int (*current_stream)(int device_type, int32_t device_id, void **out_stream);
} exchange_api;

enum { DLPACK_MAJOR = 1, CODE_COMPLEX = 5 };

/* --- operands and plans --- */

/* A class of arrays, and how its arrays are read. */
typedef struct {
    PyTypeObject *type;
    const exchange_api *api; /* NULL if the class has no exchange API */
    char kind; /* without an API: 'c' attributes of CuPy, 'd' of DeviceArray, '-' arrays are not read */
    PyObject *current_stream; /* kind 'c': function of a device index; kind 'd': context variable of a handle */
} array_class;

typedef struct {
    const array_class *class; /* NULL for a number */
    word address;             /* address of an array */
    double real;              /* value of a float */
    int64_t integer;          /* value of an int or bool */
    char kind;                /* 'a' array, 'f' float, 'i' int, 'b' bool */
    int32_t device_id;
    word streams[2];        /* streams that use the array, on which the launch must be; 0 is any stream */
    int key_start, key_end; /* indices of the first key word of the operand, and of the word after the last one */
} operand;

typedef struct {
    /* 'a' address, 's' scratch, 'c' constant, 'f' float, 'd' double, 'q' 64-bit integer, '?' bool, 'n' counter word */
    char kind;
    int operand; /* index of an operand, or of a word of the counter */
    int offset;  /* offset of a constant in the constants of the launch, in bytes */
} parameter;

typedef struct {
    word key[MAX_KEY_WORDS];
    int key_words;
    bool allocates; /* whether the outputs are new arrays */
    /* ArrayFactory, or Python function of a stream handle that returns a tuple of new outputs. NULL: the exchange API
     * allocates them. */
    PyObject *allocate;
    int operand_count, parameter_count, result_count;
    int results[MAX_OPERANDS];          /* operands that the call returns */
    bool is_output[MAX_OPERANDS];       /* operands that the kernel writes */
    int64_t first_offset[MAX_OPERANDS]; /* offset of the first byte of an array from its address */
    int64_t end_offset[MAX_OPERANDS];   /* offset of the byte after its last one */
    parameter parameters[MAX_PARAMETERS];
    char constants[MAX_CONSTANT_BYTES];
    handle function, context;
    int32_t device_id;
    unsigned blocks, threads;
    bool uses_counter; /* whether the launch reads and advances the counter of the FastCall object */
    word counter_step; /* number that a launch adds to this counter */
    int active_calls;  /* calls that use the plan, which must not be deleted meanwhile */
    bool uses_scratch;
    int scratch_count;
    struct {
        handle stream;
        word address;
    } scratch[MAX_SCRATCH];
} prepared_launch;

/* The counter of a random number generator. The GIL protects it. */
typedef struct {
    PyObject_HEAD
    word words[3];  /* position, sequence and seed */
    bool is_frozen; /* whether the position is now in device memory; the words here are then out of date */
} LaunchCounter;

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    LaunchCounter *counter; /* NULL for kernels without a counter */
    int input_count,
        output_count; /* numbers of arguments, and of outputs that `out` provides or the call allocates */
    int plan_count;
    prepared_launch *plans[MAX_PLANS]; /* the plan of the last call is the first one */
} FastCall;

static PyObject *name_call, *name_out, *name_stream, *name_api, *name_requires_grad, *name_is_neg,
    *name_cuda_stream, *name_allocation_stream, *name_view, *name_ptr, *name_dtype, *name_shape, *name_strides,
    *name_read_only, *name_cuda_index, *name_data, *name_device_id, *name_gpu, *name_memory, *name_other_streams;
static PyObject *dtype_codes;        /* dict of numpy dtypes and names of dtypes: code of DLPack + 256 * bits */
static int accepted_device_type = 2; /* kDLCUDA */

/* CU_STREAM_LEGACY. The default stream always has this handle here, so that its scratch memory is found. */
#define LEGACY_STREAM ((handle)1)

static struct {
    int (*launch)(handle function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                  unsigned shared_bytes, handle stream, void **parameters, void **extra);
    int (*get_context)(handle *context);
    int (*push_context)(handle context);
    int (*pop_context)(handle *context);
    int (*is_capturing)(handle stream, int *status);
    int (*allocate)(word *address, size_t size_bytes, handle stream);
    int (*free)(word address, handle stream);
} driver;

/* Make a context current. Return false after an error; set `was_current` if the context already was current. */
static bool enter_context(handle context, bool *was_current)
{
    handle current_context = NULL;
    *was_current = !driver.get_context(&current_context) && current_context == context;
    return *was_current || !driver.push_context(context);
}

/* Restore the context that was current before enter_context(). */
static void leave_context(bool was_current)
{
    handle context;
    if (!was_current)
        driver.pop_context(&context);
}

/* --- memory --- */

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

static PyTypeObject stream_memory_type = {
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

/* --- new arrays --- */

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

/* Creates arrays of cudakit of fixed dtypes and shapes, in new memory, without Python code. */
typedef struct {
    PyObject_HEAD
    handle context;
    PyObject *array_class, *view_class; /* the Python classes DeviceArray and ArrayView */
    PyObject *layouts;                  /* tuple of layouts: each a tuple of LAYOUT_ITEMS items */
} ArrayFactory;

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
    bool is_valid = view && pointer && !PyObject_GenericSetAttr(view, name_ptr, pointer) &&
                    !PyObject_GenericSetAttr(view, name_dtype, PyTuple_GET_ITEM(layout, LAYOUT_DTYPE)) &&
                    !PyObject_GenericSetAttr(view, name_shape, PyTuple_GET_ITEM(layout, LAYOUT_SHAPE)) &&
                    !PyObject_GenericSetAttr(view, name_strides, PyTuple_GET_ITEM(layout, LAYOUT_STRIDES)) &&
                    !PyObject_GenericSetAttr(view, name_read_only, Py_False);
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
    bool is_valid = array && view && !PyObject_SetAttr(array, name_gpu, PyTuple_GET_ITEM(layout, LAYOUT_GPU)) &&
                    !PyObject_SetAttr(array, name_cuda_index, PyTuple_GET_ITEM(layout, LAYOUT_CUDA_INDEX)) &&
                    !PyObject_SetAttr(array, name_stream, stream_number) &&
                    !PyObject_SetAttr(array, name_allocation_stream, stream_number) &&
                    !PyObject_SetAttr(array, name_memory, (PyObject *)memory) &&
                    !PyObject_SetAttr(array, name_other_streams, Py_None) &&
                    !PyObject_SetAttr(array, name_view, view);
    Py_DECREF(memory);
    Py_XDECREF(view);
    if (!is_valid)
        Py_CLEAR(array);
    return array;
}

/* Return a new reference to a tuple of new arrays, and store their addresses. Return NULL, possibly with an exception,
 * if there is no memory or the stream is captured. */
static PyObject *new_arrays(const ArrayFactory *self, handle stream, word *addresses)
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

static PyTypeObject array_factory_type = {
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

/* --- calls of functions of other libraries --- */

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

static PyTypeObject stream_call_type = {
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

static array_class classes[CACHED_CLASSES];
static int class_count;

/* Return the entry of a class in the table of classes, or NULL. */
static array_class *find_class(PyTypeObject *type)
{
    for (int i = 0; i < class_count; i++)
        if (classes[i].type == type)
            return &classes[i];
    return NULL;
}

/* Add a class to the table of classes, which keeps the class alive. Return NULL if the table is full. */
static array_class *add_class(PyTypeObject *type)
{
    if (class_count == CACHED_CLASSES)
        return NULL;
    array_class *class = &classes[class_count++];
    *class = (array_class){.type = (PyTypeObject *)Py_NewRef(type), .kind = '-'};
    PyObject *capsule = PyObject_GetAttr((PyObject *)type, name_api);
    const exchange_api *api = capsule ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : NULL;
    Py_XDECREF(capsule);
    PyErr_Clear();
    if (api && api->major == DLPACK_MAJOR && api->tensor_from_object)
        class->api = api;
    return class;
}

/* Return the entry of an object's class, which is added if it is new. Return NULL if the table is full. */
static const array_class *class_of(PyObject *object)
{
    const array_class *class = find_class(Py_TYPE(object));
    return class ? class : add_class(Py_TYPE(object));
}

/* Return whether a tensor is C-contiguous and has several elements. PyTorch has no such tensor with a lazy
 * negation. */
static bool is_contiguous(const dl_tensor *tensor)
{
    int64_t stride = 1;
    for (int i = tensor->dimensions - 1; i >= 0; i--) {
        if (tensor->shape[i] != 1 && tensor->strides[i] != stride)
            return false;
        stride *= tensor->shape[i];
    }
    return stride > 1;
}

/* Return whether a Boolean attribute of an object is true, after a call if it is a method. */
static bool is_true(PyObject *object, PyObject *name, bool is_method)
{
    PyObject *value = is_method ? PyObject_CallMethodNoArgs(object, name) : PyObject_GetAttr(object, name);
    bool result = value == Py_True;
    Py_XDECREF(value);
    PyErr_Clear();
    return result;
}

/* Return an integer attribute of an object, or -1 with an exception. */
static int64_t integer_attribute(PyObject *object, PyObject *name)
{
    PyObject *value = object ? PyObject_GetAttr(object, name) : NULL;
    int64_t number = value ? PyLong_AsLongLong(value) : -1;
    Py_XDECREF(value);
    return number;
}

/* Read the attributes dtype, shape and strides (in bytes) of an object into a tensor. `extents` gets the numbers of the
 * shape and the strides. Return false, possibly with an exception, for attributes that are not supported. */
static bool read_layout(PyObject *object, dl_tensor *tensor, int64_t *extents)
{
    PyObject *dtype = PyObject_GetAttr(object, name_dtype), *shape = PyObject_GetAttr(object, name_shape),
             *strides = PyObject_GetAttr(object, name_strides);
    PyObject *code = dtype && dtype_codes ? PyDict_GetItemWithError(dtype_codes, dtype) : NULL;
    bool is_valid = code && shape && strides && PyTuple_CheckExact(shape) && PyTuple_CheckExact(strides) &&
                    PyTuple_GET_SIZE(shape) == PyTuple_GET_SIZE(strides) &&
                    PyTuple_GET_SIZE(shape) <= MAX_DIMENSIONS;
    if (is_valid) {
        long type_number = PyLong_AsLong(code);
        int64_t element_bytes = (type_number >> 8) / 8;
        tensor->code = (uint8_t)(type_number & 0xFF);
        tensor->bits = (uint8_t)(type_number >> 8);
        tensor->lanes = 1;
        tensor->dimensions = (int32_t)PyTuple_GET_SIZE(shape);
        tensor->shape = extents;
        tensor->strides = extents + tensor->dimensions;
        for (int i = 0; i < tensor->dimensions; i++) {
            int64_t stride_bytes = PyLong_AsLongLong(PyTuple_GET_ITEM(strides, i));
            tensor->shape[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(shape, i));
            tensor->strides[i] = stride_bytes / element_bytes;
            is_valid = is_valid && stride_bytes % element_bytes == 0;
        }
    }
    Py_XDECREF(dtype);
    Py_XDECREF(shape);
    Py_XDECREF(strides);
    return is_valid && !PyErr_Occurred();
}

/* Read an array through attributes. Return false, possibly with an exception, for arrays that only _call can handle. */
static bool read_attributes(PyObject *object, operand *out, dl_tensor *tensor, int64_t *extents)
{
    bool is_cupy = out->class->kind == 'c';
    PyObject *memory = PyObject_GetAttr(object, is_cupy ? name_data : name_view);
    if (!memory)
        return false;
    *tensor = (dl_tensor){.device_type = accepted_device_type};
    tensor->data = (void *)(uintptr_t)integer_attribute(memory, name_ptr);
    tensor->device_id = (int32_t)(is_cupy ? integer_attribute(memory, name_device_id)
                                          : integer_attribute(object, name_cuda_index));
    bool is_valid =
        !PyErr_Occurred() && tensor->device_id >= 0 && read_layout(is_cupy ? object : memory, tensor, extents);
    if (is_valid && !is_cupy) { /* a view of cudakit, and the streams that use its memory */
        out->streams[0] = (word)integer_attribute(object, name_stream);
        out->streams[1] = (word)integer_attribute(object, name_allocation_stream);
        is_valid = !is_true(memory, name_read_only, false) && !PyErr_Occurred();
    }
    Py_DECREF(memory);
    return is_valid;
}

/* Append the dtype, device, shape, strides and alignment of an array to a key. Return the number of words, or -1. */
static int add_tensor_key(word *key, int word_count, const dl_tensor *tensor, word address)
{
    if (tensor->dimensions > MAX_KEY_WORDS || word_count + 1 + 2 * tensor->dimensions > MAX_KEY_WORDS)
        return -1;
    key[word_count++] = (word)'a' | (word)tensor->code << 8 | (word)tensor->bits << 16 |
                        (word)(tensor->dimensions & 0xFF) << 32 | (word)(tensor->device_id & 0xFF) << 40 |
                        address % ALIGNMENT << 48;
    memcpy(key + word_count, tensor->shape, (size_t)tensor->dimensions * sizeof *key);
    word_count += tensor->dimensions;
    memcpy(key + word_count, tensor->strides, (size_t)tensor->dimensions * sizeof *key);
    return word_count + tensor->dimensions;
}

/* Read an argument into an operand, and append its properties to a key. Return the number of words, or -1 for arguments
 * that only the method _call can handle. */
static int read_operand(PyObject *object, bool is_output, operand *out, word *key, int word_count)
{
    *out = (operand){.key_start = word_count};
    if (PyFloat_CheckExact(object)) {
        out->kind = 'f';
        out->real = PyFloat_AS_DOUBLE(object);
    } else if (PyLong_CheckExact(object)) {
        out->kind = 'i';
        out->integer = PyLong_AsLongLong(object);
        if (out->integer == -1 && PyErr_Occurred()) {
            PyErr_Clear();
            return -1;
        }
    } else if (PyBool_Check(object)) {
        out->kind = 'b';
        out->integer = object == Py_True;
    } else {
        dl_tensor tensor;
        int64_t extents[2 * MAX_DIMENSIONS];
        out->kind = 'a';
        out->class = class_of(object);
        const exchange_api *api = out->class ? out->class->api : NULL;
        if (!out->class || (!api && out->class->kind == '-'))
            return -1;
        if (api ? api->tensor_from_object(object, &tensor) != 0
                : !read_attributes(object, out, &tensor, extents)) {
            PyErr_Clear();
            return -1;
        }
        if (tensor.device_type != accepted_device_type || tensor.lanes != 1 || tensor.code == CODE_COMPLEX ||
            (tensor.dimensions && !tensor.strides))
            return -1;
        /* PyTorch: a write to a tensor that requires a gradient is an error, and a lazy negation is not supported. A
         * tensor with a lazy negation is an imaginary part, which is never contiguous. */
        if (api && ((is_output && is_true(object, name_requires_grad, false)) ||
                    (!is_contiguous(&tensor) && is_true(object, name_is_neg, true))))
            return -1;
        out->address = (word)(uintptr_t)tensor.data + tensor.byte_offset;
        out->device_id = tensor.device_id;
        word_count = add_tensor_key(key, word_count, &tensor, out->address);
        out->key_end = word_count;
        return word_count;
    }
    if (word_count >= MAX_KEY_WORDS)
        return -1;
    key[word_count++] = (word)out->kind;
    out->key_end = word_count;
    return word_count;
}

/* Return whether an output shares memory with another array in a way that _call may refuse. */
static bool has_overlap(const prepared_launch *plan, const operand *operands)
{
    for (int i = 0; i < plan->operand_count; i++) {
        if (!plan->is_output[i])
            continue;
        const operand *output = &operands[i];
        for (int j = 0; j < plan->operand_count; j++) {
            const operand *other_operand = &operands[j];
            if (i == j || other_operand->kind != 'a')
                continue;
            if (output->address + (word)plan->first_offset[i] >=
                    other_operand->address + (word)plan->end_offset[j] ||
                other_operand->address + (word)plan->first_offset[j] >=
                    output->address + (word)plan->end_offset[i])
                continue;
            int word_count = output->key_end - output->key_start;
            bool is_same = output->address == other_operand->address &&word_count ==
                               other_operand->key_end - other_operand->key_start &&
                           !memcmp(plan->key + output->key_start, plan->key + other_operand->key_start,
                                   (size_t)word_count * sizeof *plan->key);
            if (!is_same || plan->is_output[j])
                return true;
        }
    }
    return false;
}

/* Move the plan with a key to the front, and return the plan; return NULL if there is none. */
static prepared_launch *find_plan(FastCall *self, const word *key, int word_count, bool allocates)
{
    for (int i = 0; i < self->plan_count; i++) {
        prepared_launch *plan = self->plans[i];
        if (plan->key_words == word_count && plan->allocates == allocates &&
            !memcmp(plan->key, key, (size_t)word_count * sizeof *key)) {
            memmove(self->plans + 1, self->plans, (size_t)i * sizeof *self->plans);
            self->plans[0] = plan;
            return plan;
        }
    }
    return NULL;
}

/* Return the address of a plan's scratch memory for a stream, or 0. */
static word find_scratch(const prepared_launch *plan, handle stream)
{
    for (int i = 0; i < plan->scratch_count; i++)
        if (plan->scratch[i].stream == stream)
            return plan->scratch[i].address;
    return 0;
}

/* Launch the kernel of a plan. Return false if _call must perform the call, or report its error. */
static bool launch_plan(FastCall *self, const prepared_launch *plan, const operand *operands, handle stream)
{
    LaunchCounter *counter = self->counter;
    union {
        word bits;
        float single;
        double real;
        int64_t integer;
        bool truth;
    } values[MAX_PARAMETERS];
    void *parameters[MAX_PARAMETERS];
    for (int i = 0; i < plan->parameter_count; i++) {
        const parameter *plan_parameter = &plan->parameters[i];
        parameters[i] = &values[i];
        if (plan_parameter->kind == 'n') {
            values[i].bits = counter->words[plan_parameter->operand];
            continue;
        }
        const operand *source_operand = &operands[plan_parameter->operand];
        double real = source_operand->kind == 'f' ? source_operand->real : (double)source_operand->integer;
        switch (plan_parameter->kind) {
        case 'a': values[i].bits = source_operand->address; break;
        case 's':
            values[i].bits = plan->uses_scratch ? find_scratch(plan, stream) : 0;
            if (plan->uses_scratch && !values[i].bits)
                return false;
            break;
        case 'f': values[i].single = (float)real; break;
        case 'd': values[i].real = real; break;
        case 'q': values[i].integer = source_operand->integer; break;
        case '?': values[i].truth = source_operand->integer != 0; break;
        default: parameters[i] = (void *)(plan->constants + plan_parameter->offset);
        }
    }
    if (plan->uses_scratch || plan->uses_counter) { /* _call performs captured launches with memory of their own */
        int capture_status = 0;
        if (driver.is_capturing(stream, &capture_status) || capture_status)
            return false;
    }
    if (plan->uses_counter) { /* changed while the GIL is held, so that no two launches get the same numbers */
        if (counter->is_frozen || counter->words[0] > UINT64_MAX - plan->counter_step)
            return false;
        counter->words[0] += plan->counter_step;
    }
    handle function = plan->function, context = plan->context;
    unsigned blocks = plan->blocks, threads = plan->threads;
    int status = -1;
    bool was_current;
    Py_BEGIN_ALLOW_THREADS;
    if (enter_context(context, &was_current)) {
        status = driver.launch(function, blocks, 1, 1, threads, 1, 1, 0, stream, parameters, NULL);
        leave_context(was_current);
    }
    Py_END_ALLOW_THREADS;
    return !status;
}

/* Receives the message of a failed allocation; _call then allocates again, and reports the error. */
static void ignore_error(void *error_context, const char *kind, const char *message)
{
    (void)error_context;
    (void)kind;
    (void)message;
}

/* Set the key indices of the outputs that a plan allocates. The keys follow those of the inputs. */
static void locate_output_keys(FastCall *self, const prepared_launch *plan, operand *operands)
{
    int key_start = plan->key_words;
    for (int i = self->input_count; i < plan->operand_count; i++) {
        int dimensions = (int)(plan->key[key_start] >> 32 & 0xFF);
        operands[i] = (operand){.kind = 'a', .key_start = key_start, .key_end = key_start + 1 + 2 * dimensions};
        key_start = operands[i].key_end;
    }
}

/* Allocate the outputs of a plan by the exchange API, with the dtypes and shapes of its key. Return false after a
 * failure. */
static bool allocate_tensors(FastCall *self, const prepared_launch *plan, operand *operands,
                             const exchange_api *api, managed_tensor **outputs)
{
    for (int i = 0; i < self->output_count; i++) {
        int index = self->input_count + i;
        operand *output = &operands[index];
        word shape[MAX_KEY_WORDS];
        const word *key = plan->key + output->key_start;
        int dimensions = (int)(key[0] >> 32 & 0xFF);

        memcpy(shape, key + 1, (size_t)dimensions * sizeof *shape);
        dl_tensor prototype = {.device_type = accepted_device_type,
                               .device_id = plan->device_id,
                               .dimensions = dimensions,
                               .code = (uint8_t)(key[0] >> 8),
                               .bits = (uint8_t)(key[0] >> 16),
                               .lanes = 1,
                               .shape = (int64_t *)shape};
        if (api->allocate(&prototype, &outputs[i], NULL, ignore_error) || !outputs[i])
            return false;
        output->address = (word)(uintptr_t)outputs[i]->tensor.data + outputs[i]->tensor.byte_offset;
        if (output->address % ALIGNMENT)
            return false;
    }
    return true;
}

/* Read an output that the Python function of a plan allocated, into an operand with the key indices of the output.
 * Return false, possibly with an exception, for an output that differs from that of the plan. */
static bool read_new_output(const prepared_launch *plan, PyObject *object, operand *output)
{
    const word *expected_key = plan->key + output->key_start;
    const array_class *class = find_class(Py_TYPE(object));
    if (class && class->kind == 'c') { /* CuPy creates arrays of the dtype and shape that the function requests */
        PyObject *memory = PyObject_GetAttr(object, name_data);
        output->address = (word)integer_attribute(memory, name_ptr);
        int64_t device_id = integer_attribute(memory, name_device_id);
        Py_XDECREF(memory);
        return !PyErr_Occurred() && device_id == plan->device_id &&
               output->address % ALIGNMENT == expected_key[0] >> 48;
    }
    word key[MAX_KEY_WORDS];
    int key_start = output->key_start;
    int word_count = read_operand(object, true, output, key, 0);
    bool is_valid = word_count > 0 && output->kind == 'a' && output->device_id == plan->device_id &&
                    !memcmp(key, expected_key, (size_t)word_count * sizeof *key);
    output->key_start = key_start;
    output->key_end = key_start + word_count;
    return is_valid;
}

/* Allocate the outputs of a plan by its factory or its Python function. Store their addresses in ``operands``.
 * Return a new reference to a tuple of outputs. Return NULL without an exception after a failure, or if the plan
 * expects other outputs. */
static PyObject *allocate_arrays(FastCall *self, const prepared_launch *plan, operand *operands, handle stream)
{
    word addresses[MAX_OPERANDS];
    if (Py_TYPE(plan->allocate) == &array_factory_type) {
        PyObject *arrays = new_arrays((ArrayFactory *)plan->allocate, stream, addresses);
        PyErr_Clear();
        for (int i = 0; arrays && i < self->output_count; i++)
            operands[self->input_count + i].address = addresses[i];
        return arrays;
    }
    PyObject *stream_handle = PyLong_FromVoidPtr(stream);
    PyObject *outputs = stream_handle ? PyObject_CallOneArg(plan->allocate, stream_handle) : NULL;
    Py_XDECREF(stream_handle);
    bool is_valid = outputs && PyTuple_CheckExact(outputs) && PyTuple_GET_SIZE(outputs) == self->output_count;
    for (int i = 0; is_valid && i < self->output_count; i++)
        is_valid = read_new_output(plan, PyTuple_GET_ITEM(outputs, i), &operands[self->input_count + i]);
    PyErr_Clear();
    if (!is_valid)
        Py_CLEAR(outputs);
    return outputs;
}

/* Delete the outputs that no result owns. */
static void delete_outputs(managed_tensor **outputs, int output_count)
{
    for (int i = 0; i < output_count; i++)
        if (outputs[i] && outputs[i]->deleter)
            outputs[i]->deleter(outputs[i]);
}

/* The arguments of a call. `out` and `stream` are NULL if they are missing or None. */
typedef struct {
    PyObject *const *inputs;
    PyObject *out, *stream;
} call_arguments;

/* Return false unless all inputs are passed by position, and only `out` and `stream` by name. */
static bool parse_arguments(FastCall *self, PyObject *const *args, Py_ssize_t position_count,
                            PyObject *keyword_names, call_arguments *arguments)
{
    *arguments = (call_arguments){args, NULL, NULL};
    if (position_count != self->input_count)
        return false;
    for (Py_ssize_t i = 0; keyword_names && i < PyTuple_GET_SIZE(keyword_names); i++) {
        PyObject *name = PyTuple_GET_ITEM(keyword_names, i), *value = args[position_count + i];
        if (value == Py_None)
            value = NULL;
        if (name == name_out || PyUnicode_Compare(name, name_out) == 0)
            arguments->out = value;
        else if (name == name_stream || PyUnicode_Compare(name, name_stream) == 0)
            arguments->stream = value;
        else
            return false;
    }
    return true;
}

/* Read the operands of a call and build its key. Return the number of words, or -1 for calls that are not prepared. */
static int read_operands(FastCall *self, const call_arguments *arguments, operand *operands, word *key,
                         int *first_array)
{
    int word_count = 0;
    PyObject *const *outputs = &arguments->out;
    if (arguments->out && PyTuple_CheckExact(arguments->out)) {
        if (PyTuple_GET_SIZE(arguments->out) != self->output_count)
            return -1;
        outputs = &PyTuple_GET_ITEM(arguments->out, 0);
    } else if (arguments->out && self->output_count != 1) {
        return -1;
    }
    int operand_count = self->input_count + (arguments->out ? self->output_count : 0);
    *first_array = -1;
    for (int i = 0; i < operand_count; i++) {
        bool is_output = i >= self->input_count;
        PyObject *object = is_output ? outputs[i - self->input_count] : arguments->inputs[i];
        word_count = read_operand(object, is_output, &operands[i], key, word_count);
        if (word_count < 0)
            return -1;
        if (operands[i].kind != 'a') {
            if (is_output)
                return -1;
        } else if (*first_array < 0) {
            *first_array = i;
        } else if (operands[i].device_id != operands[*first_array].device_id) {
            return -1;
        }
    }
    return *first_array < 0 ? -1 : word_count;
}

/* Find the handle of a call's stream: by default the current stream of the first array's library. The stream may be an
 * int, a stream of CuPy for an array of CuPy, or an object with the attribute cuda_stream. Return false for others. */
static bool find_stream(PyObject *object, const operand *first_array, handle *stream)
{
    const array_class *class = first_array->class;
    PyObject *handle_object = NULL;
    if (!object && class->api) {
        if (class->api->current_stream(accepted_device_type, first_array->device_id, stream))
            return false;
        *stream = *stream ? *stream : LEGACY_STREAM;
        return true;
    }
    if (!object && class->kind == 'd') {
        PyContextVar_Get(class->current_stream, NULL, &handle_object);
    } else if (!object) {
        PyObject *device_index = PyLong_FromLong(first_array->device_id);
        PyObject *current_stream = device_index ? PyObject_CallOneArg(class->current_stream, device_index) : NULL;
        handle_object = current_stream ? PyObject_GetAttr(current_stream, name_ptr) : NULL;
        Py_XDECREF(current_stream);
        Py_XDECREF(device_index);
    } else {
        PyObject *name = class->kind == 'c' ? name_ptr : name_cuda_stream;
        handle_object = PyLong_Check(object) ? Py_NewRef(object) : PyObject_GetAttr(object, name);
    }
    *stream = handle_object && PyLong_Check(handle_object) ? PyLong_AsVoidPtr(handle_object) : (handle)-1;
    Py_XDECREF(handle_object);
    *stream = *stream ? *stream : LEGACY_STREAM;
    bool is_valid = *stream != (handle)-1 && !PyErr_Occurred();
    PyErr_Clear();
    return is_valid;
}

/* The new outputs of a call. One of the two members is used. */
typedef struct {
    managed_tensor *tensors[MAX_OPERANDS]; /* tensors that the exchange API allocated */
    PyObject *arrays;                      /* tuple of arrays that the plan's function allocated */
} new_outputs;

/* Return a new reference to a result of a call: an argument, or an allocated output, whose ownership moves. */
static PyObject *result_object(FastCall *self, const call_arguments *arguments, int index, const exchange_api *api,
                               new_outputs *outputs)
{
    if (index < self->input_count)
        return Py_NewRef(arguments->inputs[index]);
    int output = index - self->input_count;
    if (arguments->out)
        return Py_NewRef(PyTuple_CheckExact(arguments->out) ? PyTuple_GET_ITEM(arguments->out, output)
                                                            : arguments->out);
    if (outputs->arrays)
        return Py_NewRef(PyTuple_GET_ITEM(outputs->arrays, output));
    void *object = NULL;
    managed_tensor *tensor = outputs->tensors[output];
    outputs->tensors[output] = NULL;
    return api->object_from_managed(tensor, &object) ? NULL : object;
}

/* Return a new reference to the result of a call, a tuple if the call has several results. */
static PyObject *make_results(FastCall *self, const prepared_launch *plan, const call_arguments *arguments,
                              const exchange_api *api, new_outputs *outputs)
{
    if (plan->result_count == 1)
        return result_object(self, arguments, plan->results[0], api, outputs);
    PyObject *tuple = PyTuple_New(plan->result_count);
    for (int i = 0; tuple && i < plan->result_count; i++) {
        PyObject *result = result_object(self, arguments, plan->results[i], api, outputs);
        if (!result)
            Py_CLEAR(tuple);
        else
            PyTuple_SET_ITEM(tuple, i, result);
    }
    return tuple;
}

/* Return whether all arrays of a call can be used on a stream without waiting for other streams. */
static bool matches_streams(const prepared_launch *plan, const operand *operands, handle stream)
{
    for (int i = 0; i < plan->operand_count; i++)
        for (int j = 0; j < 2; j++)
            if (operands[i].streams[j] && operands[i].streams[j] != (word)(uintptr_t)stream)
                return false;
    return true;
}

/* Perform a call whose launch is prepared. Return NULL without an exception for other calls. */
static PyObject *call_prepared(FastCall *self, const call_arguments *arguments)
{
    operand operands[MAX_OPERANDS];
    word key[MAX_KEY_WORDS];
    new_outputs outputs;
    int first_array;
    handle stream = NULL;
    bool allocates = !arguments->out && self->output_count > 0;

    int word_count = read_operands(self, arguments, operands, key, &first_array);
    if (word_count < 0 || (allocates && arguments->stream))
        return NULL;
    prepared_launch *plan = find_plan(self, key, word_count, allocates);
    const exchange_api *api = operands[first_array].class->api;
    if (!plan || plan->device_id != operands[first_array].device_id || (allocates && !api && !plan->allocate) ||
        !find_stream(arguments->stream, &operands[first_array], &stream)) {
        PyErr_Clear();
        return NULL;
    }
    for (int i = 0; i < self->input_count; i++) /* the kernel updates inputs that are also outputs */
        if (plan->is_output[i] && operands[i].class->api &&
            is_true(arguments->inputs[i], name_requires_grad, false))
            return NULL;
    PyObject *result = NULL;
    bool is_allocated = true;
    plan->active_calls++;
    outputs.arrays = NULL;
    if (allocates) {
        memset(outputs.tensors, 0, sizeof outputs.tensors);
        locate_output_keys(self, plan, operands);
        if (api) {
            is_allocated = allocate_tensors(self, plan, operands, api, outputs.tensors);
        } else {
            outputs.arrays = allocate_arrays(self, plan, operands, stream);
            is_allocated = outputs.arrays != NULL;
        }
    }
    if (is_allocated && matches_streams(plan, operands, stream) && !has_overlap(plan, operands) &&
        launch_plan(self, plan, operands, stream))
        result = make_results(self, plan, arguments, api, &outputs);
    plan->active_calls--;
    if (allocates && api)
        delete_outputs(outputs.tensors, self->output_count);
    Py_XDECREF(outputs.arrays);
    return result;
}

/* Perform a call of a FastCall object: launch a prepared plan, or call the method _call. */
static PyObject *call_object(PyObject *object, PyObject *const *args, size_t flags, PyObject *keyword_names)
{
    FastCall *self = (FastCall *)object;
    Py_ssize_t position_count = PyVectorcall_NARGS(flags),
               argument_count = position_count + (keyword_names ? PyTuple_GET_SIZE(keyword_names) : 0);
    call_arguments arguments;

    if (self->plan_count && driver.launch &&
        parse_arguments(self, args, position_count, keyword_names, &arguments)) {
        PyObject *result = call_prepared(self, &arguments);
        if (result || PyErr_Occurred())
            return result;
    }
    PyObject **all_arguments = PyMem_Malloc((size_t)(argument_count + 1) * sizeof *all_arguments);
    if (!all_arguments)
        return PyErr_NoMemory();
    all_arguments[0] = object;
    memcpy(all_arguments + 1, args, (size_t)argument_count * sizeof *all_arguments);
    PyObject *result =
        PyObject_VectorcallMethod(name_call, all_arguments, (size_t)position_count + 1, keyword_names);
    PyMem_Free(all_arguments);
    return result;
}

/* --- preparation of launches --- */

/* Compute the byte range of an array from the words of its key. */
static void find_byte_range(prepared_launch *plan, int index, const word *key)
{
    int dimensions = (int)(key[0] >> 32 & 0xFF);
    int64_t element_bytes = (int64_t)(key[0] >> 16 & 0xFF) / 8, first_offset = 0, end_offset = element_bytes;

    for (int i = 0; i < dimensions; i++) {
        int64_t size = (int64_t)key[1 + i];
        int64_t extent = (size - 1) * (int64_t)key[1 + dimensions + i] * element_bytes;
        if (size == 0)
            end_offset = 0;
        *(extent < 0 ? &first_offset : &end_offset) += extent;
    }
    plan->first_offset[index] = first_offset;
    plan->end_offset[index] = end_offset;
}

/* Read the operands of a prepared call into a plan: the key, and the byte ranges of arrays. Return false for operands
 * that the fast path does not handle. */
static bool prepare_operands(FastCall *self, prepared_launch *plan, PyObject *inputs, PyObject *outputs)
{
    int word_count = 0;
    plan->operand_count = self->input_count + self->output_count;
    for (int i = 0; i < plan->operand_count; i++) {
        bool is_input = i < self->input_count;
        PyObject *object =
            is_input ? PyTuple_GET_ITEM(inputs, i) : PyTuple_GET_ITEM(outputs, i - self->input_count);
        operand operand;
        if (plan->allocates && i == self->input_count)
            plan->key_words = word_count;
        word_count = read_operand(object, !is_input, &operand, plan->key, word_count);
        if (word_count < 0)
            return false;
        if (operand.kind == 'a')
            find_byte_range(plan, i, plan->key + operand.key_start);
    }
    if (!plan->allocates)
        plan->key_words = word_count;
    return true;
}

/* Read the parameters of a launch: tuples of a kind, the index of an operand, and the bytes of a constant. Return
 * false if the fast path does not handle a parameter, such as a word of the counter without a counter. */
static bool prepare_parameters(prepared_launch *plan, PyObject *parameters, bool has_counter)
{
    Py_ssize_t used_bytes = 0;
    plan->parameter_count = (int)PyTuple_GET_SIZE(parameters);
    if (plan->parameter_count > MAX_PARAMETERS)
        return false;
    for (int i = 0; i < plan->parameter_count; i++) {
        parameter *plan_parameter = &plan->parameters[i];
        const char *constant;
        Py_ssize_t constant_bytes;
        int kind;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(parameters, i), "Ciy#", &kind, &plan_parameter->operand, &constant,
                              &constant_bytes))
            return false;
        plan_parameter->kind = (char)kind;
        int operand_limit = kind == 'n' ? 3 : plan->operand_count;
        plan->uses_counter = plan->uses_counter || kind == 'n';
        if (plan_parameter->operand < 0 || plan_parameter->operand >= operand_limit ||
            (kind == 'n' && !has_counter) || used_bytes + constant_bytes > MAX_CONSTANT_BYTES)
            return false;
        plan_parameter->offset = (int)used_bytes;
        memcpy(plan->constants + used_bytes, constant, (size_t)constant_bytes);
        used_bytes += (constant_bytes + 15) / 16 * 16; /* 16 bytes are the largest alignment of a parameter */
        if (used_bytes > MAX_CONSTANT_BYTES)
            used_bytes = MAX_CONSTANT_BYTES;
    }
    return true;
}

/* Add the scratch memory of a stream to a plan. A new stream replaces the first one if the table is full. */
static void add_scratch(prepared_launch *plan, handle stream, word address)
{
    if (!address || find_scratch(plan, stream))
        return;
    int index = plan->scratch_count < MAX_SCRATCH ? plan->scratch_count++ : 0;
    plan->scratch[index].stream = stream;
    plan->scratch[index].address = address;
}

/* Free a plan, and its reference to a Python function. */
static void delete_plan(prepared_launch *plan)
{
    if (plan)
        Py_XDECREF(plan->allocate);
    PyMem_Free(plan);
}

/* Insert a plan in front of all others. Return false if the oldest plan of a full table is in use. */
static bool insert_plan(FastCall *self, prepared_launch *new_plan)
{
    if (self->plan_count == MAX_PLANS) {
        prepared_launch *oldest_plan = self->plans[MAX_PLANS - 1];
        if (oldest_plan->active_calls)
            return false;
        self->plan_count--;
        delete_plan(oldest_plan);
    }
    memmove(self->plans + 1, self->plans, (size_t)self->plan_count * sizeof *self->plans);
    self->plans[0] = new_plan;
    self->plan_count++;
    return true;
}

/* Delete the first plan, which find_plan() returned last. */
static void remove_first_plan(FastCall *self)
{
    delete_plan(self->plans[0]);
    self->plan_count--;
    memmove(self->plans, self->plans + 1, (size_t)self->plan_count * sizeof *self->plans);
}

/* Read the indices of result operands, and of the operands that the kernel writes. */
static bool prepare_results(prepared_launch *plan, PyObject *results)
{
    plan->result_count = (int)PyTuple_GET_SIZE(results);
    if (plan->result_count > MAX_OPERANDS)
        return false;
    for (int i = 0; i < plan->result_count; i++) {
        long index = PyLong_AsLong(PyTuple_GET_ITEM(results, i));
        if (index < 0 || index >= plan->operand_count)
            return false;
        plan->results[i] = (int)index;
        plan->is_output[index] = true;
    }
    return true;
}

PyDoc_STRVAR(
    prepare_doc,
    "_prepare(inputs, outputs, allocate, results, parameters, function, context, device, blocks, threads, "
    "stream, scratch, counter_step)\n--\n\n"
    "Prepare the launch of a call, so that equal calls run without Python; return whether that is possible.\n\n"
    "``allocate`` is a function of a stream handle that returns a tuple of new outputs, or None if the call "
    "passes\n"
    "outputs. Launches add ``counter_step`` to the position of the counter.");

/* Implement _prepare(). */
static PyObject *prepare(PyObject *object, PyObject *args)
{
    FastCall *self = (FastCall *)object;
    PyObject *inputs, *outputs, *allocate, *results, *parameters;
    unsigned long long function, context, stream, scratch, counter_step;
    int device;
    unsigned blocks, threads;

    if (!PyArg_ParseTuple(args, "O!O!OO!O!KKiIIKKK", &PyTuple_Type, &inputs, &PyTuple_Type, &outputs, &allocate,
                          &PyTuple_Type, &results, &PyTuple_Type, &parameters, &function, &context, &device,
                          &blocks, &threads, &stream, &scratch, &counter_step))
        return NULL;
    if (!driver.launch || PyTuple_GET_SIZE(inputs) != self->input_count ||
        PyTuple_GET_SIZE(outputs) != self->output_count)
        Py_RETURN_FALSE;
    prepared_launch *plan = PyMem_Calloc(1, sizeof *plan);
    if (!plan)
        return PyErr_NoMemory();
    plan->allocates = allocate != Py_None;
    plan->allocate = plan->allocates ? Py_NewRef(allocate) : NULL;
    plan->counter_step = counter_step;
    plan->function = (handle)(uintptr_t)function;
    plan->context = (handle)(uintptr_t)context;
    plan->device_id = device;
    plan->blocks = blocks;
    plan->threads = threads;
    plan->uses_scratch = scratch != 0;
    bool is_prepared = prepare_operands(self, plan, inputs, outputs) && prepare_results(plan, results) &&
                       prepare_parameters(plan, parameters, self->counter != NULL);
    if (is_prepared) {
        prepared_launch *existing_plan = find_plan(self, plan->key, plan->key_words, plan->allocates);
        if (existing_plan && existing_plan->function != plan->function && !existing_plan->active_calls) {
            /* another kernel now performs equal calls, such as one that reads the counter from device memory */
            remove_first_plan(self);
            existing_plan = NULL;
        }
        add_scratch(existing_plan ? existing_plan : plan, (handle)(uintptr_t)stream, scratch);
        is_prepared = existing_plan || insert_plan(self, plan);
        if (!existing_plan && is_prepared)
            plan = NULL;
    }
    delete_plan(plan);
    if (PyErr_Occurred())
        return NULL;
    return PyBool_FromLong(is_prepared);
}

/* --- the counter of random number generators --- */

/* Return a tuple of the words of a counter. */
static PyObject *read_counter(PyObject *object, PyObject *args)
{
    const word *words = ((LaunchCounter *)object)->words;
    (void)args;
    return Py_BuildValue("KKK", words[0], words[1], words[2]);
}

/* Return whether the words of a counter equal the expected ones. A frozen counter equals none. */
static bool equals_words(const LaunchCounter *counter, const unsigned long long *expected)
{
    return !counter->is_frozen && counter->words[0] == expected[0] && counter->words[1] == expected[1] &&
           counter->words[2] == expected[2];
}

/* Replace the words of a counter if they equal the expected ones, and return whether they did. */
static PyObject *replace_counter(PyObject *object, PyObject *args)
{
    LaunchCounter *self = (LaunchCounter *)object;
    unsigned long long expected[3], words[3];
    if (!PyArg_ParseTuple(args, "(KKK)(KKK)", &expected[0], &expected[1], &expected[2], &words[0], &words[1],
                          &words[2]))
        return NULL;
    if (!equals_words(self, expected))
        Py_RETURN_FALSE;
    for (int i = 0; i < 3; i++)
        self->words[i] = words[i];
    Py_RETURN_TRUE;
}

/* Freeze a counter if its words equal the expected ones, and return whether they did. */
static PyObject *freeze_counter(PyObject *object, PyObject *args)
{
    LaunchCounter *self = (LaunchCounter *)object;
    unsigned long long expected[3];
    if (!PyArg_ParseTuple(args, "(KKK)", &expected[0], &expected[1], &expected[2]))
        return NULL;
    if (!equals_words(self, expected))
        Py_RETURN_FALSE;
    self->is_frozen = true;
    Py_RETURN_TRUE;
}

static PyMethodDef counter_methods[] = {
    {"read", read_counter, METH_NOARGS,
     PyDoc_STR("read()\n--\n\nReturn the position, the sequence and the seed.")},
    {"replace", replace_counter, METH_VARARGS,
     PyDoc_STR("replace(expected, words)\n--\n\nReplace the words; return False, changing nothing, if the words "
               "are not the expected ones or the counter is frozen.")},
    {"freeze", freeze_counter, METH_VARARGS,
     PyDoc_STR("freeze(expected)\n--\n\nPerform all later calls that use the counter in Python; return False, "
               "changing nothing, if the words are not the expected ones.")},
    {NULL, NULL, 0, NULL}};

static PyTypeObject launch_counter_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "cudakit.gpu._fast_call.LaunchCounter",
    .tp_doc = PyDoc_STR("The counter of a random number generator, which prepared launches advance."),
    .tp_basicsize = sizeof(LaunchCounter),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_methods = counter_methods,
};

/* --- the class of callables --- */

PyDoc_STRVAR(configure_doc, "_configure(input_count, output_count, counter=None)\n--\n\n"
                            "Set the number of arguments, the number of outputs that ``out`` provides, and the\n"
                            "counter of kernels with parameters of the kind 'n'.");

/* Implement _configure(). */
static PyObject *configure(PyObject *object, PyObject *args)
{
    FastCall *self = (FastCall *)object;
    int inputs, outputs;
    PyObject *counter = NULL;
    if (!PyArg_ParseTuple(args, "ii|O!", &inputs, &outputs, &launch_counter_type, &counter))
        return NULL;
    Py_XSETREF(self->counter, (LaunchCounter *)Py_XNewRef(counter));
    bool is_small = inputs + outputs <= MAX_OPERANDS;
    self->input_count = is_small ? inputs : -1; /* no call has -1 arguments */
    self->output_count = is_small ? outputs : 0;
    Py_RETURN_NONE;
}

/* Create a FastCall object that has no prepared launch. */
static PyObject *new_object(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    (void)args;
    (void)keywords;
    FastCall *self = (FastCall *)type->tp_alloc(type, 0);
    if (self) {
        self->vectorcall = call_object;
        self->input_count = -1;
    }
    return (PyObject *)self;
}

/* Free all plans of a FastCall object, and the object. */
static void delete_object(PyObject *object)
{
    FastCall *self = (FastCall *)object;
    for (int i = 0; i < self->plan_count; i++)
        delete_plan(self->plans[i]);
    Py_XDECREF(self->counter);
    Py_TYPE(object)->tp_free(object);
}

static PyMethodDef object_methods[] = {{"_prepare", prepare, METH_VARARGS, prepare_doc},
                                       {"_configure", configure, METH_VARARGS, configure_doc},
                                       {NULL, NULL, 0, NULL}};

static PyTypeObject fast_call_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "cudakit.gpu._fast_call.FastCall",
    .tp_doc = PyDoc_STR("The base class of callables that launch prepared kernels without Python code."),
    .tp_basicsize = sizeof(FastCall),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_new = new_object,
    .tp_dealloc = delete_object,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(FastCall, vectorcall),
    .tp_methods = object_methods,
};

PyDoc_STRVAR(
    use_driver_doc,
    "use_driver(launch, get_context, push_context, pop_context, is_capturing, allocate, free, device_type)\n--\n\n"
    "Set the addresses of the driver's functions, and the device type of DLPack whose arrays are accepted.");

/* Implement use_driver(). */
static PyObject *use_driver(PyObject *module, PyObject *args)
{
    unsigned long long addresses[7];
    (void)module;
    if (!PyArg_ParseTuple(args, "KKKKKKKi", &addresses[0], &addresses[1], &addresses[2], &addresses[3],
                          &addresses[4], &addresses[5], &addresses[6], &accepted_device_type))
        return NULL;
    *(void **)&driver.launch = (void *)(uintptr_t)addresses[0];
    *(void **)&driver.get_context = (void *)(uintptr_t)addresses[1];
    *(void **)&driver.push_context = (void *)(uintptr_t)addresses[2];
    *(void **)&driver.pop_context = (void *)(uintptr_t)addresses[3];
    *(void **)&driver.is_capturing = (void *)(uintptr_t)addresses[4];
    *(void **)&driver.allocate = (void *)(uintptr_t)addresses[5];
    *(void **)&driver.free = (void *)(uintptr_t)addresses[6];
    Py_RETURN_NONE;
}

PyDoc_STRVAR(use_array_class_doc,
             "use_array_class(class, kind, current_stream, dtypes)\n--\n\n"
             "Read arrays of a class through attributes: 'c' those of CuPy's arrays, 'd' those of DeviceArray.\n\n"
             "``current_stream`` is CuPy's function of a device index, or the context variable of cudakit.\n"
             "``dtypes`` is a dict of dtypes: their codes of DLPack plus 256 times their bits.");

/* Implement use_array_class(). */
static PyObject *use_array_class(PyObject *module, PyObject *args)
{
    PyObject *type, *current_stream, *codes;
    int kind;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!COO!", &PyType_Type, &type, &kind, &current_stream, &PyDict_Type, &codes))
        return NULL;
    array_class *class = find_class((PyTypeObject *)type);
    if (!class)
        class = add_class((PyTypeObject *)type);
    if (class) {
        class->kind = (char)kind;
        Py_XSETREF(class->current_stream, Py_NewRef(current_stream));
        Py_XSETREF(dtype_codes, Py_NewRef(codes));
    }
    Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {{"use_driver", use_driver, METH_VARARGS, use_driver_doc},
                                       {"use_array_class", use_array_class, METH_VARARGS, use_array_class_doc},
                                       {NULL, NULL, 0, NULL}};

static struct PyModuleDef module_definition = {PyModuleDef_HEAD_INIT, .m_name = "cudakit.gpu._fast_call",
                                               .m_size = -1, .m_methods = module_methods};

PyMODINIT_FUNC PyInit__fast_call(void)
{
    const struct {
        PyObject **name;
        const char *text;
    } names[] = {{&name_call, "_call"},
                 {&name_out, "out"},
                 {&name_stream, "stream"},
                 {&name_api, "__dlpack_c_exchange_api__"},
                 {&name_requires_grad, "requires_grad"},
                 {&name_is_neg, "is_neg"},
                 {&name_cuda_stream, "cuda_stream"},
                 {&name_allocation_stream, "allocation_stream"},
                 {&name_view, "view"},
                 {&name_ptr, "ptr"},
                 {&name_dtype, "dtype"},
                 {&name_shape, "shape"},
                 {&name_strides, "strides"},
                 {&name_read_only, "read_only"},
                 {&name_cuda_index, "cuda_index"},
                 {&name_data, "data"},
                 {&name_device_id, "device_id"},
                 {&name_gpu, "_gpu"},
                 {&name_memory, "_memory"},
                 {&name_other_streams, "_other_streams"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!(*names[i].name = PyUnicode_InternFromString(names[i].text)))
            return NULL;
    if (PyType_Ready(&fast_call_type) < 0 || PyType_Ready(&launch_counter_type) < 0 ||
        PyType_Ready(&stream_memory_type) < 0 || PyType_Ready(&array_factory_type) < 0 ||
        PyType_Ready(&stream_call_type) < 0)
        return NULL;
    PyObject *module = PyModule_Create(&module_definition);
    if (module && (PyModule_AddObjectRef(module, "FastCall", (PyObject *)&fast_call_type) < 0 ||
                   PyModule_AddObjectRef(module, "LaunchCounter", (PyObject *)&launch_counter_type) < 0 ||
                   PyModule_AddObjectRef(module, "StreamMemory", (PyObject *)&stream_memory_type) < 0 ||
                   PyModule_AddObjectRef(module, "ArrayFactory", (PyObject *)&array_factory_type) < 0 ||
                   PyModule_AddObjectRef(module, "StreamCall", (PyObject *)&stream_call_type) < 0))
        Py_CLEAR(module);
    return module;
}
