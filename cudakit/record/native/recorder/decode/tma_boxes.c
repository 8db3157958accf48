#include "decode/tma_boxes.h"

#include <stdlib.h>
#include <string.h>

/* --- im2col loads ---------------------------------------------------------------------------------- */

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

/* --- boxes ----------------------------------------------------------------------------------------- */

/* --- boxes to bytes --------------------------------------------------------------------------- */

/* Advance ``row_index`` and the address ``begin`` to the next row of a box. Return false after the last row. */
static bool advance_to_next_row(const box_extent *box, uint32_t row_index[MAX_RANK], uint64_t *begin)
{
    for (unsigned i = 1; i < MAX_RANK && box->element_counts[i]; i++) {
        *begin += box->strides[i];
        if (++row_index[i] < box->element_counts[i])
            return true;
        *begin -= box->element_counts[i] * box->strides[i];
        row_index[i] = 0;
    }
    return false;
}

typedef struct {
    uint32_t launch;
    uint16_t mode, map_number; /* map_number: index of the tensor map plus 1 */
    box_extent extent;
} placed_box;

/* Mark the bytes of a box. Rows that are contiguous in memory are marked together. */
static bool mark_box(page_writer *writer, const placed_box *box)
{
    uint32_t row_index[MAX_RANK] = {0};
    uint64_t row = box->extent.begin, begin = row, end = row;
    do {
        if (row != end) {
            if (!page_writer_mark_bytes(writer, box->launch, box->mode, begin, end))
                return false;
            begin = row;
        }
        end = row + box->extent.bytes;
    } while (advance_to_next_row(&box->extent, row_index, &row));
    return page_writer_mark_bytes(writer, box->launch, box->mode, begin, end);
}

static int compare_boxes(const void *left, const void *right)
{
    const placed_box *a = left, *b = right;
    if (a->launch != b->launch)
        return a->launch < b->launch ? -1 : 1;
    if (a->mode != b->mode || a->map_number != b->map_number)
        return (a->mode << 16 | a->map_number) < (b->mode << 16 | b->map_number) ? -1 : 1;
    return a->extent.begin < b->extent.begin ? -1 : a->extent.begin > b->extent.begin;
}

/* Join two boxes of a tensor that are adjacent in the first dimension, such as tiles of a GEMM, to one box with longer
 * rows. ``next`` does not begin before ``box``. Return false if the boxes are not adjacent. */
static bool merge_adjacent_boxes(placed_box *box, const placed_box *next)
{
    box_extent *a = &box->extent;
    const box_extent *b = &next->extent;
    if (box->launch != next->launch || box->mode != next->mode || box->map_number != next->map_number ||
        b->begin > a->begin + a->bytes ||
        memcmp(a->element_counts + 1, b->element_counts + 1,
               sizeof a->element_counts - sizeof *a->element_counts) ||
        memcmp(a->strides + 1, b->strides + 1, sizeof a->strides - sizeof *a->strides))
        return false;
    const uint64_t end = b->begin + b->bytes;
    if (end > a->begin + a->bytes)
        a->bytes = end - a->begin;
    return true;
}

static bool mark_boxes(page_writer *writer, placed_box *boxes, size_t count)
{
    bool has_marked_all = true;
    qsort(boxes, count, sizeof *boxes, compare_boxes);
    for (size_t i = 0, next_index; has_marked_all && i < count; i = next_index) {
        for (next_index = i + 1; next_index < count && merge_adjacent_boxes(boxes + i, boxes + next_index);)
            next_index++;
        has_marked_all = mark_box(writer, boxes + i);
    }
    return has_marked_all;
}

/* --- decoding boxes --------------------------------------------------------------------------- */

typedef struct { /* decoded words of a ck_box: the arguments of the device callback */
    int32_t coordinates[MAX_RANK];
    uint32_t rank, mode, offset_bits;
} box_arguments;

enum { TILED = 0, IM2COL = 1 }; /* Sanitizer_LoadMode */

/* Decode the words of a box. In a load, destination and barrier precede the coordinates, and multicast fields follow
 * the rank. In a store, the source is assumed to precede the coordinates, and the mode to follow them. */
static box_arguments decode_arguments(const ck_box *box)
{
    const uint32_t *argument_words = box->word;
    const bool is_load = box->mode == CK_READ;
    box_arguments arguments = {.rank = argument_words[is_load ? 7 : 6],
                               .mode = argument_words[is_load ? 10 : 7],
                               .offset_bits = argument_words[9]};
    memcpy(arguments.coordinates, argument_words + (is_load ? 2 : 1), sizeof arguments.coordinates);
    return arguments;
}

