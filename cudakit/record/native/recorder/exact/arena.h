/* The device memory of one arena, in the layout of patch/arena.h, the progress of the streams that write to it, and its
 * launches.
 *
 * The functions on arenas call CUDA through the Sanitizer API only, which is allowed inside callbacks. The caller
 * holds the reader lock, but not ``recorder_lock``. Copies use a stream of the recorder, so that they do not wait for
 * work of the program.
 */
#ifndef CK_EXACT_ARENA_H
#define CK_EXACT_ARENA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "decode/pages.h"
#include "decode/tensor_maps.h"
#include "exact/templates.h"
#include "patch/arena.h"
#include "vendor/sanitizer_api.h"
#include "write/record.h"

/* --- memory -------------------------------------------------------------------------------------- */

typedef struct {
    CUcontext context;
    Sanitizer_StreamHandle stream; /* stream of the recorder, for copies and memsets */

    void *device_memory; /* device pointer; NULL if no memory is allocated */

    uint64_t base_address, size_bytes; /* base_address: ``device_memory``, rounded up to CK_ALIGNMENT */
    unsigned entries_log2;             /* log2 of the number of hash table entries */
    uint32_t page_count;               /* number of pages of the arena */
} arena_memory;

/* Markers: words behind the header, each of which a stream sets to 1 when it has completed its launches so far. */
#define MAX_MARKERS ((CK_LOST_OFFSET - sizeof(ck_header)) / sizeof(uint32_t))
typedef union {
    ck_header header;
    struct {
        char unused[sizeof(ck_header)];
        uint32_t markers[MAX_MARKERS];
    };
} arena_top;

/* Host copy of an arena. Its buffers are reused for the next arena. */
typedef struct {
    arena_top top;
    uint32_t
        lost_bits[CK_MAX_LAUNCHES / 32]; /* a bit per launch index, set if accesses of the launch are missing */
    page_set pages;
    ck_map *maps;
    ck_box *boxes;
    size_t box_capacity;
} arena_copy;

/* Allocate and clear an arena with 2^entries_log2 entries and a quarter as many pages. Return false if no memory is
 * left. */
bool arena_create(arena_memory *arena, CUcontext context, Sanitizer_StreamHandle stream, unsigned entries_log2);
void arena_free(arena_memory *arena);

/* Copy the header and the markers, or the whole arena, to the host. Return false if a copy fails or no memory is
 * left. */
bool arena_copy_top(const arena_memory *arena, arena_top *top);
bool arena_copy_all(const arena_memory *arena, arena_copy *copy);

/* Clear the parts of an arena that launches have used, as the copied header shows. Return false on failure. */
bool arena_clear(const arena_memory *arena, const ck_header *copied_header);

/* Enqueue a memset that sets a marker on ``stream``. Return false on failure. */
bool arena_enqueue_marker(const arena_memory *arena, uint32_t marker, Sanitizer_StreamHandle stream);

/* Return the size in bytes of an arena with 2^entries_log2 entries. */
uint64_t arena_bytes(unsigned entries_log2);

/* --- streams ------------------------------------------------------------------------------------- */

/* The launches of one stream in an arena, and how many of them are known to be complete. */
typedef struct {
    Sanitizer_StreamHandle stream; /* NULL after the stream was destroyed */
    uint64_t launching_thread;     /* id of the only thread that launched, or SEVERAL_THREADS */
    uint32_t enqueued_launch_count, complete_launch_count; /* complete: the host has waited for the launch */
    uint32_t marker_index;                                 /* index of the stream's marker */
    uint32_t marked_launch_count; /* number of launches before the marker; 0 if there is no marker */
} arena_stream;

#define SEVERAL_THREADS UINT64_MAX

typedef struct {
    arena_stream *streams;
    size_t stream_count, stream_capacity;
    uint32_t marker_count; /* number of markers in use */
} arena_streams;

/* Return the state of a stream in an arena; a new stream has no launches. Return NULL if no memory is left. The
 * recorder lock is held. */
