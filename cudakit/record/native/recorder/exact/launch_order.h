/* Determines whether a launch is ordered after all earlier work on the memory that it accesses. Callers hold the
 * recorder lock. */
#ifndef CK_LAUNCH_ORDER_H
#define CK_LAUNCH_ORDER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "exact/templates.h"
#include "model/allocations.h"

/* The memory that a launch may access. */
typedef struct {
    stream_operation operation;
    allocation *const *allocations; /* the allocations that the launch reaches */
    size_t allocation_count;
    const uint8_t
        *certainties;         /* lowest PRECISION_* of the pointers into each allocation; NULL: all are certain */
    const uint64_t *pointers; /* different pointers in the order of the arguments */
    launch_footprint
        footprint; /* the bytes that the launch is expected to access, because an earlier launch accessed them */
} launch_memory;

/* Return whether the next launch on a stream may be unordered with earlier work on its memory, or uses memory that
 * unordered work uses as well. ``stream`` is an id, or 0 if it is unknown. */
bool launch_may_share_memory(const launch_memory *memory, uint32_t stream);

/* Begin a launch, and return the order of the launch and earlier work on its memory. */
memory_order launch_begin_work(const launch_memory *memory);

/* Return whether some bytes of the footprint of a launch are contested (model/access_history.h). */
bool launch_has_contested_bytes(const launch_memory *memory);

/* Add the accesses of a launch to the accesses that later launches are compared with. */
void launch_add_accesses(const launch_memory *memory);

#endif
