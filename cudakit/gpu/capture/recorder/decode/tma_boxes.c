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
static bool write_box(page_writer *in, const placed_box *box)
{
    uint32_t at[MAX_RANK] = {0};
    uint64_t row = box->extent.begin, begin = row, end = row;
    do {
        if (row != end) {
            if (!page_set_bytes(in, box->launch, box->mode, begin, end))
                return false;
            begin = row;
        }
        end = row + box->extent.bytes;
    } while (next_row(&box->extent, at, &row));
    return page_set_bytes(in, box->launch, box->mode, begin, end);
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

static bool write_boxes(page_writer *in, placed_box *boxes, size_t count)
{
    bool done = true;
    qsort(boxes, count, sizeof *boxes, compare_boxes);
    for (size_t i = 0, next; done && i < count; i = next) {
        for (next = i + 1; next < count && merge_adjacent(boxes + i, boxes + next);)
            next++;
        done = write_box(in, boxes + i);
    }
    return done;
}

/* --- decoding boxes --------------------------------------------------------------------------- */

typedef struct { /* decoded words of a ck_box */
    int32_t at[MAX_RANK];
    uint32_t rank, mode;
} box_use;

enum { TILED = 0 }; /* Sanitizer_LoadMode */

/* Load: destination and barrier precede the coordinates, and multicast fields follow the rank. Store:
 * assumed to be the source before, the mode behind. */
static box_use decode_use(const ck_box *box)
{
    const uint32_t *word = box->word;
    const bool load = box->mode == CK_READ;
    box_use made = {.rank = word[load ? 7 : 6], .mode = word[load ? 10 : 7]};
    memcpy(made.at, word + (load ? 2 : 1), sizeof made.at);
    return made;
}

/* Coordinates beyond the rank must be 0; otherwise the assumed layout is wrong. */
static bool is_plausible(const box_use *made, unsigned rank)
{
    bool zeros = true;
    for (unsigned i = rank; i < MAX_RANK; i++)
        zeros = zeros && !made->at[i];
    return made->mode == TILED && made->rank == rank && zeros;
}

typedef struct {
    tensor_map *maps;
    uint16_t number[CK_MAP_KEYS]; /* index of the map with this key slot, from 1; 0: unknown */
} map_index;

static map_index *map_index_create(const ck_map *maps, size_t count)
{
    map_index *all = calloc(1, sizeof *all);
    if (!all || !(all->maps = calloc(count + 1, sizeof *all->maps))) {
        free(all);
        return NULL;
    }
    for (size_t i = 0; i < count; i++)
        if (maps[i].slot < CK_MAP_KEYS && tensor_map_of(maps[i].content, all->maps + i))
            all->number[maps[i].slot] = (uint16_t)(i + 1);
    return all;
}

static void map_index_free(map_index *all)
{
    if (all)
        free(all->maps);
    free(all);
}

static bool place_box(const map_index *all, const ck_box *box, placed_box *made)
{
    const unsigned number = box->map < CK_MAP_KEYS ? all->number[box->map] : 0;
    if (!number || box->launch >= CK_MAX_LAUNCHES || box->mode == CK_SYNC || box->mode >= CK_MODES)
        return false;
    const box_use use = decode_use(box);
    const tensor_map *map = all->maps + number - 1;
    *made = (placed_box){.launch = box->launch, .mode = box->mode, .map = (uint16_t)number};
    return is_plausible(&use, map->rank) && box_extent_of(map, use.at, &made->extent);
}

bool tma_boxes_expand(const ck_map *maps, size_t map_count, const ck_box *boxes, size_t box_count, page_set *into,
                      void (*lost)(void *to, uint32_t launch), void *to)
{
    if (!box_count)
        return true;
    if (box_count > CK_MAX_BOXES)
        box_count = CK_MAX_BOXES;
    map_index *all = map_index_create(maps, map_count < CK_MAX_MAPS ? map_count : CK_MAX_MAPS);
    placed_box *made = malloc(box_count * sizeof *made);
    bool done = all && made;
    size_t used = 0;
    for (size_t i = 0; done && i < box_count; i++)
        if (!place_box(all, boxes + i, made + used))
            lost(to, boxes[i].launch);
        else if (made[used].extent.bytes)
            used++;
    page_writer in = page_writer_of(into);
    done = done && write_boxes(&in, made, used);
    page_writer_free(&in);
    free(made);
    map_index_free(all);
    return done;
}
