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
#define MAX_SPATIAL_RANK (MAX_RANK - 2)

typedef struct {
    uint64_t address;
    uint64_t dims[MAX_RANK];    /* elements */
    uint64_t strides[MAX_RANK]; /* bytes from one element to the next; the first is the element size */
    uint32_t box[MAX_RANK];     /* elements, of which every ``steps``th is moved */
    uint32_t steps[MAX_RANK];
    unsigned rank, interleave;
    bool is_im2col; /* then dimension 0 is the channel, the last one the batch, and those between are spatial */
    int32_t lower[MAX_SPATIAL_RANK], upper[MAX_SPATIAL_RANK]; /* corners of the bounding box */
    uint32_t pixels;                                          /* per load; ``box[0]`` channels of each */
} tensor_map;

/* The memory that a box at given coordinates covers: contiguous bytes in the first dimension, strided in the
 * others. Clipped to the tensor. */
typedef struct {
    uint64_t begin, bytes; /* bytes 0: empty */
    uint64_t strides[MAX_RANK];
    uint32_t counts[MAX_RANK];
} box_extent;

/* Decode a map as cuTensorMapEncodeTiled or cuTensorMapEncodeIm2col encodes it. False for unknown forms and elements
 * smaller than a byte. */
bool tensor_map_decode(const ck_u64 content[CK_MAP_WORDS], tensor_map *map);

/* Compute the end address of the tensor; false on overflow. */
bool tensor_map_end(const tensor_map *map, uint64_t *end);

/* Compute the memory that a box covers. False if that is not certain: interleaved layouts, steps in the first
 * dimension (which the driver API documents as ignored), boxes larger than shared memory, and invalid addresses. */
bool box_extent_compute(const tensor_map *map, const int32_t coordinates[MAX_RANK], box_extent *extent);

/* --- im2col loads -------------------------------------------------------------------------------- */

/* Pixels of the bounding box that loads traverse, in the order of the traversal. */
typedef struct {
    uint32_t launch;
    uint16_t mode, map;
    uint16_t offset[MAX_SPATIAL_RANK];     /* added to the coordinates of each pixel: the position in the filter */
    uint32_t first_channel, channel_count; /* of each pixel */
    uint64_t first_pixel, end_pixel;       /* numbers of pixels */
} im2col_run;

/* Find the pixels that a load reads; ``offset_bits`` is the argument of the callback. False if that is not certain. */
bool im2col_run_compute(const tensor_map *map, const int32_t coordinates[MAX_RANK], uint32_t offset_bits,
                        im2col_run *run);

/* Mark the bytes of runs as accessed; changes the order of the runs. ``maps`` are indexed from 1. False if out of
 * memory. */
bool im2col_write_runs(page_writer *writer, im2col_run *runs, size_t count, const tensor_map *maps);

/* --- boxes --------------------------------------------------------------------------------------- */

/* Add the bytes that all boxes cover to ``into``, as if the kernel had accessed them one by one; ``into`` may
 * then have two pages of one key.
 *
 * The counts are those of the arena's header, which may exceed the arrays. Calls ``lost`` for each launch, maybe
 * more than once, of which a box cannot be expanded with certainty. False if out of memory. */
bool tma_boxes_expand(const ck_map *maps, size_t map_count, const ck_box *boxes, size_t box_count, page_set *pages,
                      void (*report_lost)(void *context, uint32_t launch), void *context);

/* --- stores -------------------------------------------------------------------------------------- */

/* The Sanitizer API (13.5) reports loads through tensor maps, but declares the callback of stores only by name
 * and never calls it, and has none for reductions. The maps are among the parameters of a kernel: each map that the
 * kernel does not load through is assumed to be one that it stores or reduces through, and its whole tensor to be
 * accessed. */

typedef struct {
    uint32_t launch;
    uint8_t mode; /* MODE_* of the accesses */
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
bool tma_stores_add(tma_store_set *set, uint32_t launch, uint8_t mode, const struct kernel_layout *layout,
                    void **parameters, void **extra);

/* Add maps that were found before, for another launch; false if there are none, or memory is out. */
bool tma_stores_copy(tma_store_set *set, uint32_t launch, uint8_t mode, const tma_store *maps, size_t count);

/* Find the maps that their launch loads through, and sort all by launch. False if out of memory. */
bool tma_stores_resolve(tma_store_set *set, const ck_map *maps, size_t map_count, const ck_box *boxes,
                        size_t box_count);

/* Pass the rows of a map's tensor to ``row``: ``count`` rows of ``bytes``, the first at ``lo``, each ``stride``
 * after the one before. */
void tma_store_rows(const tma_store *store,
                    void (*emit_rows)(void *context, uint64_t lo, uint64_t bytes, uint64_t stride, uint64_t count),
                    void *context);

#endif
