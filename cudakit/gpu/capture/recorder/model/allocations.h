/* Live allocations: look up the allocation that contains an address. Callers hold the lock. */
#ifndef CK_ALLOCATIONS_H
#define CK_ALLOCATIONS_H

#include <stdint.h>

typedef struct {
    uint64_t lo, hi;     /* first address, and first address behind the end */
    uint8_t memory_kind; /* ALLOCATION_*: the kind of memory */
} allocation;

/* Add an allocation. Return 0, or -1 if no memory is left. Allocations that it overlaps are removed: their free was
 * not recorded. */
int allocations_add(uint64_t address, uint64_t size_bytes, uint8_t memory_kind);

/* Remove the allocation that starts at an address and copy it to ``removed``; return 0 if there is none. */
int allocations_remove(uint64_t address, allocation *removed);

/* Return the allocation that contains an address, or NULL. */
const allocation *allocations_find(uint64_t address);

/* Return the number of allocated bytes of device memory. */
uint64_t allocations_device_bytes(void);

void allocations_clear(void);

#endif
