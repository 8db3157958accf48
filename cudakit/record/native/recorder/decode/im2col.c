/* Loads in im2col mode, with which cuDNN's convolutions read their input.
 *
 * The mode is described in the PTX ISA, "Tensor: im2col mode". The map has a bounding box in the spatial dimensions,
 * whose pixels are traversed in the order width, height, depth, batch, in steps of the traversal stride. A load reads
 * ``pixels`` consecutive pixels of the traversal, beginning at its coordinates, and some channels of each. The offset
 * of the load, which is the position in the filter, is added to the coordinates of each pixel. Pixels outside of the
 * tensor are filled with zeros and not read.
 *
 * The loads of a convolution together read nearly all pixels, once for each offset. Therefore the runs of pixels are
 * joined first. Only a few runs remain, whose rows are contiguous in memory.
 */
#include "decode/tensor_maps.h"

#include <stdlib.h>
#include <string.h>

#define MAX_SHARED_BYTES (1u << 18) /* upper limit of the shared memory of a block */

/* --- the bounding box -------------------------------------------------------------------------- */

/* Return the number of pixels that a load traverses in a spatial dimension; 0 if the bounding box is empty. */
static uint64_t count_traversed_pixels(const tensor_map *map, unsigned i)
{
    const int64_t last_pixel = (int64_t)map->dims[1 + i] - 1 + map->upper_corner[i],
                  length = last_pixel - map->lower_corner[i];
    return length < 0 ? 0 : (uint64_t)length / map->element_strides[1 + i] + 1;
}

/* Return whether the decoded fields determine exactly which memory a load reads. */
static bool is_tensor_certain(const tensor_map *map)
{
    uint64_t end_address;
    return !map->interleave && map->element_strides[0] == 1 && map->element_strides[map->rank - 1] == 1 &&
           tensor_map_end(map, &end_address) && !((end_address - 1) >> CK_ADDRESS_BITS) &&
           map->strides[0] * map->box[0] * map->pixels_per_load <= MAX_SHARED_BYTES;
}

bool im2col_run_compute(const tensor_map *map, const int32_t coordinates[MAX_RANK], uint32_t offset_bits,
                        im2col_run *run)
{
    const unsigned spatial_rank = map->rank - 2, bits = 16 / spatial_rank;
    uint64_t pixels_per_image = 1, pixel_in_image = 0;
    if (!is_tensor_certain(map) || coordinates[0] < 0 || coordinates[map->rank - 1] < 0)
        return false;
    for (unsigned i = 0; i < spatial_rank; i++) {
        const int64_t corner_distance = (int64_t)coordinates[1 + i] - map->lower_corner[i];
        const uint64_t pixel_count = count_traversed_pixels(map, i);
        if (corner_distance < 0 || corner_distance % map->element_strides[1 + i] ||
            (uint64_t)corner_distance / map->element_strides[1 + i] >= pixel_count)
            return false;
        pixel_in_image += (uint64_t)corner_distance / map->element_strides[1 + i] * pixels_per_image;
        pixels_per_image *= pixel_count;
        run->filter_offset[i] = (uint16_t)(offset_bits >> i * bits & ((1u << bits) - 1));
    }
    const uint64_t end_pixel = pixels_per_image * map->dims[map->rank - 1];
    run->first_pixel = pixels_per_image * (uint32_t)coordinates[map->rank - 1] + pixel_in_image;
    run->end_pixel =
        run->first_pixel + map->pixels_per_load < end_pixel ? run->first_pixel + map->pixels_per_load : end_pixel;
    run->first_channel = (uint32_t)coordinates[0];
    run->channel_count = map->box[0];
    if (run->first_channel >= map->dims[0])
        run->end_pixel = run->first_pixel; /* the load reads nothing: its channels are outside of the tensor */
    else if (run->channel_count > map->dims[0] - run->first_channel)
        run->channel_count = (uint32_t)(map->dims[0] - run->first_channel);
    return true;
}

/* --- merging of runs ---------------------------------------------------------------------------- */

#define RETURN_IF_DIFFERENT(a, b) \
    if ((a) != (b)) \
        return (a) < (b) ? -1 : 1;

/* Compare two runs by launch, access mode, tensor map and filter offset, not by pixels and channels. */
static int compare_loads(const im2col_run *a, const im2col_run *b)
{
    RETURN_IF_DIFFERENT(a->launch, b->launch)
    RETURN_IF_DIFFERENT(a->mode, b->mode)
    RETURN_IF_DIFFERENT(a->map_number, b->map_number)
    return memcmp(a->filter_offset, b->filter_offset, sizeof a->filter_offset);
}

static int compare_channels(const void *left, const void *right)
{
    const im2col_run *a = left, *b = right;
    const int order = compare_loads(a, b);
    if (order)
        return order;
    RETURN_IF_DIFFERENT(a->first_channel, b->first_channel)
    RETURN_IF_DIFFERENT(a->channel_count, b->channel_count)
    RETURN_IF_DIFFERENT(a->first_pixel, b->first_pixel)
    return 0;
}

static int compare_pixels(const void *left, const void *right)
{
    const im2col_run *a = left, *b = right;
    const int order = compare_loads(a, b);
    if (order)
        return order;
    RETURN_IF_DIFFERENT(a->first_pixel, b->first_pixel)
    RETURN_IF_DIFFERENT(a->end_pixel, b->end_pixel)
    RETURN_IF_DIFFERENT(a->first_channel, b->first_channel)
    return 0;
}

