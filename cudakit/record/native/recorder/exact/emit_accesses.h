/* Writes the content of arenas to the trace: for each launch, ACCESS records and then one ACCESSED record.
 *
 * With --accesses auto, a thread of the recorder does it, so that the program does not wait. At most one copy of an arena
 * is converted at a time. The thread makes no CUDA calls. The functions may be called with the reader lock held, but not
 * with the recorder lock, unless their comments say so. */
#ifndef CK_EMIT_ACCESSES_H
#define CK_EMIT_ACCESSES_H

#include <stdbool.h>

#include "exact/arena.h"
#include "write/record.h"

/* A copy of an arena, and the launches that wrote to the arena. */
typedef struct {
    arena_copy copy;
    launch_arena launches;    /* only the lists of launches are used */
    bool is_attribution_lost; /* accesses cannot be attributed to launches */
} decode_job;

/* Return the job for the next copy. If the last copy is still being converted, return NULL, or wait if ``must_wait`` is
 * true. */
decode_job *decode_acquire(bool must_wait);

/* Convert the copy of an acquired job: in the decode thread, or, if ``must_wait`` is true, before this function
 * returns. */
void decode_submit(decode_job *job, bool must_wait);

/* Wait until the decode thread has converted the last copy of an arena. */
void decode_wait(void);

/* Forget the decode thread and its job, in the child of a fork. */
void decode_clear(void);

/* Write an ACCESSED record for a launch whose accesses are unknown. The recorder lock is held. */
void emit_unknown_accesses(const record *launch_record);

#endif
