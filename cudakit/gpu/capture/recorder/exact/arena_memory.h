/* Device memory of one arena, in the layout of patch/arena.h, and the progress of the streams that write to it.
 *
 * Functions of arenas call CUDA through the Sanitizer API only, which is allowed inside callbacks; the lock is
 * not held. Copies use a stream of the recorder's own, so that they wait for nothing of the program's.
 */
#ifndef CK_ARENA_MEMORY_H
#define CK_ARENA_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "decode/pages.h"
#include "hooks/sanitizer_api.h"
#include "patch/arena.h"

/* --- memory -------------------------------------------------------------------------------------- */

typedef struct {
    CUcontext context;
    Sanitizer_StreamHandle stream;     /* the recorder's own */
    void *allocated;                   /* NULL: none */
    uint64_t base_address, size_bytes; /* base: aligned as the user data of launches requires */
    unsigned entries_log2;
    uint32_t pages;
} arena_memory;

/* Words behind the header that streams set when they reach a marker. */
#define MAX_MARKERS ((CK_LOST_OFFSET - sizeof(ck_header)) / sizeof(uint32_t))
typedef union {
    ck_header header;
    struct {
        char unused[sizeof(ck_header)];
        uint32_t markers[MAX_MARKERS];
    };
} arena_top;

/* Host copy of an arena; its buffers are reused. */
typedef struct {
    arena_top top;
    uint32_t lost_bits[CK_MAX_LAUNCHES / 32]; /* one bit per launch with missing accesses */
    page_set pages;
    ck_map *maps;
    ck_box *boxes;
    size_t box_capacity;
} arena_copy;

/* Allocate and clear an arena with a quarter as many pages as entries. */
bool arena_create(arena_memory *arena, CUcontext context, Sanitizer_StreamHandle stream, unsigned entries_log2);
void arena_free(arena_memory *arena);

/* Copy the header and the markers to the host; copy the whole arena. False if a copy failed or memory is out. */
bool arena_copy_top(const arena_memory *arena, arena_top *top);
bool arena_copy_all(const arena_memory *arena, arena_copy *copy);

/* Clear the parts of the arena that launches wrote, as found in the copied header. */
bool arena_clear(const arena_memory *arena, const ck_header *copied_header);

/* Enqueue on ``stream`` the write of a marker. */
bool arena_enqueue_marker(const arena_memory *arena, uint32_t marker, Sanitizer_StreamHandle stream);

/* Return the size in bytes of an arena with 2^entries_log2 entries. */
uint64_t arena_bytes(unsigned entries_log2);

/* --- streams ------------------------------------------------------------------------------------- */

/* Progress of one stream with its launches in an arena. */
typedef struct {
    Sanitizer_StreamHandle stream;                 /* NULL: destroyed */
    uint64_t launching_thread;                     /* that made all launches, or SEVERAL_THREADS */
    uint32_t enqueued_launches, complete_launches; /* number of launches; done: those that the host waited for */
    uint32_t marker, marked_launches; /* number of the marker (0: none); value of ``enqueued`` at that time */
} arena_stream;

#define SEVERAL_THREADS UINT64_MAX

typedef struct {
    arena_stream *entries;
    size_t count, capacity;
    uint32_t marker_count; /* markers in use */
} arena_streams;

/* Return the entry of a stream, adding one if needed; NULL if out of memory. The lock is held. */
arena_stream *arena_streams_get(arena_streams *streams, Sanitizer_StreamHandle stream);

/* Count a launch of this thread that is now in a stream. The lock is held. */
void arena_streams_enqueued(arena_streams *streams, Sanitizer_StreamHandle stream);

/* This thread synchronised with a stream; NULL: with all. The lock is held. */
void arena_streams_synchronized(arena_streams *streams, Sanitizer_StreamHandle stream);

/* Forget the handle of a destroyed stream: it may be reused. The lock is held. */
void arena_streams_forget(arena_streams *streams, Sanitizer_StreamHandle stream);

/* Whether a stream (NULL: any) has launches that the host has not waited for. The lock is held. */
bool arena_streams_pending(const arena_streams *streams, Sanitizer_StreamHandle stream);

/* Whether all launches are complete, as known from waits and, if ``top`` is not NULL, from markers. */
bool arena_streams_complete(const arena_streams *streams, const arena_top *top);

/* Enqueue markers on the streams without a wait of the host, or on ``only`` one. Calls CUDA: the lock is not held,
 * the reader lock is. */
void arena_streams_mark(arena_streams *streams, const arena_memory *arena, Sanitizer_StreamHandle only_stream);

/* Synchronise with the streams without a marker; false if one cannot be synchronised with. Calls CUDA: the lock
 * is not held, the reader lock is. */
bool arena_streams_wait_unmarked(arena_streams *streams);

#endif
