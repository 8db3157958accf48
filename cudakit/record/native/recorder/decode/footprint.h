/* The memory accessed by the launches to which a template applies (templates.h), as a small number of byte ranges
 * relative to the pointers of the launch. The ranges may contain bytes that are not accessed. */
#ifndef CK_FOOTPRINT_H
#define CK_FOOTPRINT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The bytes from ``begin`` up to ``end``, relative to the pointer with this index among the arguments of the launch. */
typedef struct {
    uint64_t begin, end;
    uint32_t pointer_index; /* NO_POINTER: ``begin`` and ``end`` are addresses */
    bool is_write;
} footprint_range;

#define NO_POINTER UINT32_MAX

/* Maximum number of ranges. */
#define FOOTPRINT_CAPACITY 2048

typedef struct {
    bool has_gaps; /* whether there may be bytes in the ranges that are not accessed */
    size_t range_count;
    bool is_incomplete; /* whether ranges are missing, because there were too many */
    footprint_range ranges[FOOTPRINT_CAPACITY];
} footprint;

/* Add a range to a footprint. */
void footprint_add(footprint *accesses, footprint_range range);

/* Return whether the reads and the writes through each pointer are contiguous from the pointer on. */
bool footprint_is_contiguous(const footprint *accesses);

/* Join ranges of the same pointer, those with the smallest gaps first, until few ranges remain. */
void footprint_simplify(footprint *accesses);

#endif
