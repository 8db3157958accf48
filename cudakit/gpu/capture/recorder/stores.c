#include "stores.h"

#include <stdlib.h>
#include <string.h>

#include "allocations.h"
#include "kernels.h"
#include "table.h"

/* Of a tensor with gaps in several dimensions, more rows than this are taken as one piece. */
#define MOST_ROWS 4096

static bool reserve(store_set *set)
{
    if (set->count < set->room)
        return true;
    size_t room = set->room ? 2 * set->room : 64;
    store_map *moved = realloc(set->maps, room * sizeof *moved);
    if (!moved)
        return false;
    set->maps = moved;
    set->room = room;
    return true;
}

/* Where a tensor ends, false where no address does. */
static bool end_of(const tensor_map *map, uint64_t *end)
{
    bool fits = !__builtin_add_overflow(map->address, map->strides[0], end);
    for (unsigned i = 0; fits && i < map->rank; i++) {
        uint64_t length;
        fits = !__builtin_mul_overflow(map->dims[i] - 1, map->strides[i], &length) &&
               !__builtin_add_overflow(*end, length, end);
    }
    return fits;
}

/* Whether words among the parameters are a map, and not something that looks like one: its tensor lies in what
 * is allocated. */
static bool is_map(const ck_u64 content[CK_MAP_WORDS])
{
    tensor_map map;
    uint64_t end;
    const allocation *in = content[0] % 16 ? NULL : allocations_find(content[0]);
    if (!in || !tensor_map_of(content, &map) || map.rank < 2)
        return false;
    for (unsigned i = 1; i < map.rank; i++)
        if (map.dims[i] > 1 && map.strides[i] < map.strides[0])
            return false;
    return end_of(&map, &end) && end <= in->hi;
}

bool stores_add(store_set *set, uint32_t launch, const struct kernel_layout *layout, void **parameters,
                void **extra)
{
    ck_u64 content[CK_MAP_WORDS];
    size_t before = set->count;
    for (size_t i = 0; kernels_words(layout, parameters, extra, i, content, CK_MAP_WORDS) >= 0; i++) {
        if (!is_map(content))
            continue;
        if (!reserve(set)) {
            set->count = before;
            break;
        }
        store_map *added = set->maps + set->count++;
        added->launch = launch;
        memcpy(added->content, content, sizeof content);
    }
    return set->count > before;
}

/* --- those that are loaded by --------------------------------------------------------------------- */

static uint64_t use_key(uint32_t launch, uint32_t place)
{
    return (uint64_t)launch << 17 | (uint64_t)place << 1 | 1;
}

static bool loads_by(const store_map *of, const table *uses, const ck_map *maps, size_t map_count)
{
    for (size_t i = 0; i < map_count; i++)
        if (!memcmp(maps[i].content, of->content, sizeof of->content) &&
            table_get(uses, use_key(of->launch, maps[i].place)))
            return true;
    return false;
}

static int by_launch(const void *one, const void *other)
{
    uint32_t a = ((const store_map *)one)->launch, b = ((const store_map *)other)->launch;
    return (a > b) - (a < b);
}

bool stores_settle(store_set *set, const ck_map *maps, size_t map_count, const ck_box *boxes, size_t box_count)
{
    table uses = {0};
    for (size_t i = 0; set->count && i < box_count; i++)
        if (boxes[i].mode == CK_READ && table_put(&uses, use_key(boxes[i].launch, boxes[i].map), 1)) {
            table_clear(&uses);
            return false;
        }
    for (size_t i = 0; i < set->count; i++)
        set->maps[i].loaded = loads_by(set->maps + i, &uses, maps, map_count);
    table_clear(&uses);
    if (set->count)
        qsort(set->maps, set->count, sizeof *set->maps, by_launch);
    return true;
}

/* --- rows ----------------------------------------------------------------------------------------- */

void stores_rows(const store_map *of,
                 void (*row)(void *to, uint64_t lo, uint64_t bytes, uint64_t stride, uint64_t count), void *to)
{
    tensor_map map;
    uint64_t end;
    if (!tensor_map_of(of->content, &map) || !end_of(&map, &end))
        return;
    unsigned first = 1;
    uint64_t bytes = map.dims[0] * map.strides[0], outer = 1;
    while (first < map.rank && (map.strides[first] == bytes || map.dims[first] == 1))
        bytes *= map.dims[first++];
    for (unsigned i = first + 1; i < map.rank; i++)
        outer *= map.dims[i];
    if (first == map.rank) {
        row(to, map.address, bytes, 0, 1);
        return;
    }
    if (outer > MOST_ROWS || map.strides[first] < bytes) {
        row(to, map.address, end - map.address, 0, 1);
        return;
    }
    for (uint64_t i = 0; i < outer; i++) {
        uint64_t lo = map.address, rest = i;
        for (unsigned d = first + 1; d < map.rank; rest /= map.dims[d++])
            lo += rest % map.dims[d] * map.strides[d];
        row(to, lo, bytes, map.strides[first], map.dims[first]);
    }
}
