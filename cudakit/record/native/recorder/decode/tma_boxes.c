#include "decode/tensor_maps.h"

#include <stdlib.h>
#include <string.h>

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
