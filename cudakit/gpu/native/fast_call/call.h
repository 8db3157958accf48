#ifndef CUDAKIT_FAST_CALL_CALL_H
#define CUDAKIT_FAST_CALL_CALL_H

#include "plans.h"

/* Perform a call of a FastCall object: launch a prepared plan, or call the method _call. */
PyObject *call_object(PyObject *object, PyObject *const *args, size_t flags, PyObject *keyword_names);

#endif
