/* One arena: device memory for what launches access, as the patch lays it out (../patch/arena.h).
 *
 * All of this calls CUDA, by the Sanitizer API alone, which may be called within a callback: the lock is not
 * held. Copies go through a stream of the recorder's own, so that they wait for nothing of the program's.
 */
#ifndef CK_ARENAS_H
#define CK_ARENAS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../patch/arena.h"
#include "boxes.h"
#include "sanitizer_api.h"

typedef struct {
    CUcontext context;
    Sanitizer_StreamHandle stream; /* the recorder's own */
    void *allocated;               /* NULL: there is none */
    uint64_t base, size_bytes;     /* base: aligned, as the user data of launches needs it */
    unsigned entries_log2;
    uint32_t pages;
} arena_memory;

/* Behind the header there is room for words that streams set when they have come so far. */
#define MAX_MARKERS ((CK_LOST_AT - sizeof(ck_header)) / sizeof(uint32_t))
typedef union {
    ck_header header;
    struct {
        char unused[sizeof(ck_header)];
        uint32_t markers[MAX_MARKERS];
    };
} arena_top;

/* What was copied to the host; its memory is used again and again. */
typedef struct {
    arena_top top;
    uint32_t lost[CK_MAX_LAUNCHES / 32]; /* a bit for each launch of which something is missing */
    page_set pages;
    ck_map *maps;
    ck_box *boxes;
    size_t box_room;
} arena_copy;

/* Allocate and clear an arena with room for a quarter as many pages as it has entries. */
bool arena_make(arena_memory *made, CUcontext context, Sanitizer_StreamHandle stream, unsigned entries_log2);
void arena_free(arena_memory *arena);

/* Copy the header and the markers; copy everything. False where a copy failed or memory is out. */
bool arena_look(const arena_memory *arena, arena_top *into);
bool arena_fetch(const arena_memory *arena, arena_copy *into);

/* Clear what launches have left, of which the header was fetched. */
bool arena_clear(const arena_memory *arena, const ck_header *used);

/* Have a stream set a marker when it has come so far. */
bool arena_mark(const arena_memory *arena, uint32_t marker, Sanitizer_StreamHandle stream);

/* Bytes that an arena of so many entries takes. */
uint64_t arena_bytes(unsigned entries_log2);

#endif
