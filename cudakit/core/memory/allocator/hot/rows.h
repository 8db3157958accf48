/* The free blocks of one pool and stream (FreeBlocks of pools.py): lists of entries (size, address, block). */
#ifndef CUDAKIT_HOT_ROWS_H
#define CUDAKIT_HOT_ROWS_H

#include "slots.h"

/* What entries are sorted by. */
struct key {
    int64_t size, ptr;
};

/* Where an entry is, or is to be. */
struct spot {
    PyObject *part; /* a list; NULL for none */
    Py_ssize_t index;
};

/* Find the smallest block of at least a size, and return it, borrowed; NULL where there is none. */
PyObject *row_fit(PyObject *row, int64_t size, struct spot *spot);

/* Find a block; false where it is not there. */
bool row_find(PyObject *row, PyObject *block, struct key key, struct spot *spot);

/* Put an entry, which is taken, in place of those of up to two blocks, or of none; NULL takes them out only.
 *
 * False is MemoryError, or for Python to do: a part would become empty or too long. Nothing was changed then. */
bool row_exchange(PyObject *row, const struct spot leaving[2], struct key key, PyObject *entry);

#endif