/* Return whether the arguments fit the tensor map. Coordinates beyond the rank must be 0; otherwise the assumed layout
 * is wrong. */
static bool are_arguments_plausible(const box_arguments *arguments, const tensor_map *map)
{
    bool unused_coordinates_are_zero = true;
    for (unsigned i = map->rank; i < MAX_RANK; i++)
        unused_coordinates_are_zero = unused_coordinates_are_zero && !arguments->coordinates[i];
    return arguments->mode == (map->is_im2col ? IM2COL : TILED) && arguments->rank == map->rank &&
           unused_coordinates_are_zero;
}

typedef struct {
    tensor_map *maps;
    uint16_t map_numbers[CK_MAP_KEYS]; /* by key slot: index of the tensor map plus 1; 0: unknown */
} map_index;

static map_index *map_index_create(const ck_map *maps, size_t count)
{
    map_index *index = calloc(1, sizeof *index);
    if (!index || !(index->maps = calloc(count + 1, sizeof *index->maps))) {
        free(index);
        return NULL;
    }
    for (size_t i = 0; i < count; i++)
        if (maps[i].slot < CK_MAP_KEYS && tensor_map_decode(maps[i].content, index->maps + i))
            index->map_numbers[maps[i].slot] = (uint16_t)(i + 1);
    return index;
}

static void map_index_free(map_index *index)
{
    if (index)
        free(index->maps);
    free(index);
}

/* The memory of all boxes in an arena: tiles, and runs of pixels. */
typedef struct {
    map_index *index;
    placed_box *tiles;
    im2col_run *runs;
    size_t tile_count, run_count;
} located_boxes;

/* Compute the memory that a box covers. Return false if the memory is not certain. */
static bool locate_box(located_boxes *located, const ck_box *box)
{
    const unsigned map_number = box->map < CK_MAP_KEYS ? located->index->map_numbers[box->map] : 0;
    if (!map_number || box->launch >= CK_MAX_LAUNCHES || box->mode == CK_SYNC || box->mode >= CK_MODES)
        return false;
    const box_arguments arguments = decode_arguments(box);
    const tensor_map *map = located->index->maps + map_number - 1;
    if (!are_arguments_plausible(&arguments, map))
        return false;
    if (map->is_im2col) {
        im2col_run *run = located->runs + located->run_count;
        *run = (im2col_run){.launch = box->launch, .mode = box->mode, .map_number = (uint16_t)map_number};
        const bool is_located =
            box->mode == CK_READ && im2col_run_compute(map, arguments.coordinates, arguments.offset_bits, run);
        located->run_count += is_located && run->first_pixel < run->end_pixel;
        return is_located;
    }
    placed_box *tile = located->tiles + located->tile_count;
    *tile = (placed_box){.launch = box->launch, .mode = box->mode, .map_number = (uint16_t)map_number};
    const bool is_located = box_extent_compute(map, arguments.coordinates, &tile->extent);
    located->tile_count += is_located && tile->extent.bytes;
    return is_located;
}

static void located_boxes_free(located_boxes *located)
{
    map_index_free(located->index);
    free(located->tiles);
    free(located->runs);
}

bool tma_boxes_expand(const ck_map *maps, size_t map_count, const ck_box *boxes, size_t box_count, page_set *pages,
                      void (*report_lost)(void *context, uint32_t launch), void *context)
{
    if (!box_count)
        return true;
    if (box_count > CK_MAX_BOXES)
        box_count = CK_MAX_BOXES;
    located_boxes boxes_with_positions = {
        .index = map_index_create(maps, map_count < CK_MAX_MAPS ? map_count : CK_MAX_MAPS),
        .tiles = malloc(box_count * sizeof *boxes_with_positions.tiles),
        .runs = malloc(box_count * sizeof *boxes_with_positions.runs),
    };
    bool has_marked_all = boxes_with_positions.index && boxes_with_positions.tiles && boxes_with_positions.runs;
    for (size_t i = 0; has_marked_all && i < box_count; i++)
        if (!locate_box(&boxes_with_positions, boxes + i))
            report_lost(context, boxes[i].launch);
    page_writer writer = page_writer_begin(pages);
    has_marked_all = has_marked_all &&
                     mark_boxes(&writer, boxes_with_positions.tiles, boxes_with_positions.tile_count) &&
                     im2col_write_runs(&writer, boxes_with_positions.runs, boxes_with_positions.run_count,
                                       boxes_with_positions.index->maps);
    page_writer_free(&writer);
    located_boxes_free(&boxes_with_positions);
    return has_marked_all;
}
