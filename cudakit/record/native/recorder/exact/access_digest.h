/* A digest of the bytes that a launch accesses, relative to its pointers, by which launches are compared.
 *
 * Each byte belongs to the nearest pointer at or below it. The digests of two launches are equal if they access the
 * same bytes relative to their pointers, however these bytes are divided into ranges. Callers hold the reader lock. */
#ifndef CK_ACCESS_DIGEST_H
#define CK_ACCESS_DIGEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "model/kernels.h"

/* --- footprints ---------------------------------------------------------------------------------- */

/* The memory accessed by the launches to which a template applies (templates.h), as a small number of byte ranges
 * relative to the pointers of the launch. The ranges may contain bytes that are not accessed. */

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

/* --- digests ------------------------------------------------------------------------------------- */

/* An allocation that a launch reaches, from its first address up to its end. */
typedef struct {
    uint64_t lo, hi;
} reached_range;

/* A pointer among the arguments of a launch; ``index`` is its position among them. */
typedef struct {
    uint64_t address;
    uint32_t index;
} indexed_pointer;

typedef struct {
    uint64_t hash;       /* hash of the bytes */
    size_t range_count;  /* number of ranges; ranges are divided at the pointers that they contain */
    bool is_inside;      /* whether the launch reaches all bytes, through a pointer into the same allocation */
    footprint footprint; /* the accessed bytes as a small number of ranges */
    indexed_pointer pointers[MAX_ACCESSES]; /* sorted by address */
    size_t pointer_count;
    const reached_range *reached; /* the allocations that the launch reaches */
    size_t reached_count;
    size_t reached_index; /* index of the reached allocation that was found last */
} access_digest;

/* Begin the digest of a launch with these pointers, which reaches these allocations; a launch without pointers is
 * compared by addresses. */
void digest_begin(access_digest *digest, const uint64_t *pointers, size_t pointer_count,
                  const reached_range *reached, size_t reached_count);

/* Add ``count`` pieces of ``bytes`` bytes, the first at ``lo`` and each next one ``stride`` bytes later, that a kernel
 * accessed in this mode; ``node`` is its node in a graph, or 0. Allocations that the launch does not reach become
 * contested (model/access_history.h), because the order of this launch with other work on them is unknown. Takes
 * the recorder lock. */
void digest_add(access_digest *digest, uint32_t node, uint32_t mode, uint64_t lo, uint64_t bytes, uint64_t stride,
                uint64_t count);

#endif
