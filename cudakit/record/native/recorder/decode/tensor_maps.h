/* Accesses through tensor maps (TMA): decodes tensor maps, and computes the memory that loads and stores access. */
#ifndef CK_TENSOR_MAPS_H
#define CK_TENSOR_MAPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "decode/pages.h"
#include "patch/arena.h"

/* --- maps ---------------------------------------------------------------------------------------- */

#define MAX_RANK 5
#define MAX_SPATIAL_RANK (MAX_RANK - 2)

typedef struct {
    uint64_t address;
    uint64_t dims[MAX_RANK];    /* size of each dimension in elements */
    uint64_t strides[MAX_RANK]; /* distance of elements in bytes; strides[0] is the size of an element */
    uint32_t box[MAX_RANK];     /* size of a box in elements, of which every ``element_strides``th is moved */
    uint32_t element_strides[MAX_RANK];
    unsigned rank, interleave;
    bool
        is_im2col; /* im2col mode: dimension 0 is the channel, the last dimension the batch, the others are spatial */
    int32_t lower_corner[MAX_SPATIAL_RANK],
        upper_corner[MAX_SPATIAL_RANK]; /* corners of the im2col bounding box */
    uint32_t pixels_per_load; /* number of pixels that an im2col load reads, with ``box[0]`` channels of each */
} tensor_map;

/* The memory that a box covers, clipped to the tensor: contiguous bytes in the first dimension, strided in the other
 * dimensions. */
typedef struct {
    uint64_t begin, bytes; /* first address; bytes in the first dimension, 0 if the box is empty */
    uint64_t strides[MAX_RANK];
    uint32_t element_counts[MAX_RANK];
} box_extent;

/* Decode a tensor map that cuTensorMapEncodeTiled or cuTensorMapEncodeIm2col has encoded. Return false if the
 * encoding is unknown or the elements are smaller than a byte. */
bool tensor_map_decode(const ck_u64 content[CK_MAP_WORDS], tensor_map *map);

/* Compute the end address of the tensor; false on overflow. */
bool tensor_map_end(const tensor_map *map, uint64_t *end);

/* Compute the memory that the box at these coordinates covers. Return false if the result would not be certain: for
 * interleaved layouts, an element stride in the first dimension (which the driver API documents as ignored), boxes
 * larger than shared memory, and invalid addresses. */
bool box_extent_compute(const tensor_map *map, const int32_t coordinates[MAX_RANK], box_extent *extent);

/* --- stores -------------------------------------------------------------------------------------- */

/* The Sanitizer API (13.5) reports loads through tensor maps. For stores it only names a callback, which is never
 * called; for reductions it has none. But the tensor maps are among the parameters of a kernel. Each map that the
 * kernel does not load through is assumed to be used for stores or reductions, which access its whole tensor. */

typedef struct {
    uint32_t launch;
    uint8_t mode; /* MODE_* flags of the accesses */
    bool is_load; /* the launch loads through this map */
    ck_u64 map_words[CK_MAP_WORDS];
} tma_store;

typedef struct {
    tma_store *maps; /* sorted by launch after tma_stores_resolve() */
    size_t map_count, map_capacity;
} tma_store_set;

/* Add a tensor map. Return false if no memory is left. */
bool tma_stores_add(tma_store_set *set, uint32_t launch, uint8_t mode, const ck_u64 content[CK_MAP_WORDS]);

/* Add copies of tensor maps for another launch. Return false if ``count`` is 0, or no memory is left. */
bool tma_stores_copy(tma_store_set *set, uint32_t launch, uint8_t mode, const tma_store *maps, size_t count);

/* Set ``is_load`` of the maps that their launch loads through, and sort the maps by launch. Return false if no
 * memory is left. */
bool tma_stores_resolve(tma_store_set *set, const ck_map *maps, size_t map_count, const ck_box *boxes,
                        size_t box_count);

/* Pass all rows of the tensor of a map to ``emit_rows``: ``count`` rows of ``bytes`` each, of which the first begins
 * at ``lo``, and each next one ``stride`` bytes later. */
void tma_store_rows(const tma_store *store,
                    void (*emit_rows)(void *context, uint64_t lo, uint64_t bytes, uint64_t stride, uint64_t count),
                    void *context);

#endif
