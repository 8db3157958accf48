/* How far streams are with the launches that have their place in an arena. */
#ifndef CK_USES_H
#define CK_USES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "arenas.h"

typedef struct {
    Sanitizer_StreamHandle stream; /* NULL: it is gone */
    uint64_t thread;               /* that launched all of it, or SEVERAL_THREADS */
    uint32_t enqueued, done;       /* launches; done: as far as the host has waited */
    uint32_t marker, marked;       /* the marker, and what was enqueued before it; 0: none */
} stream_use;

#define SEVERAL_THREADS UINT64_MAX

typedef struct {
    stream_use *all;
    size_t count, room;
    uint32_t markers; /* that were given */
} stream_uses;

/* What a stream has here; NULL without memory. The lock is held. */
stream_use *uses_of(stream_uses *uses, Sanitizer_StreamHandle stream);

/* A launch of this thread is in a stream. The lock is held. */
void uses_enqueued(stream_uses *uses, Sanitizer_StreamHandle stream);

/* This thread has waited for a stream, NULL: for all of them. The lock is held. */
void uses_waited(stream_uses *uses, Sanitizer_StreamHandle stream);

/* A stream is gone, and its handle may come again. The lock is held. */
void uses_forget(stream_uses *uses, Sanitizer_StreamHandle stream);

/* Whether a stream, NULL: any, has something here that the host has not waited for. The lock is held. */
bool uses_wait_for(const stream_uses *uses, Sanitizer_StreamHandle stream);

/* Whether everything is complete, as far as is known from waits and, if not NULL, from markers. */
bool uses_are_done(const stream_uses *uses, const arena_top *top);

/* Have the streams that nobody waited for, or only this one, say when they have come so far. Calls CUDA: the
 * lock is not held, and one thread at a time does this. */
void uses_mark(stream_uses *uses, const arena_memory *in, Sanitizer_StreamHandle only);

/* Wait for the streams that could not be marked; false where one cannot be waited for. Calls CUDA, as above. */
bool uses_wait(stream_uses *uses);

#endif
