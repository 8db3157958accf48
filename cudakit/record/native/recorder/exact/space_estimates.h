/* Estimates of the space that launches need in an arena. The recorder lock is held, unless a comment says otherwise. */
#ifndef CK_SPACE_ESTIMATES_H
#define CK_SPACE_ESTIMATES_H

#include <stdint.h>

#include "exact/arena.h"

/* Return the key of launches of one function, or of one executable graph, with the same number of threads. */
uint64_t space_signature(const void *function, uint64_t threads);

/* Return the space that a launch is expected to need: the maximum of the launches with this signature so far, or an
 * estimate from the number of threads if there were none. */
arena_space space_estimate(uint64_t signature, uint64_t threads);

/* Count the space that each launch in the copy of an arena used. ``launches`` is the number of launch indices. The reader
 * lock is held, but not the recorder lock, because an arena has up to 100,000 pages. */
void space_count_used(uint32_t launches, const arena_copy *copy);

/* Store the space that the launches in an arena needed, by their signatures, after space_count_used(). The reader lock
 * is held, too. */
void space_store_needed(const launch_arena *arena, const arena_copy *copy);

/* Forget all signatures. */
void space_clear(void);

#endif
