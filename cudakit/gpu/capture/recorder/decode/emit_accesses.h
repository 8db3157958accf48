/* Writes the content of an arena to the trace: for each launch, ACCESS records and then one ACCESSED record. */
#ifndef CK_EMIT_ACCESSES_H
#define CK_EMIT_ACCESSES_H

#include "decode/tensor_maps.h"
#include "exact/arena_memory.h"
#include "write/record.h"

/* A launch that writes its accesses to an arena. */
typedef struct {
    record template_record; /* the common fields of its access records; kind 0: no launch has this index */
    bool is_incomplete;     /* the Sanitizer API does not report some of its accesses */
} arena_launch;

/* Write the accesses of the launches in an arena. ``launches`` has ``count`` elements, by launch index. With
 * ``attribution_lost``, accesses cannot be attributed to launches, and all launches are lost. The caller holds the
 * reader lock, but not the lock.
 *
 * If some accesses of a launch are missing, the others are written, but its ACCESSED record is not exact. */
void emit_accesses(arena_copy *copy, const arena_launch *launches, uint32_t count, tma_store_set *stores,
                   bool attribution_lost);

/* Write an ACCESSED record for a launch whose accesses are unknown. The lock is held. */
void emit_unknown_accesses(const record *launch_record);

#endif