/* Join runs of consecutive pixels of the same channels. */
static bool join_pixels(im2col_run *run, const im2col_run *next)
{
    if (compare_loads(run, next) || run->first_channel != next->first_channel ||
        run->channel_count != next->channel_count || next->first_pixel > run->end_pixel)
        return false;
    if (next->end_pixel > run->end_pixel)
        run->end_pixel = next->end_pixel;
    return true;
}

/* Join adjacent channels of the same pixels. */
static bool join_channels(im2col_run *run, const im2col_run *next)
{
    if (compare_loads(run, next) || run->first_pixel != next->first_pixel || run->end_pixel != next->end_pixel ||
        next->first_channel > run->first_channel + run->channel_count)
        return false;
    if (next->first_channel + next->channel_count > run->first_channel + run->channel_count)
        run->channel_count = next->first_channel + next->channel_count - run->first_channel;
    return true;
}

static size_t join_runs(im2col_run *runs, size_t count, bool (*join)(im2col_run *, const im2col_run *))
{
    size_t joined_count = 0;
    for (size_t i = 0; i < count; i++)
        if (!joined_count || !join(runs + joined_count - 1, runs + i))
            runs[joined_count++] = runs[i];
    return joined_count;
}

/* --- rows -------------------------------------------------------------------------------------- */

/* Return the address of the first channel of the pixel at width 0 in the row that contains a pixel; 0 if the row is
 * outside of the tensor. ``row`` is the number of the row in the traversal. */
static uint64_t row_address(const tensor_map *map, const im2col_run *run, uint64_t row)
{
    uint64_t address = map->address + run->first_channel * map->strides[0];
    for (unsigned i = 1; i < map->rank - 2; i++) {
        const uint64_t pixel_count = count_traversed_pixels(map, i);
        if (!pixel_count)
            return 0;
        const int64_t coordinate = map->lower_corner[i] +
                                   (int64_t)(row % pixel_count) * map->element_strides[1 + i] +
                                   run->filter_offset[i];
        if (coordinate < 0 || (uint64_t)coordinate >= map->dims[1 + i])
            return 0;
        address += (uint64_t)coordinate * map->strides[1 + i];
        row /= pixel_count;
    }
    return address + row * map->strides[map->rank - 1];
}

/* Mark the bytes of the pixels from ``first_pixel`` up to ``end_pixel`` of one row. */
static bool mark_row(page_writer *writer, const tensor_map *map, const im2col_run *run, uint64_t row,
                     uint64_t first_pixel, uint64_t end_pixel)
{
    const int64_t element_stride = map->element_strides[1],
                  first_coordinate = map->lower_corner[0] + run->filter_offset[0];
    const uint64_t address = row_address(map, run, row), bytes = run->channel_count * map->strides[0];
    const int64_t width = (int64_t)map->dims[1];
    int64_t coordinate = first_coordinate + (int64_t)first_pixel * element_stride,
            last_coordinate = first_coordinate + (int64_t)(end_pixel - 1) * element_stride;
    if (coordinate < 0)
        coordinate += (-coordinate + element_stride - 1) / element_stride * element_stride;
    if (last_coordinate >= width)
        last_coordinate -= (last_coordinate - width + element_stride) / element_stride * element_stride;
    if (!address || coordinate > last_coordinate)
        return true;
    if (element_stride == 1 && bytes == map->strides[1])
        return page_writer_mark_bytes(writer, run->launch, run->mode, address + (uint64_t)coordinate * bytes,
                                      address + (uint64_t)(last_coordinate + 1) * bytes);
    for (; coordinate <= last_coordinate; coordinate += element_stride) {
        const uint64_t pixel_address = address + (uint64_t)coordinate * map->strides[1];
        if (!page_writer_mark_bytes(writer, run->launch, run->mode, pixel_address, pixel_address + bytes))
            return false;
    }
    return true;
}

static bool mark_run(page_writer *writer, const im2col_run *run, const tensor_map *map)
{
    const uint64_t pixels_per_row = count_traversed_pixels(map, 0);
    bool has_marked_all = pixels_per_row > 0; /* an empty bounding box has no runs */
    for (uint64_t pixel = run->first_pixel, row_end; has_marked_all && pixel < run->end_pixel; pixel = row_end) {
        const uint64_t row = pixel / pixels_per_row;
        row_end = (row + 1) * pixels_per_row < run->end_pixel ? (row + 1) * pixels_per_row : run->end_pixel;
        has_marked_all =
            mark_row(writer, map, run, row, pixel - row * pixels_per_row, row_end - row * pixels_per_row);
    }
    return has_marked_all;
}

bool im2col_write_runs(page_writer *writer, im2col_run *runs, size_t count, const tensor_map *maps)
{
    bool has_marked_all = true;
    if (!count)
        return true;
    qsort(runs, count, sizeof *runs, compare_channels);
    count = join_runs(runs, count, join_pixels);
    qsort(runs, count, sizeof *runs, compare_pixels);
    count = join_runs(runs, count, join_channels);
    for (size_t i = 0; has_marked_all && i < count; i++)
        has_marked_all = mark_run(writer, runs + i, maps + runs[i].map_number - 1);
    return has_marked_all;
}
