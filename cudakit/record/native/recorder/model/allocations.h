/* Live allocations: look up the allocation that contains an address. Callers hold the recorder lock. */
#ifndef CK_ALLOCATIONS_H
#define CK_ALLOCATIONS_H

#include <stdbool.h>
#include <stdint.h>

#include "model/access_history.h"

typedef struct {
    uint64_t lo, hi;             /* first address, and first address behind the end */
    uint8_t memory_kind;         /* ALLOCATION_*: the kind of memory */
    uint32_t last_launch_number; /* number of the last launch whose arguments reach the allocation */
    uint32_t index_in_launch;    /* index of the allocation among those that this launch reaches */

    stream_operation last_work; /* the last operation that may access the allocation */
    access_history
        *history;      /* earlier accesses by byte range, if unordered operations may access the allocation */
    bool is_accessed;  /* the current launch may access the allocation */
    bool is_contested; /* the order of some operations on the allocation is unknown */
} allocation;

/* Add an allocation. Return 0, or -1 if no memory is left. Allocations that it overlaps are removed: their free was
 * not recorded. */
int allocations_add(uint64_t address, uint64_t size_bytes, uint8_t memory_kind);

/* Remove the allocation that starts at an address and copy it to ``removed``; return 0 if there is none. */
int allocations_remove(uint64_t address, allocation *removed);

/* Return the allocation that contains an address, or NULL. */
allocation *allocations_find(uint64_t address);

/* Begin an operation that may access an allocation. If the last operation on the allocation does not happen before the
 * new operation, accesses to the allocation are tracked by byte range until it is freed. */
void allocation_begin_work(allocation *accessed, stream_operation operation);

/* Return whether an access to the bytes from ``lo`` up to ``hi`` is ordered after all earlier accesses that it
 * conflicts with, and none of these bytes are contested. The bytes may be in several allocations. */
bool allocations_are_ordered(uint64_t lo, uint64_t hi, byte_access access);

/* Return whether some of the bytes from ``lo`` up to ``hi`` are contested (access_history.h). */
bool allocations_have_contested_bytes(uint64_t lo, uint64_t hi);

/* Set ``is_accessed`` of the allocations that have bytes from ``lo`` up to ``hi``. */
void allocations_mark_accessed(uint64_t lo, uint64_t hi);

/* Add an access to the bytes from ``lo`` up to ``hi`` of those allocations whose accesses are tracked by byte range. */
void allocations_add_tracked_access(uint64_t lo, uint64_t hi, byte_access access);

/* Add an access to some bytes of an allocation. */
void allocation_add_access(allocation *accessed, uint64_t lo, uint64_t hi, byte_access access);

/* Add an operation that may access the allocation that contains an address, if there is one. */
void allocations_add_work(uint64_t address, stream_operation operation);

/* Add an operation that accesses the bytes from ``lo`` up to ``hi``. */
void allocations_add_access(uint64_t lo, uint64_t hi, bool is_write, stream_operation operation);

/* Mark the allocations that have bytes from ``begin`` up to ``end`` as contested. */
void allocations_mark_contested(uint64_t begin, uint64_t end);

/* Return the number of allocations and frees so far. Pointers to allocations are valid while it does not change. */
uint32_t allocations_change_count(void);

/* Return the number of allocated bytes of device memory. */
uint64_t allocations_device_bytes(void);

void allocations_clear(void);

#endif
