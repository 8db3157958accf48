#include "operands.h"

#include <string.h>

enum {
    CACHED_CLASSES = 8,
    MAX_DIMENSIONS = 32 /* maximum number of dimensions of arrays that are read through attributes */
};

enum { DLPACK_MAJOR = 1, CODE_COMPLEX = 5 };

PyObject *dtype_codes;
static array_class classes[CACHED_CLASSES];
static int class_count;

array_class *find_class(PyTypeObject *type)
{
    for (int i = 0; i < class_count; i++)
        if (classes[i].type == type)
            return &classes[i];
    return NULL;
}

array_class *add_class(PyTypeObject *type)
{
    if (class_count == CACHED_CLASSES)
        return NULL;
    array_class *class = &classes[class_count++];
    *class = (array_class){.type = (PyTypeObject *)Py_NewRef(type), .kind = '-'};
    PyObject *capsule = PyObject_GetAttr((PyObject *)type, names.api);
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

bool is_true(PyObject *object, PyObject *name, bool is_method)
{
    PyObject *value = is_method ? PyObject_CallMethodNoArgs(object, name) : PyObject_GetAttr(object, name);
    bool result = value == Py_True;
    Py_XDECREF(value);
    PyErr_Clear();
    return result;
}

int64_t integer_attribute(PyObject *object, PyObject *name)
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
    PyObject *dtype = PyObject_GetAttr(object, names.dtype), *shape = PyObject_GetAttr(object, names.shape),
             *strides = PyObject_GetAttr(object, names.strides);
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
    PyObject *memory = PyObject_GetAttr(object, is_cupy ? names.data : names.view);
    if (!memory)
        return false;
    *tensor = (dl_tensor){.device_type = accepted_device_type};
    tensor->data = (void *)(uintptr_t)integer_attribute(memory, names.ptr);
    tensor->device_id = (int32_t)(is_cupy ? integer_attribute(memory, names.device_id)
                                          : integer_attribute(object, names.cuda_index));
    bool is_valid =
        !PyErr_Occurred() && tensor->device_id >= 0 && read_layout(is_cupy ? object : memory, tensor, extents);
    if (is_valid && !is_cupy) { /* a view of cudakit, and the streams that use its memory */
        out->streams[0] = (word)integer_attribute(object, names.stream);
        out->streams[1] = (word)integer_attribute(object, names.allocation_stream);
        is_valid = !is_true(memory, names.read_only, false) && !PyErr_Occurred();
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

int read_operand(PyObject *object, bool is_output, operand *out, word *key, int word_count)
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
        if (api && ((is_output && is_true(object, names.requires_grad, false)) ||
                    (!is_contiguous(&tensor) && is_true(object, names.is_neg, true))))
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

bool find_stream(PyObject *object, const operand *first_array, handle *stream)
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
        handle_object = current_stream ? PyObject_GetAttr(current_stream, names.ptr) : NULL;
        Py_XDECREF(current_stream);
        Py_XDECREF(device_index);
    } else {
        PyObject *name = class->kind == 'c' ? names.ptr : names.cuda_stream;
        handle_object = PyLong_Check(object) ? Py_NewRef(object) : PyObject_GetAttr(object, name);
    }
    *stream = handle_object && PyLong_Check(handle_object) ? PyLong_AsVoidPtr(handle_object) : (handle)-1;
    Py_XDECREF(handle_object);
    *stream = *stream ? *stream : LEGACY_STREAM;
    bool is_valid = *stream != (handle)-1 && !PyErr_Occurred();
    PyErr_Clear();
    return is_valid;
}
