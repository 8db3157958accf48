/* The two calls, as far as everything is usual. */
#ifndef CUDAKIT_HOT_CALLS_H
#define CUDAKIT_HOT_CALLS_H

#include "slots.h"

/* Streams that have another number than their handle (cudakit.gpu.api). */
enum { LEGACY = 1, PER_THREAD = 2 };

/* What the calls of one allocator need, of which nothing is ever another object. */
struct calls {
    PyObject_HEAD
    PyObject *alloc, *free; /* in Python: for whatever is not usual */
    PyObject *cache, *front, *guard, *late, *live, *unusual;
    PyObject *small, *large, *ledger;
    PyObject *block; /* one that is nowhere */
    PyTypeObject *tally_class; /* of pools that do not grow, which count what is split; of small, borrowed */
    Py_ssize_t most; /* of a bin of the front cache; 0 without one */
};

/* What an allocation is asked for: objects, and their numbers. */
struct request {
    PyObject *size_object, *stream_object;
    int64_t size, stream;
};

/* What is to be freed. */
struct release {
    PyObject *ptr;
    bool has_stream;
    int64_t stream;
};

/* Each returns a new reference where all was usual, which is then done. NULL is an exception, or for Python to
 * do: nothing was changed. */
PyObject *alloc_from_bin(struct calls *calls, const struct request *request);
PyObject *alloc_from_pool(struct calls *calls, const struct request *request);
PyObject *free_to_bin(struct calls *calls, const struct release *release);
PyObject *free_to_pool(struct calls *calls, const struct release *release);

#endif
