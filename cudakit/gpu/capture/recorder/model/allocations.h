/* Live allocations: look up the allocation that contains an address. Callers hold the lock. */
#ifndef CK_ALLOCATIONS_H
#define CK_ALLOCATIONS_H

#include <stdbool.h>
#include <stdint.h>

#include "model/stream_order.h"

typedef struct {
    uint64_t lo, hi;     /* first address, and first address behind the end */
    uint8_t memory_kind; /* ALLOCATION_*: the kind of memory */

    stream_operation last_work; /* the last operation that may access the allocation */
    bool is_contested;          /* operations that are not ordered may access the allocation */
} allocation;

/* Add an allocation. Return 0, or -1 if no memory is left. Allocations that it overlaps are removed: their free was
 * not recorded. */
int allocations_add(uint64_t address, uint64_t size_bytes, uint8_t memory_kind);

/* Remove the allocation that starts at an address and copy it to ``removed``; return 0 if there is none. */
int allocations_remove(uint64_t address, allocation *removed);

/* Return the allocation that contains an address, or NULL. */
allocation *allocations_find(uint64_t address);

/* Add an operation that may access an allocation. The allocation becomes contested, for as long as it lives, if its
 * last operation does not happen before this one. */
void allocation_add_work(allocation *accessed, stream_operation operation);

/* Add an operation that may access the allocation that contains an address, if there is one. */
void allocations_add_work(uint64_t address, stream_operation operation);

/* Mark the allocations that have bytes from ``begin`` up to ``end`` as contested. */
void allocations_mark_contested(uint64_t begin, uint64_t end);

/* Return the number of allocated bytes of device memory. */
uint64_t allocations_device_bytes(void);

void allocations_clear(void);

#endif
