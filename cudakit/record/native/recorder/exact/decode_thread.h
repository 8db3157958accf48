/* Converts copies of arenas to records, with --accesses auto in a thread of the recorder, so that the program does not
 * wait.
 *
 * At most one copy is converted at a time. The thread makes no CUDA calls. The functions may be called with the reader
 * lock held, but not with the recorder lock. */
#ifndef CK_DECODE_THREAD_H
#define CK_DECODE_THREAD_H

#include <stdbool.h>

#include "exact/arena_pool.h"

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

#endif
