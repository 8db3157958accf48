#ifndef CUDAKIT_FAST_CALL_STREAM_CALL_H
#define CUDAKIT_FAST_CALL_STREAM_CALL_H

#include "shared.h"

extern PyTypeObject stream_call_type;

#endif
