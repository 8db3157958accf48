/* The arguments of a call: numbers, and arrays of any library, read through DLPack or attributes. */
#ifndef CUDAKIT_FAST_CALL_OPERANDS_H
#define CUDAKIT_FAST_CALL_OPERANDS_H

#include "shared.h"

enum {
    MAX_KEY_WORDS = 128,
    ALIGNMENT = 16 /* remainders of addresses modulo this number are part of a key */
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

extern PyObject *dtype_codes; /* dict of numpy dtypes and names of dtypes: code of DLPack + 256 * bits */

/* Return the entry of a class in the table of classes, or NULL. */
array_class *find_class(PyTypeObject *type);

/* Add a class to the table of classes, which keeps the class alive. Return NULL if the table is full. */
array_class *add_class(PyTypeObject *type);

/* Return whether a Boolean attribute of an object is true, after a call if it is a method. */
bool is_true(PyObject *object, PyObject *name, bool is_method);

/* Return an integer attribute of an object, or -1 with an exception. */
int64_t integer_attribute(PyObject *object, PyObject *name);

/* Read an argument into an operand, and append its properties to a key. Return the number of words, or -1 for arguments
 * that only the method _call can handle. */
int read_operand(PyObject *object, bool is_output, operand *out, word *key, int word_count);

/* Find the handle of a call's stream: by default the current stream of the first array's library. The stream may be an
 * int, a stream of CuPy for an array of CuPy, or an object with the attribute cuda_stream. Return false for others. */
bool find_stream(PyObject *object, const operand *first_array, handle *stream);

#endif
