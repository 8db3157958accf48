/* What a pool is made of: a stream, and device memory for its arenas. Calls CUDA: the lock is not held. */
#ifndef CK_SUPPLY_H
#define CK_SUPPLY_H

#include "pool.h"

/* A stream of the recorder's own in the current context; NULL where there is none to be had. */
Sanitizer_StreamHandle supply_stream(CUcontext context, CUstream *stream);

/* See to it that an arena which nobody uses has memory, as much as is wanted now; false where it has none. */
bool supply_memory(const pool *of, arena *unused);

/* Give all of that back; the stream only where it is asked for: it goes with its context. */
void supply_end(pool *of, bool stream);

#endif
