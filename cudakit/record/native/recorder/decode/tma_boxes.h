/* Accesses through tensor maps (TMA) by loads: expands the boxes that kernels loaded to bytes. */
#ifndef CK_TMA_BOXES_H
#define CK_TMA_BOXES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "decode/pages.h"
#include "decode/tensor_maps.h"
#include "patch/arena.h"

/* --- im2col loads -------------------------------------------------------------------------------- */

/* Consecutive pixels that loads read, numbered in the order in which a load traverses the bounding box. */
typedef struct {
    uint32_t launch;
    uint16_t mode, map_number;
    uint16_t filter_offset[MAX_SPATIAL_RANK]; /* position in the filter, added to the coordinates of each pixel */
    uint32_t first_channel, channel_count;    /* channels that are read of each pixel */
    uint64_t first_pixel, end_pixel;          /* number of the first pixel, and of the pixel behind the last */
} im2col_run;

/* Compute the pixels that a load reads. ``offset_bits`` is the im2col offset, as the device callback gets it.
 * Return false if the result would not be certain. */
bool im2col_run_compute(const tensor_map *map, const int32_t coordinates[MAX_RANK], uint32_t offset_bits,
                        im2col_run *run);

/* Mark the bytes of runs as accessed. Reorders and joins ``runs``, whose maps are indices of ``maps`` plus 1. Return
 * false if no memory is left. */
bool im2col_write_runs(page_writer *writer, im2col_run *runs, size_t count, const tensor_map *maps);

/* --- boxes --------------------------------------------------------------------------------------- */

/* Add the bytes that all boxes cover to ``pages``, as if the kernel had accessed each byte by itself. ``pages`` may
 * then have two pages of one key.
 *
 * The counts of boxes and maps are those in the header of the arena, which may exceed the lengths of the arrays.
 * Calls ``report_lost``, at least once, for each launch that has a box whose memory is not certain. Return false if
 * no memory is left. */
bool tma_boxes_expand(const ck_map *maps, size_t map_count, const ck_box *boxes, size_t box_count, page_set *pages,
                      void (*report_lost)(void *context, uint32_t launch), void *context);

#endif
