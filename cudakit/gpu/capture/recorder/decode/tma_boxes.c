#include "decode/tensor_maps.h"

#include <stdlib.h>
#include <string.h>

/* --- boxes to bytes --------------------------------------------------------------------------- */

/* Advance to the next row: to the next index in the second dimension, or back to its start and on in the
 * third. */
static bool next_row(const box_extent *box, uint32_t at[MAX_RANK], uint64_t *begin)
{
    for (unsigned i = 1; i < MAX_RANK && box->counts[i]; i++) {
        *begin += box->strides[i];
        if (++at[i] < box->counts[i])
            return true;
        *begin -= box->counts[i] * box->strides[i];
        at[i] = 0;
    }
    return false;
}

typedef struct {
    uint32_t launch;
    uint16_t mode, map; /* map: index into the map table, from 1 */
    box_extent extent;
} placed_box;

/* Rows that are contiguous in memory are written as one. */
static bool write_box(page_writer *writer, const placed_box *box)
{
    uint32_t at[MAX_RANK] = {0};
    uint64_t row = box->extent.begin, begin = row, end = row;
    do {
        if (row != end) {
            if (!page_set_bytes(writer, box->launch, box->mode, begin, end))
                return false;
            begin = row;
        }
        end = row + box->extent.bytes;
    } while (next_row(&box->extent, at, &row));
    return page_set_bytes(writer, box->launch, box->mode, begin, end);
}

static int compare_boxes(const void *left, const void *right)
{
    const placed_box *a = left, *b = right;
    if (a->launch != b->launch)
        return a->launch < b->launch ? -1 : 1;
    if (a->mode != b->mode || a->map != b->map)
        return (a->mode << 16 | a->map) < (b->mode << 16 | b->map) ? -1 : 1;
    return a->extent.begin < b->extent.begin ? -1 : a->extent.begin > b->extent.begin;
}

/* Join boxes that are adjacent in the first dimension, such as the tiles of a GEMM, to boxes with longer
 * rows. */
static bool merge_adjacent(placed_box *box, const placed_box *next)
{
    box_extent *a = &box->extent;
    const box_extent *b = &next->extent;
    if (box->launch != next->launch || box->mode != next->mode || b->begin > a->begin + a->bytes ||
        memcmp(a->counts + 1, b->counts + 1, sizeof a->counts - sizeof *a->counts) ||
        memcmp(a->strides + 1, b->strides + 1, sizeof a->strides - sizeof *a->strides))
        return false;
    const uint64_t end = b->begin + b->bytes;
    if (end > a->begin + a->bytes)
        a->bytes = end - a->begin;
    return true;
}

static bool write_boxes(page_writer *writer, placed_box *boxes, size_t count)
{
    bool done = true;
    qsort(boxes, count, sizeof *boxes, compare_boxes);
    for (size_t i = 0, next; done && i < count; i = next) {
        for (next = i + 1; next < count && merge_adjacent(boxes + i, boxes + next);)
            next++;
        done = write_box(writer, boxes + i);
    }
    return done;
}

/* --- decoding boxes --------------------------------------------------------------------------- */

typedef struct { /* decoded words of a ck_box */
    int32_t at[MAX_RANK];
    uint32_t rank, mode, offset_bits;
} box_use;

enum { TILED = 0, IM2COL = 1 }; /* Sanitizer_LoadMode */

/* Load: destination and barrier precede the coordinates, and multicast fields follow the rank. Store:
 * assumed to be the source before, the mode behind. */
static box_use decode_use(const ck_box *box)
{
    const uint32_t *word = box->word;
    const bool load = box->mode == CK_READ;
    box_use use = {.rank = word[load ? 7 : 6], .mode = word[load ? 10 : 7], .offset_bits = word[9]};
    memcpy(use.at, word + (load ? 2 : 1), sizeof use.at);
    return use;
}

/* Coordinates beyond the rank must be 0; otherwise the assumed layout is wrong. */
static bool is_plausible(const box_use *use, const tensor_map *map)
{
    bool zeros = true;
    for (unsigned i = map->rank; i < MAX_RANK; i++)
        zeros = zeros && !use->at[i];
    return use->mode == (map->is_im2col ? IM2COL : TILED) && use->rank == map->rank && zeros;
}

typedef struct {
    tensor_map *maps;
    uint16_t number[CK_MAP_KEYS]; /* index of the map with this key slot, from 1; 0: unknown */
} map_index;

static map_index *map_index_create(const ck_map *maps, size_t count)
{
    map_index *index = calloc(1, sizeof *index);
    if (!index || !(index->maps = calloc(count + 1, sizeof *index->maps))) {
        free(index);
        return NULL;
    }
    for (size_t i = 0; i < count; i++)
        if (maps[i].slot < CK_MAP_KEYS && tensor_map_of(maps[i].content, index->maps + i))
            index->number[maps[i].slot] = (uint16_t)(i + 1);
    return index;
}

static void map_index_free(map_index *index)
{
    if (index)
        free(index->maps);
    free(index);
}

/* The boxes of an arena, expanded: tiled ones and runs of pixels. */
typedef struct {
    map_index *index;
    placed_box *tiles;
    im2col_run *runs;
    size_t tile_count, run_count;
} located_boxes;

/* Compute the memory that a box covers; false if that is not certain. */
static bool locate_box(located_boxes *all, const ck_box *box)
{
    const unsigned number = box->map < CK_MAP_KEYS ? all->index->number[box->map] : 0;
    if (!number || box->launch >= CK_MAX_LAUNCHES || box->mode == CK_SYNC || box->mode >= CK_MODES)
        return false;
    const box_use use = decode_use(box);
    const tensor_map *map = all->index->maps + number - 1;
    if (!is_plausible(&use, map))
        return false;
    if (map->is_im2col) {
        im2col_run *run = all->runs + all->run_count;
        *run = (im2col_run){.launch = box->launch, .mode = box->mode, .map = (uint16_t)number};
        const bool located = box->mode == CK_READ && im2col_run_of(map, use.at, use.offset_bits, run);
        all->run_count += located && run->first < run->end;
        return located;
    }
    placed_box *tile = all->tiles + all->tile_count;
    *tile = (placed_box){.launch = box->launch, .mode = box->mode, .map = (uint16_t)number};
    const bool located = box_extent_of(map, use.at, &tile->extent);
    all->tile_count += located && tile->extent.bytes;
    return located;
}

static void located_boxes_free(located_boxes *all)
{
    map_index_free(all->index);
    free(all->tiles);
    free(all->runs);
}

bool tma_boxes_expand(const ck_map *maps, size_t map_count, const ck_box *boxes, size_t box_count, page_set *into,
                      void (*lost)(void *context, uint32_t launch), void *context)
{
    if (!box_count)
        return true;
    if (box_count > CK_MAX_BOXES)
        box_count = CK_MAX_BOXES;
    located_boxes all = {
        .index = map_index_create(maps, map_count < CK_MAX_MAPS ? map_count : CK_MAX_MAPS),
        .tiles = malloc(box_count * sizeof *all.tiles),
        .runs = malloc(box_count * sizeof *all.runs),
    };
    bool done = all.index && all.tiles && all.runs;
    for (size_t i = 0; done && i < box_count; i++)
        if (!locate_box(&all, boxes + i))
            lost(context, boxes[i].launch);
    page_writer writer = page_writer_of(into);
    done = done && write_boxes(&writer, all.tiles, all.tile_count) &&
           im2col_write_runs(&writer, all.runs, all.run_count, all.index->maps);
    page_writer_free(&writer);
    located_boxes_free(&all);
    return done;
}
