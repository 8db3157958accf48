/* Loads in im2col mode, by which cuDNN's convolutions read their input.
 *
 * The mode is described in the PTX ISA, "Tensor: im2col mode". The map has a bounding box in the spatial dimensions,
 * whose pixels are traversed in the order width, height, depth, batch, in steps of the traversal stride. A load reads
 * ``pixels`` consecutive pixels of the traversal, from its coordinates on, and some channels of each. The offset of
 * the load, the position in the filter, is added to the coordinates of each pixel. Pixels outside of the tensor are
 * filled with zeros and not read.
 *
 * The loads of a convolution together read nearly all pixels, once for each offset. So the runs of pixels are merged
 * first: what remains are a few runs, whose rows are contiguous in memory.
 */
#include "decode/tensor_maps.h"

#include <stdlib.h>
#include <string.h>

#define MAX_SHARED_BYTES (1u << 18) /* upper limit of shared memory */

/* --- the bounding box -------------------------------------------------------------------------- */

/* Return the number of pixels that are traversed in a spatial dimension; 0 if the bounding box is empty. */
static uint64_t traversed(const tensor_map *map, unsigned i)
{
    const int64_t last = (int64_t)map->dims[1 + i] - 1 + map->upper[i], length = last - map->lower[i];
    return length < 0 ? 0 : (uint64_t)length / map->steps[1 + i] + 1;
}

static bool is_certain(const tensor_map *map)
{
    uint64_t end;
    return !map->interleave && map->steps[0] == 1 && map->steps[map->rank - 1] == 1 && tensor_map_end(map, &end) &&
           !((end - 1) >> CK_ADDRESS_BITS) && map->strides[0] * map->box[0] * map->pixels <= MAX_SHARED_BYTES;
}

bool im2col_run_of(const tensor_map *map, const int32_t at[MAX_RANK], uint32_t offset_bits, im2col_run *run)
{
    const unsigned spatial_rank = map->rank - 2, bits = 16 / spatial_rank;
    uint64_t pixels_per_image = 1, within_image = 0;
    if (!is_certain(map) || at[0] < 0 || at[map->rank - 1] < 0)
        return false;
    for (unsigned i = 0; i < spatial_rank; i++) {
        const int64_t from_corner = (int64_t)at[1 + i] - map->lower[i];
        const uint64_t count = traversed(map, i);
        if (from_corner < 0 || from_corner % map->steps[1 + i] ||
            (uint64_t)from_corner / map->steps[1 + i] >= count)
            return false;
        within_image += (uint64_t)from_corner / map->steps[1 + i] * pixels_per_image;
        pixels_per_image *= count;
        run->offset[i] = (uint16_t)(offset_bits >> i * bits & ((1u << bits) - 1));
    }
    const uint64_t end = pixels_per_image * map->dims[map->rank - 1];
    run->first = pixels_per_image * (uint32_t)at[map->rank - 1] + within_image;
    run->end = run->first + map->pixels < end ? run->first + map->pixels : end;
    run->channel = (uint32_t)at[0];
    run->channels = map->box[0];
    if (run->channel >= map->dims[0])
        run->end = run->first; /* outside of the tensor */
    else if (run->channels > map->dims[0] - run->channel)
        run->channels = (uint32_t)(map->dims[0] - run->channel);
    return true;
}

/* --- merging ----------------------------------------------------------------------------------- */

#define COMPARE(a, b) \
    if ((a) != (b)) \
        return (a) < (b) ? -1 : 1;

static int compare_use(const im2col_run *a, const im2col_run *b)
{
    COMPARE(a->launch, b->launch)
    COMPARE(a->mode, b->mode)
    COMPARE(a->map, b->map)
    return memcmp(a->offset, b->offset, sizeof a->offset);
}

static int compare_channels(const void *left, const void *right)
{
    const im2col_run *a = left, *b = right;
    const int use = compare_use(a, b);
    if (use)
        return use;
    COMPARE(a->channel, b->channel)
    COMPARE(a->channels, b->channels)
    COMPARE(a->first, b->first)
    return 0;
}

static int compare_pixels(const void *left, const void *right)
{
    const im2col_run *a = left, *b = right;
    const int use = compare_use(a, b);
    if (use)
        return use;
    COMPARE(a->first, b->first)
    COMPARE(a->end, b->end)
    COMPARE(a->channel, b->channel)
    return 0;
}

