/* The memory that is live: who looks up a pointer finds the allocation that it lies in. */
#ifndef CK_ALLOCATIONS_H
#define CK_ALLOCATIONS_H

#include <stdint.h>

typedef struct {
    uint64_t lo, hi;
    uint8_t how;
} allocation;

/* Remember an allocation; -1 where memory is out. What it overlaps is forgotten: it was freed unseen. */
int allocations_add(uint64_t address, uint64_t size_bytes, uint8_t how);

/* Forget the allocation at an address; 0 where there is none, else what it was. */
int allocations_remove(uint64_t address, allocation *was);

/* Find the allocation that an address lies in, NULL where there is none. */
const allocation *allocations_find(uint64_t address);

/* Bytes of the devices' memory that are allocated. */
uint64_t allocations_device_bytes(void);

void allocations_clear(void);

#endif
