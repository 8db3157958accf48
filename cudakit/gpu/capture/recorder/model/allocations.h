/* Live memory: looks up the allocation that contains an address. The lock is held in all calls. */
#ifndef CK_ALLOCATIONS_H
#define CK_ALLOCATIONS_H

#include <stdint.h>

typedef struct {
    uint64_t lo, hi;
    uint8_t how;
} allocation;

/* Add an allocation; return -1 if out of memory. Allocations that it overlaps are removed: their free was not
 * seen. */
int allocations_add(uint64_t address, uint64_t size_bytes, uint8_t how);

/* Remove the allocation that starts at an address and copy it to ``removed``; return 0 if there is none. */
int allocations_remove(uint64_t address, allocation *removed);

/* Return the allocation that contains an address, or NULL. */
const allocation *allocations_find(uint64_t address);

/* Return the number of allocated bytes of device memory. */
uint64_t allocations_device_bytes(void);

void allocations_clear(void);

#endif