/* Join runs of consecutive pixels of the same channels. */
static bool join_pixels(im2col_run *run, const im2col_run *next)
{
    if (compare_use(run, next) || run->channel != next->channel || run->channels != next->channels ||
        next->first > run->end)
        return false;
    if (next->end > run->end)
        run->end = next->end;
    return true;
}

/* Join adjacent channels of the same pixels. */
static bool join_channels(im2col_run *run, const im2col_run *next)
{
    if (compare_use(run, next) || run->first != next->first || run->end != next->end ||
        next->channel > run->channel + run->channels)
        return false;
    if (next->channel + next->channels > run->channel + run->channels)
        run->channels = next->channel + next->channels - run->channel;
    return true;
}

static size_t join_runs(im2col_run *runs, size_t count, bool (*join)(im2col_run *, const im2col_run *))
{
    size_t used = 0;
    for (size_t i = 0; i < count; i++)
        if (!used || !join(runs + used - 1, runs + i))
            runs[used++] = runs[i];
    return used;
}

/* --- rows -------------------------------------------------------------------------------------- */

/* Return the address of the first channel of the pixel at width 0 in the row that contains a pixel; 0 if the row is
 * outside of the tensor. ``row`` is the number of the row in the traversal. */
static uint64_t row_address(const tensor_map *map, const im2col_run *run, uint64_t row)
{
    uint64_t address = map->address + run->channel * map->strides[0];
    for (unsigned i = 1; i < map->rank - 2; i++) {
        const uint64_t count = traversed(map, i);
        if (!count)
            return 0;
        const int64_t at = map->lower[i] + (int64_t)(row % count) * map->steps[1 + i] + run->offset[i];
        if (at < 0 || (uint64_t)at >= map->dims[1 + i])
            return 0;
        address += (uint64_t)at * map->strides[1 + i];
        row /= count;
    }
    return address + row * map->strides[map->rank - 1];
}

/* Write the pixels from ``first`` to ``end`` of one row. */
static bool write_row(page_writer *writer, const tensor_map *map, const im2col_run *run, uint64_t row,
                      uint64_t first, uint64_t end)
{
    const int64_t step = map->steps[1], corner = map->lower[0] + run->offset[0];
    const uint64_t address = row_address(map, run, row), bytes = run->channels * map->strides[0];
    const int64_t width = (int64_t)map->dims[1];
    int64_t at = corner + (int64_t)first * step, last = corner + (int64_t)(end - 1) * step;
    if (at < 0)
        at += (-at + step - 1) / step * step;
    if (last >= width)
        last -= (last - width + step) / step * step;
    if (!address || at > last)
        return true;
    if (step == 1 && bytes == map->strides[1])
        return page_set_bytes(writer, run->launch, run->mode, address + (uint64_t)at * bytes,
                              address + (uint64_t)(last + 1) * bytes);
    for (; at <= last; at += step) {
        const uint64_t pixel = address + (uint64_t)at * map->strides[1];
        if (!page_set_bytes(writer, run->launch, run->mode, pixel, pixel + bytes))
            return false;
    }
    return true;
}

static bool write_run(page_writer *writer, const im2col_run *run, const tensor_map *map)
{
    const uint64_t per_row = traversed(map, 0);
    bool done = per_row > 0; /* there is no run in an empty bounding box */
    for (uint64_t pixel = run->first, row_end; done && pixel < run->end; pixel = row_end) {
        const uint64_t row = pixel / per_row;
        row_end = (row + 1) * per_row < run->end ? (row + 1) * per_row : run->end;
        done = write_row(writer, map, run, row, pixel - row * per_row, row_end - row * per_row);
    }
    return done;
}

bool im2col_write_runs(page_writer *writer, im2col_run *runs, size_t count, const tensor_map *maps)
{
    bool done = true;
    if (!count)
        return true;
    qsort(runs, count, sizeof *runs, compare_channels);
    count = join_runs(runs, count, join_pixels);
    qsort(runs, count, sizeof *runs, compare_pixels);
    count = join_runs(runs, count, join_channels);
    for (size_t i = 0; done && i < count; i++)
        done = write_run(writer, runs + i, maps + runs[i].map - 1);
    return done;
}
