/* Accesses through tensor maps (TMA): decoding maps, the boxes that loads move, and the tensors that stores
 * write. */
#ifndef CK_TENSOR_MAPS_H
#define CK_TENSOR_MAPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "decode/pages.h"
#include "patch/arena.h"

/* --- maps ---------------------------------------------------------------------------------------- */

#define MAX_RANK 5

typedef struct {
    uint64_t address;
    uint64_t dims[MAX_RANK];    /* elements */
    uint64_t strides[MAX_RANK]; /* bytes from one element to the next; the first is the element size */
    uint32_t box[MAX_RANK];     /* elements, of which every ``steps``th is moved */
    uint32_t steps[MAX_RANK];
    unsigned rank, interleave;
} tensor_map;

/* The memory that a box at given coordinates covers: contiguous bytes in the first dimension, strided in the
 * others. Clipped to the tensor. */
typedef struct {
    uint64_t begin, bytes; /* bytes 0: empty */
    uint64_t strides[MAX_RANK];
    uint32_t counts[MAX_RANK];
} box_extent;

/* Decode a map as cuTensorMapEncodeTiled encodes it. False for unknown forms and elements smaller than a byte. */
bool tensor_map_of(const ck_u64 content[CK_MAP_WORDS], tensor_map *map);

/* Compute the memory that a box covers. False if that is not certain: interleaved layouts, steps that do not
 * divide the box or are in the first dimension (which the driver API documents as ignored), boxes larger than
 * shared memory, and invalid addresses. */
bool box_extent_of(const tensor_map *map, const int32_t at[MAX_RANK], box_extent *extent);

/* --- boxes --------------------------------------------------------------------------------------- */

/* Add the bytes that all boxes cover to ``into``, as if the kernel had accessed them one by one; ``into`` may
 * then have two pages of one key.
 *
 * The counts are those of the arena's header, which may exceed the arrays. Calls ``lost`` for each launch, maybe
 * more than once, of which a box cannot be expanded with certainty. False if out of memory. */
bool tma_boxes_expand(const ck_map *maps, size_t map_count, const ck_box *boxes, size_t box_count, page_set *into,
                      void (*lost)(void *context, uint32_t launch), void *context);

/* --- stores -------------------------------------------------------------------------------------- */

/* The Sanitizer API (13.5) reports loads through tensor maps, but declares the callback of stores only by name
 * and never calls it. The maps are among the parameters of a kernel: each map that the kernel does not load
 * through is taken to be one that it stores through, and its whole tensor as written. */

typedef struct {
    uint32_t launch;
    bool is_load; /* the launch loads through this map */
    ck_u64 content[CK_MAP_WORDS];
} tma_store;

typedef struct {
    tma_store *maps; /* ordered by launch after tma_stores_resolve */
    size_t count, capacity;
} tma_store_set;

/* Add the tensor maps among the parameters of a kernel; false if there are none, or memory is out. The lock is
 * held. */
struct kernel_layout;
bool tma_stores_add(tma_store_set *set, uint32_t launch, const struct kernel_layout *layout, void **parameters,
                    void **extra);

/* Find the maps that their launch loads through, and sort all by launch. False if out of memory. */
bool tma_stores_resolve(tma_store_set *set, const ck_map *maps, size_t map_count, const ck_box *boxes,
                        size_t box_count);

/* Pass the rows of a map's tensor to ``row``: ``count`` rows of ``bytes``, the first at ``lo``, each ``stride``
 * after the one before. */
void tma_store_rows(const tma_store *store,
                    void (*row)(void *context, uint64_t lo, uint64_t bytes, uint64_t stride, uint64_t count),
                    void *context);

#endif
