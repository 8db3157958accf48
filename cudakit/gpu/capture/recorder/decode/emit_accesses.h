/* Writes the content of an arena to the trace: the accesses of each launch, then ACCESSED, which ends them. */
#ifndef CK_EMIT_ACCESSES_H
#define CK_EMIT_ACCESSES_H

#include "decode/tensor_maps.h"
#include "exact/arena_memory.h"
#include "write/record.h"

/* A launch that writes its accesses to an arena. */
typedef struct {
    record template_record; /* access records are based on it; kind 0: no launch has this index */
    bool is_incomplete;     /* some of its accesses are not reported to the patch */
} arena_launch;

/* Write the accesses of launches, which are in the order of their index in the arena. ``attribution_lost``: accesses
 * cannot be attributed to launches. The lock is not held.
 *
 * A launch that lost accesses, or is incomplete, keeps those that were recorded, but is not exact. */
void emit_accesses(arena_copy *copy, const arena_launch *launches, uint32_t count, tma_store_set *stores,
                   bool attribution_lost);

/* Write that the accesses of a launch are unknown. The lock is held. */
void emit_unknown_accesses(const record *launch_record);

#endif
