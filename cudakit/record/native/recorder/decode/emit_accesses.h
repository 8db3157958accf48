/* Writes the content of an arena to the trace: for each launch, ACCESS records and then one ACCESSED record. */
#ifndef CK_EMIT_ACCESSES_H
#define CK_EMIT_ACCESSES_H

#include "decode/access_digest.h"
#include "decode/tensor_maps.h"
#include "exact/arena_memory.h"
#include "recorder.h"
#include "write/record.h"

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

/* The launches of an arena. */
typedef struct {
    const arena_launch *launches; /* indexed by launch index */
    uint32_t launch_count;
    const launch_group *groups; /* all launch indices, grouped by driver call, in order */
    size_t group_count;
    const reached_range *reached_ranges;
    const uint64_t *pointers;
} arena_launches;

/* Write the accesses of the launches in an arena, and compare them with templates. With ``attribution_lost``,
 * accesses cannot be attributed to launches, and all launches are lost. The caller holds the reader lock, but not
 * ``recorder_lock``.
 *
 * If some accesses of a launch are missing, the others are written, but its ACCESSED record is not exact. */
void emit_accesses(arena_copy *copy, const arena_launches *arena, tma_store_set *stores, bool attribution_lost);

/* Write an ACCESSED record for a launch whose accesses are unknown. The recorder lock is held. */
void emit_unknown_accesses(const record *launch_record);

#endif
