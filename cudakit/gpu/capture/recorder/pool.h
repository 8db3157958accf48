/* The two arenas of each context: which one launches use, and when the other can be read. */
#ifndef CK_POOL_H
#define CK_POOL_H

#include <stdbool.h>
#include <stdint.h>

#include "arenas.h"
#include "record.h"
#include "stores.h"
#include "uses.h"

typedef struct arena {
    arena_memory memory;
    bool retired; /* launches leave nothing more in it */
    bool spoiled;
    uint32_t used;     /* indices of launches that were given */
    uint32_t entering; /* launches that have an index and may not be in their stream yet */
    record *launches;  /* by index: what their accesses are told like */
    size_t room;
    store_set stores;
    uint64_t expected; /* pages that launches may take, by the number of their threads */
    stream_uses uses;
} arena;

#define ARENAS 2

typedef struct {
    CUcontext context;             /* NULL: it is gone */
    Sanitizer_StreamHandle stream; /* of our own */
    CUstream own;                  /* the same */
    bool off;                      /* nothing can be recorded here */
    bool stuck;                    /* launches were held back in vain, and nothing was read since */
    arena arenas[ARENAS];
    arena *current; /* NULL: none is free. Changed with the lock held, by whoever looks */
    uint32_t since_looked;
    int64_t looked_ns, read_ns; /* when somebody looked, and when an arena was read */
} pool;

/* The pool of a context, NULL where there is none; of NULL, one whose context is gone. The lock is held. */
pool *pool_of(CUcontext context);

/* Whether a stream is the recorder's own. The lock is held. */
bool pool_owns(Sanitizer_StreamHandle stream);

/* Make one where the patch is in a context. Calls CUDA: the lock is not held. */
pool *pool_open(CUcontext context);

/* Look what can be read, and whether launches need another arena: they do when the host waits, and when pages
 * get scarce. Nothing is done while another thread does. Calls CUDA: the lock is not held. */
void pool_look(pool *of, bool host_waits);

/* See to it that a launch which may take so many pages, and needs so many indices, finds them. Calls CUDA: the
 * lock is not held. */
void pool_reserve(pool *of, uint64_t pages, uint64_t indices);

/* A stream will go: have it mark how far it is. Calls CUDA: the lock is not held. */
void pool_stream_gone(pool *of, Sanitizer_StreamHandle stream);

/* Wait for the launches in the arenas of a context that is about to go, and read them. NULL: of all of them, for
 * good, as the program ends. Calls CUDA: the lock is not held. */
void pool_finish(CUcontext context);

/* Wait for all launches up to now, and read them. Calls CUDA: the lock is not held. */
void pool_read(void);

/* Forget all of them. */
void pool_clear(void);

#endif
