/* What all parts share: the functions of the driver, and names of attributes. */
#ifndef CUDAKIT_FAST_CALL_SHARED_H
#define CUDAKIT_FAST_CALL_SHARED_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>

typedef uint64_t word;
typedef void *handle; /* CUcontext, CUfunction, CUstream */

/* CU_STREAM_LEGACY. The default stream always has this handle here, so that its scratch memory is found. */
#define LEGACY_STREAM ((handle)1)

enum { MAX_OPERANDS = 16 };

typedef struct {
    int (*launch)(handle function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                  unsigned shared_bytes, handle stream, void **parameters, void **extra);
    int (*get_context)(handle *context);
    int (*push_context)(handle context);
    int (*pop_context)(handle *context);
    int (*is_capturing)(handle stream, int *status);
    int (*allocate)(word *address, size_t size_bytes, handle stream);
    int (*free)(word address, handle stream);
} driver_functions;

extern driver_functions driver;
extern int accepted_device_type; /* of DLPack: kDLCUDA by default */

/* Interned strings, which the module makes. */
typedef struct {
    PyObject *call, *out, *stream, *api, *requires_grad, *is_neg, *cuda_stream, *allocation_stream, *view, *ptr,
        *dtype, *shape, *strides, *read_only, *cuda_index, *data, *device_id, *gpu, *memory, *other_streams;
} attribute_names;

extern attribute_names names;

/* Make a context current. Return false after an error; set `was_current` if the context already was current. */
bool enter_context(handle context, bool *was_current);

/* Restore the context that was current before enter_context(). */
void leave_context(bool was_current);

#endif
