/* The two arenas of each context: which one launches use, and when the other can be read. */
#ifndef CK_POOL_H
#define CK_POOL_H

#include <stdbool.h>
#include <stdint.h>

#include "arenas.h"
#include "record.h"
#include "stores.h"

/* How far a stream is with what it has in an arena. */
typedef struct {
    Sanitizer_StreamHandle stream; /* NULL: it is gone */
    uint32_t enqueued, done;       /* launches; done: as far as the host has waited */
    uint32_t marker, marked;       /* the marker and what was enqueued before it; 0: none */
} stream_use;

typedef struct arena {
    arena_memory memory;
    bool retired; /* launches leave nothing more in it */
    bool spoiled;
    uint32_t used;     /* indices of launches that were given */
    uint32_t entering; /* launches that have an index and may not be in their stream yet */
    uint32_t markers;
    record *launches; /* by index: what their accesses are told like */
    size_t room;
    store_set stores;
    uint64_t large_pages; /* that launches of many threads may have taken */
    stream_use *uses;
    size_t use_count, use_room;
} arena;

#define ARENAS 2

typedef struct {
    CUcontext context;
    Sanitizer_StreamHandle stream; /* of our own */
    bool off;                      /* nothing can be recorded here */
    arena arenas[ARENAS];
    arena *current; /* NULL: none is free */
    uint32_t since_looked;
    int64_t looked_ns;
} pool;

/* The pool of a context, NULL where there is none. The lock is held. */
pool *pool_of(CUcontext context);

/* Make one where the patch is in a context. Calls CUDA: the lock is not held. */
pool *pool_open(CUcontext context);

/* What a stream has in an arena; NULL without memory. The lock is held. */
stream_use *pool_use(arena *of, Sanitizer_StreamHandle stream);

/* Look what can be read, and whether launches need another arena: they do when the host waits, and when pages
 * get scarce. Nothing is done while another thread does. Calls CUDA: the lock is not held. */
void pool_look(pool *of, bool host_waits);

/* See to it that a launch which may take so many pages finds them. Calls CUDA: the lock is not held. */
void pool_reserve(pool *of, uint64_t pages);

/* Mark how far a stream is before it goes. Calls CUDA: the lock is not held. */
void pool_mark(pool *of, Sanitizer_StreamHandle stream);

/* Wait for the launches in the arenas of a context, of all where it is NULL, and read them; ``gone``: then
 * free them. Calls CUDA: the lock is not held. */
void pool_finish(CUcontext context, bool gone);

/* Forget all of them. */
void pool_clear(void);

#endif
