/* New arrays of cudakit, in memory that is allocated and freed in the order of a stream. */
#ifndef CUDAKIT_FAST_CALL_ARRAYS_H
#define CUDAKIT_FAST_CALL_ARRAYS_H

#include "shared.h"

/* Creates arrays of cudakit of fixed dtypes and shapes, in new memory, without Python code. */
typedef struct {
    PyObject_HEAD
    handle context;
    PyObject *array_class, *view_class; /* the Python classes DeviceArray and ArrayView */
    PyObject *layouts;                  /* tuple of layouts: each a tuple of LAYOUT_ITEMS items */
} ArrayFactory;

extern PyTypeObject stream_memory_type, array_factory_type;

/* Return a new reference to a tuple of new arrays, and store their addresses. Return NULL, possibly with an exception,
 * if there is no memory or the stream is captured. */
PyObject *new_arrays(const ArrayFactory *self, handle stream, word *addresses);

#endif
