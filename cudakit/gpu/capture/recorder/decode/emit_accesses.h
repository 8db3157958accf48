/* Writes the content of an arena to the trace: the accesses of each launch, then ACCESSED, which ends them. */
#ifndef CK_EMIT_ACCESSES_H
#define CK_EMIT_ACCESSES_H

#include "decode/tensor_maps.h"
#include "exact/arena_memory.h"
#include "write/record.h"

/* Write the accesses of launches. ``launches``: by index in the arena, the records that access records are based
 * on; kind 0: no launch has this index. ``attribution_lost``: accesses cannot be attributed to launches. The lock is not
 * held. */
void emit_accesses(arena_copy *copy, const record *launches, uint32_t count, tma_store_set *stores,
                   bool attribution_lost);

/* Write that the accesses of a launch are unknown. The lock is held. */
void emit_unknown_accesses(const record *launch_record);

#endif