arena_stream *arena_streams_get(arena_streams *streams, Sanitizer_StreamHandle stream);

/* Count a launch that this thread has enqueued on a stream. The recorder lock is held. */
void arena_streams_count_launch(arena_streams *streams, Sanitizer_StreamHandle stream);

/* Mark the launches of this thread on a stream as complete, after a synchronization. If ``stream`` is NULL, do so for
 * all streams. The recorder lock is held. */
void arena_streams_mark_complete(arena_streams *streams, Sanitizer_StreamHandle stream);

/* Forget the handle of a destroyed stream: the driver may reuse it. The recorder lock is held. */
void arena_streams_forget(arena_streams *streams, Sanitizer_StreamHandle stream);

/* Return whether a stream has launches that the host has not waited for. If ``stream`` is NULL, consider all streams.
 * The recorder lock is held. */
bool arena_streams_have_pending(const arena_streams *streams, Sanitizer_StreamHandle stream);

/* Return whether all launches are known to be complete: by waits of the host and, unless ``top`` is NULL, by markers.
 * Takes the recorder lock. */
bool arena_streams_are_complete(const arena_streams *streams, const arena_top *top);

/* Enqueue a marker on each stream that the host has not waited for; if ``only_stream`` is not NULL, only on that
 * stream. Calls CUDA: the caller holds the reader lock, but not ``recorder_lock``. */
void arena_streams_enqueue_markers(arena_streams *streams, const arena_memory *arena,
                                   Sanitizer_StreamHandle only_stream);

/* Wait for all streams that have no marker. Return false if a synchronization fails. Calls CUDA: the caller holds the
 * reader lock, but not ``recorder_lock``. */
bool arena_streams_synchronize_unmarked(arena_streams *streams);

/* --- launches ------------------------------------------------------------------------------------ */

/* The memory that a launch reaches, and its pointers: consecutive elements of the arena's ``reached_ranges`` and
 * ``pointers``. */
typedef struct {
    uint32_t first_range, range_count, first_pointer, pointer_count;
} reached_memory;

/* A launch that writes its accesses to an arena. */
typedef struct {
    record template_record; /* common fields of the launch's access records; kind 0: no launch has this index */
    bool is_incomplete;     /* the Sanitizer API does not report some accesses of the launch */
} arena_launch;

/* The launch indices of one driver call: the index of one kernel, or the indices of the kernels of a graph. */
typedef struct {
    uint32_t first_launch_index, launch_index_count; /* first launch index, and number of launch indices */
    uint64_t space_signature;       /* key of the estimate of the arena space that the launches need */
    uint32_t expected_launch_count; /* number of kernels that were expected to launch */
    launch_signature signature;     /* signature by which the accesses are compared */
    reached_memory reached_memory;
} launch_group;

/* Amount of space in an arena. */
typedef struct {
    uint64_t pages, boxes, launch_indices; /* numbers of pages, of boxes and of launch indices */
} arena_space;

typedef struct launch_arena {
    arena_memory memory;
    bool is_retired;                /* new launches no longer write to this arena */
    bool is_attribution_lost;       /* accesses can no longer be attributed to launches */
    uint32_t launch_count;          /* number of assigned launch indices */
    uint32_t entering_launch_count; /* number of launches that have an index but may not be enqueued yet */
    arena_launch *launches;         /* launches by launch index */
    launch_group *groups;           /* all launch indices, grouped by call */
    size_t launch_capacity, group_count, group_capacity;
    reached_range *reached_ranges; /* allocations that the launches reach */
    size_t reached_range_count, reached_range_capacity;
    uint64_t *pointers; /* pointers among the arguments of the launches */
    size_t pointer_count, pointer_capacity;
    tma_store_set tma_stores; /* tensor maps through which launches may store */
    arena_space
        expected_space; /* space that the launches so far are expected to need; its launch_indices are unused */
    arena_streams streams;
} launch_arena;

#endif
